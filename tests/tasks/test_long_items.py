"""Items for reading past the native context: what they hide, what answers them, and where their text lies."""

import random
import re

import pytest
import torch
from tokenizer_cases import CHATML, FILLER, KINDS, TASK_TEXT, Slow, byte_pairs
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hybridize.tasks import retrieval
from hybridize.tasks.facts import SENTENCES, tell
from hybridize.tasks.prompts import Filler
from hybridize.tasks.retrieval import LONG_TASKS, TASKS, make_items

ALL = dict.fromkeys(TASKS + LONG_TASKS)
MOVED, TOOK = r"walked over to|came into|went across to|arrived in", r"took|got hold of|now carries"
LEFT = r"put down|let go of|left behind"


@pytest.fixture(scope="module")
def chat():
    return byte_pairs(CHATML)


@pytest.fixture
def asked(monkeypatch):
    """The questions that items are made of, in order."""
    found = []
    fill = Filler.fill

    def noted(filler, question, length, place):
        found.append(question)
        return fill(filler, question, length, place)

    monkeypatch.setattr(Filler, "fill", noted)
    return found


def places_of(thing, sentences):
    """Where a thing was, in order, as far as the sentences tell: another reading of them than the story's own."""
    where, holder, lies, trace = {}, None, None, []
    for sentence in sentences:
        if found := re.fullmatch(rf"(\w+) (?:{MOVED}) the (\w+)\.", sentence):
            where[found[1]] = found[2]
        elif found := re.fullmatch(rf"(\w+) (?:{TOOK}) the {thing}\.", sentence):
            holder = found[1]
        elif found := re.fullmatch(rf"(\w+) (?:{LEFT}) the {thing}\.", sentence):
            holder, lies = None, where.get(found[1])
        elif found := re.fullmatch(rf"\w+ handed the {thing} to (\w+)\.", sentence):
            holder = found[1]
        else:
            assert re.fullmatch(rf"\w+ (?:{TOOK}|{LEFT}|handed) the \w+(?: to \w+)?\.", sentence), sentence
        lies = where.get(holder, lies) if holder else lies
        if lies is not None and trace[-1:] != [lies]:
            trace.append(lies)
    return trace


def answer_by(question, sentences):
    """The answer as far as the sentences give it, else None."""
    if found := re.fullmatch(r"Where is the (\w+) now\?", question):
        return next(reversed(places_of(found[1], sentences)), None)
    thing, place = re.fullmatch(r"Where was the (\w+) before it was in the (\w+)\?", question).groups()
    trace = places_of(thing, sentences)
    assert trace.count(place) <= 1
    number = trace.index(place) if place in trace else 0
    return trace[number - 1] if number else None


STORIES = [tell(random.Random(number)) for number in range(400)]


def test_a_storys_answer_follows_from_all_of_it_and_from_its_supporting_sentences_only():
    for story in STORIES:
        assert len(story.sentences) == SENTENCES and story.supporting == sorted(story.supporting)
        assert answer_by(story.question, story.sentences) == story.answer
        supporting = [story.sentences[number] for number in story.supporting]
        assert answer_by(story.question, supporting) == story.answer
        for left_out in range(len(supporting)):
            assert answer_by(story.question, supporting[:left_out] + supporting[left_out + 1 :]) != story.answer


def test_stories_ask_for_two_and_for_three_facts_and_mislead():
    count = [len(story.supporting) for story in STORIES]
    assert 0.4 < count.count(2) / len(count) < 0.6 and count.count(2) + count.count(3) == len(count)
    answers = [story.answer for story in STORIES]
    assert max(answers.count(place) for place in set(answers)) < 0.2 * len(answers)
    last = [re.findall(rf"(?:{MOVED}) the (\w+)\.", " ".join(story.sentences))[-1] for story in STORIES]
    assert sum(map(str.__eq__, last, answers)) < 0.4 * len(answers)  # not simply where somebody went last
    words = " ".join(" ".join(story.sentences) for story in STORIES)
    for verb in f"{MOVED}|{TOOK}|{LEFT}|handed".split("|"):
        assert f" {verb} the " in words
    supporting = " ".join(story.sentences[number] for story in STORIES for number in story.supporting)
    assert re.search(rf" (?:{LEFT}) ", supporting) and re.search(rf" (?:{TOOK}) ", supporting)


def test_several_keys_are_hidden_however_long_the_text(chat):
    for length in (900, 2000):
        for item in make_items(chat, FILLER, lengths=(length,), depths=2, per_cell=2, tasks=["multikey"]):
            text = chat.decode(item.ids)
            found = dict(re.findall(r"The number of the (\w+ \w+) is (\d{4})\.", text))
            assert len(found) == len(set(found.values())) == 8
            name = re.search(r"What is the number of the (\w+ \w+)\?", text)[1]
            assert chat.decode(item.ids[item.answer[0] :]).strip() == found[name]


def test_all_values_of_a_key_are_asked_for_in_order(chat):
    for item in make_items(chat, FILLER, lengths=(900,), depths=5, per_cell=3, tasks=["multivalue"]):
        text = chat.decode(item.ids)
        found = re.findall(r"A number of the (\w+ \w+) is (\d{4})\.", text)
        (name,) = {name for name, _ in found}
        assert len({number for _, number in found}) == len(found) == 4
        assert f"What are all the numbers of the {name}, in the order" in text
        assert chat.decode(item.ids[item.answer[0] :]).strip() == ", ".join(number for _, number in found)


def test_a_story_is_hidden_in_its_order_and_answers_the_question(chat):
    for item in make_items(chat, FILLER, lengths=(1200,), depths=3, per_cell=5, tasks=["facts"]):
        text = chat.decode(item.ids)
        sentences = re.findall(r"^[A-Z]\w+ (?!are)[a-z ]+ the [^\n]*\.$", text, re.MULTILINE)
        assert len(sentences) == SENTENCES
        question = re.search(r"^Where [^\n]*\?", text, re.MULTILINE)[0]
        assert chat.decode(item.ids[item.answer[0] :]).strip() == answer_by(question, sentences)


@pytest.mark.parametrize(("task", "length"), [(task, length) for task in LONG_TASKS for length in (800, 2400)])
def test_the_first_of_what_is_asked_for_lies_at_its_depth(chat, asked, monkeypatch, task, length):
    stories = []
    monkeypatch.setattr(retrieval, "tell", lambda pick: stories.append(tell(pick)) or stories[-1])
    spread = []
    items = make_items(chat, FILLER, lengths=(length,), depths=5, per_cell=3, tasks=[task])
    for number, (item, question) in enumerate(zip(items, asked, strict=True)):
        body = chat.decode(item.ids[slice(*item.body)])
        # A sentence may be told twice in a story, so each is looked for after the one before it.
        cuts, end = [], 0
        for _, sentence in question.hidden:
            cuts.append((body.index(sentence, end), end))
            end = cuts[-1][0] + len(sentence)
        pieces = [body[end:start] for start, end in cuts] + [body[end:]]
        counts = [len(chat(piece.strip(), add_special_tokens=False)["input_ids"]) for piece in pieces]
        total = sum(counts)
        if task == "facts":
            first = stories[number].supporting[0]
        elif task == "multikey":
            wanted = re.search(r"of the (\w+ \w+)\?", question.question)[1]
            first = next(n for n, (_, sentence) in enumerate(question.hidden) if wanted in sentence)
        else:
            first = 0
        share = sum(counts[: first + 1]) / total
        assert share == pytest.approx(item.depth, abs=0.01 + 16 / total)  # cut between words, at every needle
        assert share == item.depth or item.depth not in (0.0, 1.0) or task == "multikey"
        places = [sum(counts[: n + 1]) / total for n in range(len(question.hidden))]
        spread.append(places[-1] - places[first])
        if task == "multivalue":  # the others lie in the second, third and last quarter of what follows
            for n, place in enumerate(places[1:], 1):
                after = (place - share) / (1 - share) if share < 1 else 0.0
                assert n / 4 - 0.05 <= after <= (n + 1) / 4 + 0.05 or share > 0.9
    if task in ("multivalue", "facts"):
        assert max(spread) > 0.6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ALL)
def test_an_item_is_instructions_then_text_then_the_question(asked, kind, task):
    tokenizer = KINDS[kind]()
    length = 1500 if kind == "bytes" else 900
    items = make_items(tokenizer, FILLER, lengths=(length,), depths=3, per_cell=1, tasks=[task])
    for item, question in zip(items, asked, strict=True):
        assert 0 < item.body[0] < item.body[1] < item.answer[0] < item.answer[1] == length
        check_parts(tokenizer, item.ids, item.body, question, exact=kind != "metaspace")


def check_parts(tokenizer, ids, body, question, exact=True):
    parts = [tokenizer.decode(part) for part in ids.tensor_split(body)]
    if exact:
        assert "".join(parts) == tokenizer.decode(ids)
    else:  # a space between two tokens is lost where they are decoded apart
        assert "".join("".join(parts).split()) == "".join(tokenizer.decode(ids).split())
    assert parts[0].strip().endswith(question.intro)
    place = 0
    for _, sentence in question.hidden:
        place = parts[1].index(sentence, place) + len(sentence)
    assert parts[2].strip().startswith(question.question)


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, Slow], ids=["fast", "slow"])
@pytest.mark.parametrize(
    "merges",
    [
        [("\n", "\n")],
        [(".", "\n"), (".\n", "\n")],
        [("\n", "\n"), *(("\n\n", c) for c in "ATWabcdefghijklmnopqrstuvwxyz")],
    ],
    ids=["apart", "with-the-end", "with-the-next-word"],
)
def test_a_token_across_a_border_tears_nothing(asked, wrap, merges):
    letters = sorted(
        {*"".join(FILLER), *TASK_TEXT, *'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\n :"?.,0123456789'}
    )
    tokens = [*letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages[0]['content'] }}")
    items = make_items(wrap(fast), FILLER, lengths=(1500,), depths=2, per_cell=2, tasks=["passkey", "multivalue"])
    for item, question in zip(items, asked, strict=True):
        check_parts(fast, item.ids, item.body, question)


def test_each_item_is_the_same_whatever_else_is_made(chat):
    every = make_items(chat, FILLER, lengths=(800, 900), depths=3, per_cell=2, tasks=LONG_TASKS, seed=7)
    again = make_items(chat, FILLER, lengths=(900,), depths=2, per_cell=1, tasks=LONG_TASKS[::-1], seed=7)
    key = lambda item, number, per_cell: (item.task, item.length, item.depth, number % per_cell)
    kept = {key(item, number, 2): item for number, item in enumerate(every)}
    for number, item in enumerate(again):
        other = kept[key(item, number, 1)]
        assert torch.equal(item.ids, other.ids) and (item.body, item.answer) == (other.body, other.answer)
    assert len({tuple(item.ids.tolist()) for item in every}) == len(every)
    other = make_items(chat, FILLER, lengths=(800, 900), depths=3, per_cell=2, tasks=LONG_TASKS, seed=8)
    assert not any(torch.equal(a.ids, b.ids) for a, b in zip(every, other, strict=True))
