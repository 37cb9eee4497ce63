"""Text for training and measuring: documents in, rows of token ids out, and a held-out part that overlaps nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridize.errors import DataError

Document = tuple[str, str]  # name, text
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".jsonl"}


@dataclass(frozen=True)
class TextSplit:
    """Rows of token ids, int64 [N, context], to train on and to measure on, and a fingerprint of both."""

    train: Tensor
    held_out: Tensor
    fingerprint: str


def read_documents(path: Path) -> Iterator[Document]:
    """Documents of a text file, of a JSONL file with a "text" field, or of every such file in a folder, sorted."""
    if not path.exists():
        raise DataError(
            f"There is no file or folder {path}; give --data a text file, a JSONL file, or a folder of them."
        )
    files = [path]  # or a pipe
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
    if not files:
        raise DataError(f"Folder {path} holds no text files ({', '.join(sorted(TEXT_SUFFIXES))}).")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out.") from None
        # hold_out goes by the name: the same folder in another place must be split in the same way.
        name = path.name if file == path else file.relative_to(path).as_posix()
        if file.suffix != ".jsonl":
            yield name, text
            continue
        # Not splitlines: JSON may hold U+2028 and its like as they are.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{name}:{number}", _text_field(line, number, file)


def _text_field(line: str, number: int, file: Path) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DataError(f'Line {number} of {file} is not a JSON object with a "text" field of text.')
    return text


def hold_out(documents: Iterable[Document], share: int = 20) -> tuple[list[Document], list[Document]]:
    """Split into (train, held out): one document in `share`, by its name's hash; or the longest's last part."""
    train: list[Document] = []
    held: list[Document] = []
    for name, text in documents:
        digest = hashlib.sha256(name.encode()).digest()
        (held if int.from_bytes(digest[:4], "big") % share == 0 else train).append((name, text))
    if not train or not held:
        both = train + held
        if not both:
            raise DataError("There is no text to work on; give --data something to read.")
        name, text = both.pop(max(range(len(both)), key=lambda i: len(both[i][1])))
        cut = len(text) - max(1, len(text) // share)
        train, held = [*both, (name, text[:cut])], [(f"{name} (end)", text[cut:])]
    return train, held


def token_rows(
    documents: Iterable[Document], tokenizer: Any, context: int, limit: int, what: str = "document"
) -> Tensor:
    """Rows int64 [N, context] of at most `limit` tokens: every document in turn, cut to whole rows, tails dropped.

    A row never holds two documents, so neither attention nor state crosses a border; documents are taken in rounds of a
    few rows each, so that a small limit still sees many of them.
    """
    per_round = 4 * context
    streams: list[np.ndarray] = []
    total = 0
    for _, text in documents:
        if total >= 2 * limit:
            break
        # Characters per token are rarely above 8, so a document far longer than the limit is not tokenised whole.
        ids = tokenizer(text[: 8 * limit], add_special_tokens=False, verbose=False)["input_ids"]
        rows = len(ids) // context
        if rows:
            streams.append(np.asarray(ids[: rows * context], dtype=np.int64).reshape(rows, context))
            total += rows * context
    return _rounds(streams, per_round // context, context, what)[: max(1, limit // context)]


def first_rows(documents: Iterable[Document], tokenizer: Any, context: int, count: int) -> Tensor:
    """At most `count` rows int64 [N, context], from as many documents as there are: their beginnings, in order.

    DataError where no document is as long as a row.
    """
    streams: list[np.ndarray] = []
    longest = 0
    for _, text in documents:
        if len(streams) == count:
            break
        ids = tokenizer(text[: 8 * context * count], add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        if len(ids) >= context:
            streams.append(np.asarray(ids[: len(ids) // context * context], dtype=np.int64).reshape(-1, context))
    if not streams:
        raise DataError(
            f"No document is as long as one row of {context} tokens, the longest has {longest}; give longer text or a "
            "smaller --context."
        )
    return _rounds(streams, 1, context, "document")[:count]


def _rounds(streams: list[np.ndarray], step: int, context: int, what: str) -> Tensor:
    """All rows of all documents' [rows, context], `step` rows of each in turn."""
    rounds: list[np.ndarray] = []
    for start in range(0, max((len(s) for s in streams), default=0), step):
        rounds += [s[start : start + step] for s in streams if len(s) > start]
    if not rounds:
        raise DataError(
            f"No {what} is as long as one row of {context} tokens; give longer text or a smaller --context."
        )
    return torch.from_numpy(np.concatenate(rounds))


def prepare(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    context: int,
    tokens: int,
    held_out_tokens: int,
    seed: int,
    held_out: Iterable[Document] | None = None,
) -> TextSplit:
    """Rows to train on, shuffled by `seed`, and held-out rows. DataError where there is too little text."""
    if held_out is None:
        train_documents, held_documents = hold_out(documents)
    else:
        train_documents, held_documents = list(documents), list(held_out)
    held = token_rows(held_documents, tokenizer, context, held_out_tokens, "held-out document")
    train = token_rows(train_documents, tokenizer, context, tokens)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    train = train[order]
    digest = hashlib.sha256(train.numpy().tobytes() + held.numpy().tobytes()).hexdigest()[:16]
    return TextSplit(train, held, digest)
