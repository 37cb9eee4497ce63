"""What training reads: batches of token ids in which several documents may share a row, and a stream of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


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


class Stream(Protocol):
    """Batches without end, from a position that can be saved."""

    def batch(self) -> Batch:
        """The next batch; after load_state(state()) the same as without."""

    def state(self) -> dict[str, Any]:
        """The exact position: JSON values and tensors."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position; CheckpointError where it is of other data."""
