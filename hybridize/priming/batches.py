"""What training reads: batches of token ids in which several documents may share a row, and a stream of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridize.errors import UsageError
from hybridize.processes import world


@dataclass(frozen=True)
class Batch:
    """Rows of token ids, with the borders of their documents and the tokens that are to be predicted.

    ids, int64 [B, T]. positions, int64 [B, T], start at 0 at every document of a row: what models take as
    position_ids. targets, bool [B, T]: ids[b, t] is to be predicted, from what is before it in its document; false at a
    document's first token, at padding, and at what an assistant has not said in a conversation. A row may be all false.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor

    @staticmethod
    def of(rows: Tensor | Batch) -> Batch:
        """Rows of token ids [B, T] as a batch, each of one document; a batch as it is."""
        if isinstance(rows, Batch):
            return rows
        positions = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape)
        return Batch(rows, positions, positions > 0)

    @property
    def real(self) -> Tensor:
        """bool [B, T]: false in documents of which nothing is to be predicted, as padding is one."""
        document = (self.positions == 0).cumsum(1) - 1
        counts = torch.zeros_like(self.positions).scatter_add(1, document, self.targets.long())
        return counts.gather(1, document) > 0

    def part(self, rows: slice) -> Batch:
        """Some of the rows."""
        return Batch(self.ids[rows], self.positions[rows], self.targets[rows])

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(self.ids.to(device), self.positions.to(device), self.targets.to(device))


def check_shares(batch_size: int) -> None:
    """UsageError where a batch's rows cannot be shared evenly by the processes."""
    if batch_size % world():
        raise UsageError(f"{batch_size} rows a batch cannot be shared by {world()} processes; give a multiple.")


class Stream(Protocol):
    """Batches without end, from a position that can be saved."""

    def batch(self) -> Batch:
        """The next batch; after load_state(state()) the same as without."""

    def state(self) -> dict[str, Any]:
        """The exact position: JSON values and tensors."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position; CheckpointError where it is of other data."""
