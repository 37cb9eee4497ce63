"""Where local documents come from: text, JSONL, Parquet and pre-tokenised files, and folders of them.

A corpus is checked and measured when it is opened, and then read in any order, by section: a long document would
otherwise fill many rows in succession.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hybridize.errors import DataError
from hybridize.tasks.text import TEXT_SUFFIXES

Content = str | list[dict[str, Any]] | np.ndarray  # text, the messages of a conversation, or token ids
ARRAY_SUFFIXES = {".npy", ".u16", ".u32"}
SUFFIXES = TEXT_SUFFIXES | ARRAY_SUFFIXES | {".parquet"}
_BACK = 200  # characters that a border between two sections may move back, to stand before a blank


@dataclass(frozen=True)
class Document:
    """A document, or a section of one; `name` is the whole document's."""

    name: str
    content: Content

    def digest(self) -> bytes:
        """Equal for equal contents."""
        content = self.content
        if isinstance(content, np.ndarray):
            raw = content.astype("<i8").tobytes()
        else:
            raw = (content if isinstance(content, str) else json.dumps(content)).encode("utf-8", "surrogatepass")
        return hashlib.sha256(raw).digest()[:16]


class Corpus(Protocol):
    """Documents of one kind that can be read in any order.

    lengths, int64 [N]: their characters or, where `per_token` is 1, tokens; 0 for a conversation, which is not cut.
    """

    lengths: np.ndarray
    per_token: int
    fingerprint: str

    def title(self, index: int) -> str:
        """The document's name, which says on which side of the held-out split it is."""

    def read(self, index: int, start: int, stop: int) -> Content:
        """One section of a document; a conversation whole."""


class Texts:
    """Named texts, in memory."""

    per_token = 4  # characters; roughly, for the size of a section

    def __init__(self, texts: Sequence[tuple[str, str]]):
        self.texts = [(name, text) for name, text in texts if text.strip()]
        self.lengths = np.array([len(text) for _, text in self.texts], dtype=np.int64)
        digest = hashlib.sha256()
        for name, text in self.texts:
            digest.update(f"{name}\n{text}\n".encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def title(self, index: int) -> str:
        return self.texts[index][0]

    def read(self, index: int, start: int, stop: int) -> str:
        return section(self.texts[index][1], start, stop)


class JsonLines:
    """A JSONL file: one document a line, text or a conversation, read where it stands."""

    per_token = 4

    def __init__(self, file: Path, name: str, text_field: str | None):
        self.file, self.name, self.text_field = file, name, text_field
        numbers, offsets, lengths = array("q"), array("q"), array("q")
        digest, offset = hashlib.sha256(), 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                digest.update(line)
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    content = self._parse(line, number)
                    if content:
                        numbers.append(number)
                        offsets.append(offset)
                        lengths.append(len(content) if isinstance(content, str) else 0)
                offset += len(line)
        self.numbers, self.offsets = numbers, offsets
        self.lengths = np.array(lengths, dtype=np.int64)
        self.fingerprint = digest.hexdigest()

    def _parse(self, line: bytes, number: int) -> Content:
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"Line {number} of {self.file} is not UTF-8 text (byte {error.start} of the line); convert it, or "
                "leave it out."
            ) from None
        except ValueError:
            record = None
        return content_of(record, self.text_field, f"Line {number} of {self.file}")

    def title(self, index: int) -> str:
        return f"{self.name}:{self.numbers[index]}"

    def read(self, index: int, start: int, stop: int) -> Content:
        with self.file.open("rb") as file:
            file.seek(self.offsets[index])
            content = self._parse(file.readline(), self.numbers[index])
        return section(content, start, stop) if isinstance(content, str) else content


def content_of(record: Any, text_field: str | None, where: str) -> Content:
    """The text or the messages of a record: its `text_field`, or else "text" or "messages"; DataError without."""
    names = [text_field] if text_field else ["text", "messages"]
    for name in names:
        value = record.get(name) if isinstance(record, dict) else None
        if isinstance(value, str):
            return value.strip() and value
        if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
            return value
    wanted = " or ".join(f'"{name}"' for name in names)
    raise DataError(
        f"{where} is not an object with a field {wanted} of text or of messages, each with a role and content; name "
        "the right field with --text-field."
    )


def section(text: str, start: int, stop: int) -> str:
    """Characters start to stop of a text, each border moved back to before a blank where there is one near."""
    return text[_border(text, start) : _border(text, stop)]


def _border(text: str, at: int) -> int:
    if at <= 0 or at >= len(text):
        return at
    low = max(1, at - _BACK)
    blank = max(text.rfind(" ", low, at + 1), text.rfind("\n", low, at + 1))
    return blank if blank > 0 else at


def open_local(path: Path, text_field: str | None, vocabulary: int, boundary: int | None) -> list[Corpus]:
    """The corpora of a file or of all files in a folder, checked.

    vocabulary: token ids of pre-tokenised files must be below it; boundary: the id that ends a document in them.
    DataError where a file is missing, unreadable, or of another kind.
    """
    from hybridize.priming.tokenised import TokenIds

    if path.is_file():
        files = [path]
    else:
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    texts: list[tuple[str, str]] = []
    corpora: list[Corpus] = []
    for file in files:
        # The held-out split goes by the name: the same folder in another place must be split in the same way.
        name = path.name if file == path else file.relative_to(path).as_posix()
        if file.suffix == ".jsonl":
            corpora.append(JsonLines(file, name, text_field))
        elif file.suffix == ".parquet":
            from hybridize.priming.parquet import Parquet

            corpora.append(Parquet(file, name, text_field))
        elif file.suffix in ARRAY_SUFFIXES:
            corpora.append(TokenIds(file, name, vocabulary, boundary))
        elif file.suffix == ".json":
            raise DataError(f"{file} is JSON, which is read as .jsonl only; write each object of it on a line.")
        else:
            try:
                texts.append((name, file.read_text(encoding="utf-8-sig")))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out (token ids are read "
                    f"from {', '.join(sorted(ARRAY_SUFFIXES))} files)."
                ) from None
    if texts:
        corpora.insert(0, Texts(texts))
    if not files:
        raise DataError(f"Folder {path} holds no documents ({', '.join(sorted(SUFFIXES))}).")
    return _not_empty(corpora, str(path))


def _not_empty(corpora: list[Corpus], where: str) -> list[Corpus]:
    kept = [corpus for corpus in corpora if len(corpus.lengths)]
    if not kept:
        raise DataError(f"There is no text in {where}; give --data something to read.")
    return kept
