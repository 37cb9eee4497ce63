"""Documents into rows of one length: short ones side by side, longer ones cut, and no padding but for conversations."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Row = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, positions, targets: [context] each


@dataclass(frozen=True)
class Piece:
    """Tokens of one document, ids int32 [N], and which of them are to be predicted, bool [N].

    whole: part of a conversation, in which an answer without its question teaches nothing: padded rather than cut.
    """

    ids: np.ndarray
    targets: np.ndarray
    whole: bool

    def __len__(self) -> int:
        return len(self.ids)


class Packer:
    """Pieces of documents, from which rows of `context` tokens are made.

    A row begins with a piece drawn at random and goes on with the longest piece that fits; where none does, the
    shortest longer one is cut. So no token is dropped, and there is padding only behind conversations.
    """

    def __init__(self, context: int, pad: int, seed: int):
        self.context, self.pad, self.seed = context, pad, seed
        self.pieces: list[Piece] = []  # by length
        self.tokens = 0
        self.rows = 0

    def add(self, ids: np.ndarray, targets: np.ndarray, whole: bool) -> tuple[int, int]:
        """Take a document, cut to pieces of at most a row; how many tokens were kept, and how many dropped.

        Dropped are pieces of a conversation in which nothing is to be predicted.
        """
        kept = 0
        for start in range(0, len(ids), self.context):
            part = slice(start, start + self.context)
            mine = targets[part].copy()
            mine[0] = False  # nothing in its document is before it
            if mine.any() or not whole:
                self._put(Piece(ids[part].astype(np.int32), mine, whole))
                kept += len(mine)
        return kept, len(ids) - kept

    def ready(self) -> bool:
        """Whether there is enough for a row without padding."""
        return self.tokens >= self.context

    def row(self) -> Row:
        """The next row, which depends on what was added and on how many rows there were."""
        random = np.random.default_rng([self.seed, self.rows])
        self.rows += 1
        parts = [self._take(int(random.integers(len(self.pieces))))]
        room = self.context - len(parts[0])
        while room:
            at = bisect_right(self.pieces, room, key=len)
            if at:
                parts.append(self._take(at - 1))
            else:
                longer = next((i for i, piece in enumerate(self.pieces) if not piece.whole), None)
                if longer is None:
                    break
                piece = self._take(longer)
                parts.append(Piece(piece.ids[:room], piece.targets[:room], False))
                rest = piece.targets[room:].copy()
                rest[0] = False
                self._put(Piece(piece.ids[room:], rest, False))
            room -= len(parts[-1])
        if room:
            parts.append(Piece(np.full(room, self.pad, np.int32), np.zeros(room, bool), True))
        return (
            np.concatenate([part.ids for part in parts]).astype(np.int64),
            np.concatenate([np.arange(len(part)) for part in parts]),
            np.concatenate([part.targets for part in parts]),
        )

    def _put(self, piece: Piece) -> None:
        insort(self.pieces, piece, key=len)
        self.tokens += len(piece)

    def _take(self, at: int) -> Piece:
        piece = self.pieces.pop(at)
        self.tokens -= len(piece)
        return piece

    def state(self) -> dict[str, Any]:
        """The pieces that wait, in order, and how many rows there were."""
        return {
            "rows": self.rows,
            "ids": torch.from_numpy(np.concatenate([np.empty(0, np.int32), *(piece.ids for piece in self.pieces)])),
            "targets": torch.from_numpy(np.concatenate([np.empty(0, bool), *(piece.targets for piece in self.pieces)])),
            "lengths": [len(piece) for piece in self.pieces],
            "whole": [piece.whole for piece in self.pieces],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue with saved pieces."""
        ends = np.cumsum(state["lengths"], dtype=np.int64)[:-1]
        ids = np.split(state["ids"].cpu().numpy(), ends)
        targets = np.split(state["targets"].cpu().numpy(), ends)
        pieces = zip(ids, targets, state["whole"], strict=False)  # of no pieces at all, split makes one empty array
        self.pieces = [Piece(*piece) for piece in pieces]
        self.tokens = sum(state["lengths"])
        self.rows = state["rows"]
