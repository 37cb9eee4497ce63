"""Conversations: what the assistant says, with its end of turn, and nothing else, is to be predicted."""

import json

import pytest
from data_case import LLAMA3, MARKED, QWEN3, SMOLLM2, UNSTABLE, chat, documents, make, stream, tokenizer

from hybridize.errors import DataError
from hybridize.priming.chat import ChatFormat

SYSTEM = [{"role": "system", "content": "Be brief."}]


def spoken(template, messages) -> list[str]:
    """The stretches of tokens that are to be predicted, decoded."""
    fast = tokenizer(template)
    ids, said = ChatFormat(fast, "data").render(messages)
    whole = fast.apply_chat_template(messages, tokenize=False)
    assert fast.decode(ids) == whole
    found: list[list[int]] = []
    for at, token in enumerate(ids.tolist()):
        if said[at]:
            if not at or not said[at - 1]:
                found.append([])
            found[-1].append(token)
    return [fast.decode(part) for part in found]


@pytest.mark.parametrize("before", [[], SYSTEM], ids=["", "system"])
@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize(
    "template,end",
    [(SMOLLM2, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (MARKED, "<|im_end|>")],
    ids=["smollm2", "llama3", "marked"],
)
def test_targets_are_the_answers_and_their_ends(template, end, turns, before) -> None:
    messages = [*before, *chat(3, turns)]
    want = [message["content"] + end for message in messages if message["role"] == "assistant"]
    assert spoken(template, messages) == want


def test_reasoning_before_the_last_answer_only() -> None:
    assert spoken(QWEN3, chat(4, 3)) == [
        "Answer 4.0!!!!<|im_end|>",
        "Answer 4.1!!!!<|im_end|>",
        "<think>\n\n</think>\n\nAnswer 4.2!!!!<|im_end|>",
    ]


def test_a_header_that_opens_a_thought() -> None:
    """As in models that always think: what is asked for differs from what a finished conversation holds."""
    opened = SMOLLM2.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    assert opened != SMOLLM2
    assert spoken(opened, chat(0, 2)) == ["Answer 0.0<|im_end|>", "Answer 0.1<|im_end|>"]


def test_answers_with_blanks_and_special_tokens_of_their_own() -> None:
    messages = [
        {"role": "user", "content": "Say <|im_end|> twice.\n"},
        {"role": "assistant", "content": "  <|im_end|> and\n\n<|im_end|> "},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "Ok"},
    ]
    assert spoken(SMOLLM2, messages) == ["  <|im_end|> and\n\n<|im_end|> <|im_end|>", "Ok<|im_end|>"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Nobody answers."}],
        [{"role": "assistant", "content": "I begin."}],
        [{"role": "user"}, {"role": "assistant", "content": "What?"}],
    ],
    ids=["no answer", "nothing before", "no content"],
)
def test_what_cannot_be_learnt_from_is_none(messages) -> None:
    assert ChatFormat(tokenizer(SMOLLM2), "data").render(messages) is None


def test_a_stream_of_conversations_predicts_answers(tmp_path) -> None:
    one, held = stream(make("chat", tmp_path, 60), context=256, held_out_tokens=1024)
    fast = tokenizer()
    answers = {message["content"] + "<|im_end|>" for i in range(60) for message in chat(i, 1 + i % 3)}
    for batch in (held, one.batch(), one.batch()):
        text = fast.decode(batch.ids[batch.targets])
        said = [part + "<|im_end|>" for part in text.split("<|im_end|>")[:-1]]
        assert len(said) > (1 if batch is held else 4) and set(said) <= answers and text.endswith("<|im_end|>")
        assert not batch.targets[batch.positions == 0].any()
        begins = [ids[0] == 256 or set(ids) == {257} for ids in documents(batch)]
        assert all(begins), "conversations are whole, and followed by padding"


def test_what_is_not_stable_is_skipped_and_counted_and_refused_when_nothing_else_is_there(tmp_path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": chat(i, 2)}) + "\n" for i in range(30)))
    with pytest.raises(DataError, match=r"In no conversation of .*chat.jsonl"):
        stream(str(path), template=UNSTABLE)
    (tmp_path / "held.txt").write_text("Something to measure on. " * 9)
    with pytest.raises(DataError, match=r"In no conversation of .*chat.jsonl"):
        stream(str(path), template=UNSTABLE, held_out=str(tmp_path / "held.txt"))
    with path.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "Hm."}]}) + "\n")
    told: list[str] = []
    one, _ = stream(str(path), held_out=str(tmp_path / "held.txt"), warn=told.append)
    while not told:
        one.batch()
    skipped, documents_read = one.counts["skipped_conversations"], one.counts["documents"]
    # Each epoch has 30 of one kind and one of the other; the last is read in part.
    assert skipped >= 1 and 30 * (skipped - 1) <= documents_read <= 30 * (skipped + 1)


def test_a_model_without_a_template(tmp_path) -> None:
    with pytest.raises(DataError, match=r"chat.jsonl holds conversations.*no chat template"):
        stream(make("chat", tmp_path), template=None)
