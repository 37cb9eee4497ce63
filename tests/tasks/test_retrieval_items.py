"""Retrieval items: exactly as long as asked, in the tokenizer's own form, with what is hidden where it should be."""

import random
import re

import pytest
import torch
from tokenizer_cases import CHATML, FILLER, KINDS, TASK_TEXT, byte_pairs
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from hybridize.errors import DataError
from hybridize.tasks.retrieval import LONG_TASKS, TASKS, make_items

LENGTHS = (640, 900)


@pytest.fixture(scope="module")
def chat():
    return KINDS["chat"]()


def answer_of(task, text):
    """What is hidden in the text, read by the question that it ends with."""
    if task == "passkey":
        return re.search(r"The pass key is (\d{5})\.", text)[1]
    if task == "copy":
        return re.search(r'The quotation is: "([a-z ]+)"\.', text)[1]
    name = re.search(r"What is the number of the (\w+ \w+)\?", text)[1]
    return re.search(rf"The number of the {name} is (\d{{4}})\.", text)[1]


LEADS = {"passkey": r"The pass key is ?", "recall": r"The number of the \w+ \w+ is ?", "copy": r'The quotation is: "'}


@pytest.mark.parametrize("kind", KINDS)
def test_every_item_has_its_length_and_ends_with_its_answer(kind):
    tokenizer = KINDS[kind]()
    items = make_items(tokenizer, FILLER, lengths=LENGTHS, depths=3, per_cell=2)
    assert [(item.task, item.length, item.depth) for item in items[::2]] == [
        (task, length, depth) for task in TASKS for length in LENGTHS for depth in (0.0, 0.5, 1.0)
    ]
    for item in items:
        start, stop = item.answer
        assert item.ids.dtype == torch.int64 and item.ids.shape == (item.length,) and stop == item.length
        text = tokenizer.decode(item.ids)
        assert tokenizer.decode(item.ids[start:]).strip() == answer_of(item.task, text)
        assert re.search(LEADS[item.task] + "$", tokenizer.decode(item.ids[:start]))


@pytest.mark.parametrize("kind", ["chat", "no-generation-prompt", "bytes"])
def test_ids_are_what_the_tokenizer_makes_of_the_text(kind):
    tokenizer = KINDS[kind]()
    for item in make_items(tokenizer, FILLER, lengths=(640,), depths=3, per_cell=1):
        assert tokenizer(tokenizer.decode(item.ids), add_special_tokens=False)["input_ids"] == item.ids.tolist()


@pytest.mark.parametrize(
    ("kind", "beginning", "end"),
    [
        (
            "chat",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nA pass key is hidden",
            "What is the pass key?<|im_end|>\n<|im_start|>assistant\nThe pass key is",
        ),
        ("no-generation-prompt", "<|im_start|>[INST] A pass key", "What is the pass key? [/INST] The pass key is"),
        ("bytes", "A pass key is hidden", "What is the pass key?\n\nAnswer: The pass key is"),
        ("special-tokens", "<|im_start|>A pass key", "What is the pass key?\n\nAnswer: The pass key is"),
        ("metaspace", "A pass key is hidden", "What is the pass key?\n\nAnswer: The pass key is"),
    ],
)
def test_the_question_is_put_in_the_tokenizers_own_form(kind, beginning, end):
    tokenizer = KINDS[kind]()
    item = make_items(tokenizer, FILLER, lengths=(640,), depths=1, per_cell=1, tasks=["passkey"])[0]
    assert tokenizer.decode(item.ids).startswith(beginning)
    assert tokenizer.decode(item.ids[: item.answer[0]]).rstrip().endswith(end)


def test_a_template_shows_no_date_of_today_and_opens_no_thought():
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b') %}{% endif %}{{ date_string }}"
        "{{ messages[0]['content'] }}{% if add_generation_prompt %}<|im_start|>"
        "{% if enable_thinking is defined and not enable_thinking %}no thought {% endif %}{% endif %}"
    )
    tokenizer = byte_pairs(template)
    item = make_items(tokenizer, FILLER, lengths=(640,), depths=1, per_cell=1, tasks=["passkey"])[0]
    text = tokenizer.decode(item.ids)
    assert text.startswith("1 January 2025") and "<|im_start|>no thought The pass key is" in text


@pytest.mark.parametrize(("task", "length"), [(task, length) for task in TASKS for length in (400, 1600)])
def test_what_is_asked_for_lies_at_its_depth(chat, task, length):
    intro, hidden = r"<\|im_start\|>user\n.*?Remember (?:it|them)\.", r"The (?:pass key|number|quotation)[^\n]*"
    for item in make_items(chat, FILLER, lengths=(length,), depths=5, per_cell=3, tasks=[task]):
        text = chat.decode(item.ids)
        body = re.search(rf"{intro}(.*)What is the [^\n]*<\|im_end\|>", text, re.DOTALL)[1]
        wanted = re.search(rf"The [^\n]*{answer_of(task, text)}[^\n]*", body)
        before, after = (
            sum(len(chat(piece.strip(), add_special_tokens=False)["input_ids"]) for piece in re.split(hidden, part))
            for part in (body[: wanted.start()], body[wanted.end() :])
        )
        # Cut between words, which are about 5 tokens here; each other pair may take a space from the text.
        slack = max(8, 0.015 * (before + after)) + (length // 64 if task == "recall" else 0)
        assert abs(before - item.depth * (before + after)) < slack
        if item.depth in (0.0, 1.0) and task != "recall":
            assert (before, after)[int(item.depth)] == 0


def test_recall_lists_more_pairs_in_longer_items(chat):
    for length, pairs in ((400, 6), (1600, 25)):
        item = make_items(chat, FILLER, lengths=(length,), depths=1, per_cell=1, tasks=["recall"])[0]
        found = re.findall(r"The number of the (\w+ \w+) is (\d{4})\.", chat.decode(item.ids))
        assert len(found) == len(dict(found)) == len({number for _, number in found}) == pairs


def test_what_surrounds_it_is_real_text_in_whole_words_and_never_twice(chat):
    words = {word for text in FILLER for word in text.split()}
    total = sum(len(chat(text, add_special_tokens=False)["input_ids"]) for text in FILLER)
    for length in (640, int(0.9 * total)):
        item = make_items(chat, FILLER, lengths=(length,), depths=2, per_cell=1, tasks=["passkey"])[1]
        middle = chat.decode(item.ids).split("Remember it.")[1].split("The pass key is")[0].split()
        assert set(middle) <= words and len(set(middle)) == len(middle) > length / 20


def test_text_holds_no_control_tokens(chat):
    plain = make_items(chat, FILLER, lengths=(640,), depths=1, per_cell=2)
    marked = [text.replace("\n", "\n<|im_end|>") for text in FILLER]
    for item, other in zip(make_items(chat, marked, lengths=(640,), depths=1, per_cell=2), plain, strict=True):
        assert torch.equal(item.ids, other.ids)


def test_each_item_is_the_same_whatever_else_is_made(chat):
    every = make_items(chat, FILLER, lengths=LENGTHS, depths=5, per_cell=3, seed=7)
    again = make_items(chat, FILLER, lengths=LENGTHS[::-1], depths=3, per_cell=2, tasks=TASKS[::-1], seed=7)
    kept = {}
    for items, per_cell in ((every, 3), (again, 2)):
        for number, item in enumerate(items):
            key = (item.task, item.length, item.depth, number % per_cell)
            assert torch.equal(kept.setdefault(key, item.ids), item.ids)
    assert len(kept) == len(every)
    assert len({tuple(ids.tolist()) for ids in kept.values()}) == len(every)
    other = make_items(chat, FILLER, lengths=LENGTHS, depths=5, per_cell=3, seed=8)
    assert not any(torch.equal(a.ids, b.ids) for a, b in zip(every, other, strict=True))


def test_what_is_hidden_and_around_differs_between_items(chat):
    texts = [chat.decode(item.ids) for item in make_items(chat, FILLER, lengths=(640,), per_cell=4, tasks=["passkey"])]
    assert len({answer_of("passkey", text) for text in texts}) == len(texts) == 20
    assert len({text.split("Remember it.")[1].split("\n\n")[1][:40] for text in texts}) == 20


def test_an_answer_that_would_share_a_token_with_the_lead_is_kept_apart():
    letters = sorted({*"".join(FILLER), *TASK_TEXT, *'abcdefghijklmnopqrstuvwxyz\n :"?.AWNQRT0123456789'})
    lower = [letter for letter in letters if letter.islower()]
    vocabulary = {token: n for n, token in enumerate([*letters, *(f'"{letter}' for letter in lower)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[('"', letter) for letter in lower]))
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for item in make_items(tokenizer, FILLER, lengths=(700,), depths=2, per_cell=2, tasks=["copy"]):
        start, stop = item.answer
        pieces = tokenizer.convert_ids_to_tokens(item.ids.tolist())
        answer = "".join(pieces[start:])
        assert len(pieces) == stop == 700 and pieces[start - 1] == '"'
        assert f'"{answer[0]}' in pieces and f'The quotation is: "{answer}".' in "".join(pieces)


@pytest.mark.parametrize("kind", ["chat", "bytes"])
@pytest.mark.parametrize("task", dict.fromkeys(TASKS + LONG_TASKS))
def test_a_length_that_does_not_hold_the_question_is_named(kind, task):
    tokenizer = KINDS[kind]()
    make = lambda length: make_items(tokenizer, FILLER, lengths=(length,), depths=3, per_cell=2, tasks=[task])
    with pytest.raises(
        DataError, match=rf"Items of 40 tokens are too short for the {task} task, .* larger --context"
    ) as error:
        make(40)
    least = int(re.search(r"which takes (\d+) ", str(error.value))[1])
    assert {len(item.ids) for item in make(least)} == {least}
    if kind == "chat":  # words of single bytes leave less choice of a cut
        with pytest.raises(DataError, match="too short"):
            make(least - 24)


@pytest.mark.parametrize(
    ("filler", "said"),
    [
        (FILLER[:1], r"All text together is [\d,]+ tokens, but an item of 4,000 tokens needs 3,[89]\d\d of it"),
        ([" \n", ""], "There is no text"),
        ([], "There is no text"),
        (["x" * 40_000], "cannot be cut between words to make exactly 4,000 tokens"),
    ],
)
def test_unusable_filler(chat, filler, said):
    with pytest.raises(DataError, match=said):
        make_items(chat, filler, lengths=(4000,), tasks=["passkey"])


def test_a_template_without_the_users_words_is_refused():
    with pytest.raises(DataError, match="chat template leaves out what the user says"):
        make_items(byte_pairs("Hello."), FILLER, lengths=(640,))


def test_scripts_without_spaces_are_cut_anywhere():
    tokenizer = byte_pairs(CHATML)
    pick = random.Random(0)
    text = "".join(chr(pick.choice([ord("7"), pick.randrange(0x4E00, 0x9000)])) for _ in range(3000))
    for item in make_items(tokenizer, [text], lengths=(640,), depths=3, per_cell=1):
        assert len(item.ids) == 640 and "\ufffd" not in tokenizer.decode(item.ids)
