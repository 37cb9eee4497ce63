"""What --data names: sources with weights, each a file, a folder, a dataset of the Hub, or the built-in text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridize.builtin import BUILTIN, builtin_text
from hybridize.errors import DataError, UsageError
from hybridize.priming.corpus import SUFFIXES, Corpus, Texts, open_local
from hybridize.priming.hub import HubDataset

_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[^:/]*){0,2}")


@dataclass(frozen=True)
class Part:
    """One source of a mixture and its weight."""

    name: str
    weight: float


def parse_mixture(specs: Sequence[str]) -> list[Part]:
    """Parts of NAME or NAME=WEIGHT texts; a weight is 1 unless given. UsageError where one is not of that form.

    What exists as a file or folder under the whole text is a name.
    """
    parts = []
    for spec in specs:
        name, mark, number = spec.rpartition("=")
        if not mark or Path(spec).expanduser().exists():
            name, number = spec, "1"
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not (0 < weight < math.inf):
            raise UsageError(
                f"--data {spec!r} is not NAME or NAME=WEIGHT with a weight above 0; give for instance --data texts/=2."
            )
        parts.append(Part(name, weight))
    if not parts:
        raise UsageError("There is no --data; give something to read.")
    names = [part.name for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--data names {twice} twice; give it once, with a weight.")
    return parts


def open_source_of_text(
    name: str,
    vocabulary: int,
    boundary: int | None,
    text_field: str | None,
    side: Literal["train", "held-out"] = "train",
) -> list[Corpus] | HubDataset:
    """The local corpora, or the streamed dataset, of that name; `side` is for the built-in text, which has its own.

    DataError or UsageError where there is none, or it is damaged.
    """
    if name == BUILTIN:
        return [Texts([(document.name, document.text) for document in builtin_text(side)])]
    path = Path(name).expanduser()
    if path.exists():
        return open_local(path, text_field, vocabulary, boundary)
    if _HUB.fullmatch(name) and path.suffix not in SUFFIXES:
        return HubDataset(name, text_field)
    raise DataError(
        f"There is no file or folder {name}; give --data text, JSONL, Parquet or pre-tokenised files, a folder of "
        "them, or a dataset of the Hub as owner/name:config:split."
    )


def absolute(specs: Sequence[str]) -> tuple[str, ...]:
    """The mixture with local paths as a run keeps them: it may be resumed from another folder."""
    kept = []
    for part in parse_mixture(specs):
        path = Path(part.name).expanduser()
        name = str(path.absolute()) if path.exists() and part.name != BUILTIN else part.name
        kept.append(name if part.weight == 1 else f"{name}={part.weight!r}")
    return tuple(kept)
