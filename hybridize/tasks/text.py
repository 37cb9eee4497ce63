"""Text to measure on: documents in, rows of token ids out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridize.errors import DataError

Document = tuple[str, str]  # name, text
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".jsonl"}


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
    turns = [[rows[turn] for rows in streams if len(rows) > turn] for turn in range(max(map(len, streams)))]
    return torch.from_numpy(np.stack([row for turn in turns for row in turn][:count]))
