"""Local data: what is read, and what bad data are told."""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from data_case import chat, documents, stream, text, tokenizer

from hybridize.errors import DataError, UsageError
from hybridize.priming.corpus import Texts, open_local, section
from hybridize.priming.encoding import Encoder
from hybridize.priming.feeds import LocalFeed


def read_all(path, text_field=None) -> dict:
    """Name -> contents of all sections of all documents."""
    found: dict = {}
    for corpus in open_local(path, text_field, 300, 257):
        for index, length in enumerate(corpus.lengths):
            found[corpus.title(index)] = corpus.read(index, 0, int(length))
    return found


def test_a_folder_of_every_kind(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.md").write_text("# Title\n")
    (tmp_path / "z.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "not-text.bin").write_bytes(b"\xff")
    lines = [{"text": "one"}, {"messages": chat(1)}, {"text": ""}, {"text": "a\u2028b"}]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    np.array([5, 257, 6, 7, 257, 8], "<u2").tofile(tmp_path / "d.u16")
    found = read_all(tmp_path)
    ids = {name: found.pop(name).tolist() for name in list(found) if name.startswith("d.")}
    assert ids == {"d.u16:1": [5, 257], "d.u16:2": [6, 7, 257], "d.u16:3": [8]}
    assert found == {
        "b/a.md": "# Title\n",
        "z.txt": "with a mark",
        "c.jsonl:1": "one",
        "c.jsonl:2": chat(1),
        "c.jsonl:4": "a\u2028b",
    }


def test_a_field_by_name(tmp_path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps({"text": "no", "story": "yes", "talk": chat(2)}))
    assert list(read_all(path, "story").values()) == ["yes"]
    assert list(read_all(path, "talk").values()) == [chat(2)]


@pytest.mark.parametrize("size", [7, 64, 1000, 10**6])
def test_sections_are_the_text(size) -> None:
    whole = "".join(text(i) for i in range(50)) + "x" * 700 + " end"
    borders = [*range(0, len(whole), size), len(whole)]
    parts = [section(whole, a, b) for a, b in pairwise(borders)]
    assert "".join(parts) == whole
    if 200 < size < len(whole):
        assert sum(part[:1].isspace() for part in parts[1:]) >= len(parts) - 3, "words stay whole"


def test_a_long_document_is_shuffled_by_section() -> None:
    feed = LocalFeed([Texts([("long", " ".join(map(str, range(30_000))))])], "here", 64, [0], False)
    sections = [feed.next().content for _ in range(len(feed.table))]
    assert len(sections) > 100 and max(map(len, sections)) <= 4 * 64 * 4 + 200
    assert "".join(sorted(sections, key=lambda part: int(part.split()[1]))).split() != sections
    assert sorted(" ".join(sections).split()) == sorted(map(str, range(30_000)))


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.txt", b"fine \xff", r"a.txt is not UTF-8 text \(byte 5\)"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\xff"}\n', r"Line 2 of .*a.jsonl is not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut', "Line 2 of .*a.jsonl is not an object with a field"),
        ("a.jsonl", b'{"words": "fine"}', r'field "text" or "messages".*--text-field'),
        ("a.jsonl", b'{"messages": [{"from": "human", "value": "hi"}]}', "each with a role"),
        ("a.jsonl", b'{"text": 5}', "not an object with a field"),
        ("a.jsonl", b'[{"text": "x"}]', "not an object with a field"),
        ("a.txt", b" \n\n", "There is no text in .*a.txt"),
        ("a.jsonl", b"\n", "There is no text in .*a.jsonl"),
        ("a.json", b'[{"text": "x"}]', "a.json is JSON, which is read as .jsonl only"),
        ("tokens.bin", b"\xff\xff", r"tokens.bin is not UTF-8 text \(byte 0\).*\.npy, \.u16, \.u32 files"),
        ("a.u16", b"", "There is no text in .*a.u16"),
        ("a.u16", b"\x01\x00\x02", r"a.u16 has 3 bytes.*2-byte"),
        ("a.u32", b"\x01\x00\x00\x00\x0f\x27\x00\x00", "a.u32 holds the token id 9999 at position 1.*0 to 261"),
        ("a.npy", b"not numpy", "a.npy is not a NumPy array"),
    ],
)
def test_bad_files_are_refused_before_anything_is_trained(tmp_path, name, content, message) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for spec in (path, tmp_path):
        with pytest.raises(DataError, match=message if spec == path else "."):
            stream(str(spec))


@pytest.mark.parametrize(
    "array,message",
    [
        (np.zeros((2, 3), int), r"shape \(2, 3\)"),
        (np.zeros(3), "float64"),
        (np.array([1, -4]), "token id -4 at position 1"),
    ],
)
def test_arrays_of_another_kind(tmp_path, array, message) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message):
        stream(str(tmp_path / "a.npy"))


def test_tokens_without_a_boundary_are_one_document(tmp_path) -> None:
    np.arange(200).astype("<u2").tofile(tmp_path / "a.u16")
    one, held = stream(str(tmp_path / "a.u16"), special=False, held_out_tokens=64)
    assert documents(held)[0] == list(range(190, 200)), "the end is held out"
    assert {token for _ in range(9) for ids in documents(one.batch()) for token in ids} == set(range(190))


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("fine <|im_end|> " * 50)
    with pytest.raises(DataError, match=r"The tokenizer gives the id 257 .*ids from 0 to 255"):
        stream(str(tmp_path / "a.txt"), vocabulary=256)
    assert Encoder(tokenizer(), 256).encode([]) == []


@pytest.mark.parametrize("name", ["nothing.txt", "nowhere/some.jsonl", "nowhere", "a/b/c"])
def test_what_is_not_there(name) -> None:
    with pytest.raises(DataError, match=f"There is no file or folder {name};"):
        stream(name)


def test_an_empty_folder_and_a_single_conversation(tmp_path) -> None:
    with pytest.raises(DataError, match=r"holds no documents \(.*\.parquet.*\.u32"):
        stream(str(tmp_path))
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"messages": chat(1)}))
    with pytest.raises(DataError, match=r"a single conversation.*--held-out"):
        stream(str(path))
    path.write_text("".join(json.dumps({"messages": chat(i)}) + "\n" for i in range(2)))
    one, held = stream(str(path), context=256)
    assert held.targets.any() and one.batch().targets.any()


@pytest.mark.parametrize("library,spec", [("pyarrow", "a.parquet"), ("datasets", "owner/name:config")])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, library, spec) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    if spec.endswith("parquet"):
        (tmp_path / spec).write_bytes(b"PAR1")
        spec = str(tmp_path / spec)
    with pytest.raises(UsageError, match=r'pip install "hybridize\[data\]"'):
        stream(spec)


def test_neither_library_is_imported_before_it_is_needed() -> None:
    code = "import sys, hybridize.priming.stream; print([n for n in ('datasets', 'pyarrow') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
