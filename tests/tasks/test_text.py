"""Text for the stages: what is read, how it is split and cut, and what is said about text that cannot be used."""

import json

import pytest
import torch
from priming_case import save_text

from hybridize.errors import DataError
from hybridize.tasks.text import first_rows, hold_out, prepare, read_documents, token_rows


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}


def rows_of(documents, **changes):
    options = {"context": 8, "tokens": 400, "held_out_tokens": 80, "seed": 3, **changes}
    return prepare(documents, Letters(), **options)


def lettered(count, length=40):
    """Documents that each repeat one character of their own."""
    return [(f"{i}.txt", chr(1000 + i) * length) for i in range(count)]


def test_no_row_holds_two_documents_and_held_out_documents_are_never_trained_on():
    rows = rows_of(lettered(60, 45), tokens=10_000, held_out_tokens=10_000)
    for part in (rows.train, rows.held_out):
        assert part.dtype == torch.int64 and part.shape[1] == 8
        assert (part == part[:, :1]).all()
    train, held = set(rows.train.unique().tolist()), set(rows.held_out.unique().tolist())
    assert train and held and not train & held
    assert len(train) + len(held) == 60


def test_results_are_chosen_on_other_rows_than_they_are_stated_on():
    rows = rows_of(lettered(400))
    assert len(rows.held_out) == 10 and len(rows.choosing) == 2
    scarce = rows_of([("a", "x" * 400)])  # 20 held-out tokens
    assert len(scarce.held_out) == len(scarce.choosing) == 1
    assert len(rows_of([("a", "x" * 200)]).choosing) == 0


def test_rows_are_the_same_every_time_and_shuffled_by_the_seed():
    one, two, other = rows_of(lettered(60)), rows_of(lettered(60)), rows_of(lettered(60), seed=4)
    assert torch.equal(one.train, two.train) and torch.equal(one.held_out, two.held_out)
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert not torch.equal(one.train, other.train)
    assert torch.equal(one.held_out, other.held_out)


def test_a_small_limit_sees_many_documents():
    rows = token_rows(lettered(9, 40), Letters(), 8, 8 * 10)
    assert len(rows) == 10 and len(rows.unique()) == 3


def test_the_split_does_not_depend_on_where_the_folder_is(tmp_path):
    splits = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        save_text(tmp_path / place / "text")
        splits.append(rows_of(read_documents(tmp_path / place / "text")))
    assert splits[0].fingerprint == splits[1].fingerprint


def test_a_lone_document_gives_its_end():
    train, held = hold_out([("a", "x" * 95 + "y" * 5)])
    assert train == [("a", "x" * 95)] and [text for _, text in held] == ["y" * 5]


def test_the_longest_of_a_few_documents_gives_its_end():
    documents = [("a", "x" * 100), ("b", "short")]
    train, held = hold_out(documents, share=10**9)
    assert sorted(text for _, text in train) == ["short", "x" * 99] and len(held) == 1


def test_jsonl_is_one_document_a_line(tmp_path):
    texts = ["plain", "with a\u2028separator and a\x85too", "line\nbreak"]
    lines = [json.dumps({"text": text, "id": 1}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + lines[0] + "\r\n\n" + "\n".join(lines[1:])).encode())
    assert [text for _, text in read_documents(tmp_path / "a.jsonl")] == texts


def test_a_folder_is_read_in_order_with_what_lies_below_it(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "b" / "a.md").write_text("2")
    (tmp_path / "c.jsonl").write_text('{"text": "3"}')
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "d.bin").write_bytes(b"\xff")
    assert list(read_documents(tmp_path)) == [("a.txt", "1"), ("b/a.md", "2"), ("c.jsonl:1", "3")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8 text \(byte 2\)"),
        ("a.jsonl", b'{"text": "x"}\n\n{"no": 1}\n', "Line 3 of .*a.jsonl"),
        ("a.jsonl", b'{"text": "x"', "Line 1 of"),
        ("a.jsonl", b'{"text": null}', "Line 1 of"),
        ("a.jsonl", b'["text"]', "Line 1 of"),
        ("a.txt", b"short", "No held-out document is as long as one row of 8 tokens"),
        ("a.txt", b"", "No held-out document"),
        ("a.jsonl", b"", "There is no text"),
    ],
)
def test_unusable_text(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        rows_of(read_documents(tmp_path / name))


def test_missing_and_empty_places(tmp_path):
    with pytest.raises(DataError, match=r"There is no file or folder .*nowhere"):
        list(read_documents(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="holds no text files"):
        list(read_documents(tmp_path))


def test_first_rows_are_the_beginnings_of_as_many_documents_as_there_are():
    documents = [("a", "a" * 30), ("short", "s" * 7), ("b", "b" * 8 + "c" * 10), ("d", "d" * 8), ("e", "e" * 8)]
    starts = lambda count: [chr(row[0]) for row in first_rows(documents, Letters(), 8, count)]
    assert starts(3) == ["a", "b", "d"]
    assert starts(6) == ["a", "b", "d", "e", "a", "c"]
    assert starts(99) == ["a", "b", "d", "e", "a", "c", "a"]
    with pytest.raises(DataError, match="No document is as long as one row of 31 tokens"):
        first_rows(documents, Letters(), 31, 3)
