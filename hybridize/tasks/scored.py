"""Rows of tokens of which some are scored: the one form in which a sweep meets text and retrieval tasks alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

SCORED_PER_ROW = 256  # of text; the output head then costs little beside the layers


@dataclass(frozen=True)
class Scored:
    """A batch: ids int64 [B, T]; targets bool [B, T], true where ids[b, t] is scored, as predicted from before t."""

    ids: Tensor
    targets: Tensor
    group: str


class Answered(Protocol):
    """An item of a retrieval task: its name, ids int64 [length], and [start, stop) of the answer's tokens."""

    @property
    def task(self) -> str: ...

    @property
    def ids(self) -> Tensor: ...

    @property
    def answer(self) -> tuple[int, int]: ...


def score_text(rows: Tensor, group: str, batch_tokens: int, per_row: int = SCORED_PER_ROW) -> list[Scored]:
    """Batches of at most `batch_tokens` tokens (one row at least) from rows [N, T] of text.

    Scored are the later half of each row, where a window hides most; at most `per_row` tokens of it, evenly strided.
    """
    length = rows.shape[1]
    first = max(1, length // 2)
    count = min(per_row, length - first)
    targets = torch.zeros(rows.shape, dtype=torch.bool)
    targets[:, length - 1 - torch.arange(count) * (length - first) // max(1, count)] = True
    size = max(1, batch_tokens // length)
    return [Scored(i, t, group) for i, t in zip(rows.split(size), targets.split(size), strict=True)]


def score_answers(items: Iterable[Answered], batch_tokens: int) -> list[Scored]:
    """Batches of items of one task and length, at most `batch_tokens` tokens each (one item at least)."""
    ordered = sorted(items, key=_kind)
    return [
        Scored(torch.stack([item.ids for item in batch]), torch.stack([_answer(item) for item in batch]), task)
        for (task, length), same in groupby(ordered, key=_kind)
        for batch in _cut(list(same), max(1, batch_tokens // length))
    ]


def _kind(item: Answered) -> tuple[str, int]:
    return item.task, len(item.ids)


def _cut(items: Sequence[Answered], size: int) -> list[Sequence[Answered]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _answer(item: Answered) -> Tensor:
    targets = torch.zeros(len(item.ids), dtype=torch.bool)
    targets[slice(*item.answer)] = True
    return targets
