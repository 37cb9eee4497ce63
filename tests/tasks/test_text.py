"""Text for the stages: what is read, how it is cut, and what is said about text that cannot be used."""

import json

import pytest

from hybridize.errors import DataError
from hybridize.tasks.text import first_rows, read_documents


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}


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
        ("a.txt", b"short", "No document is as long as one row of 8 tokens, the longest has 5"),
        ("a.txt", b"", "No document is as long"),
        ("a.jsonl", b"", "No document is as long"),
    ],
)
def test_unusable_text(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        first_rows(read_documents(tmp_path / name), Letters(), 8, 3)


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
