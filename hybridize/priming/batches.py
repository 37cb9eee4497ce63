"""What training reads: batches of packed token ids, from a stream whose exact position can be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One batch of B rows of T tokens.

    ids: int64 [B, T]. positions: int64 [B, T], starts at 0 at every document of a packed row. targets: bool [B, T],
    ids[b, t] is to be predicted (from what stands before t); false at a document's first token, padding and prompts.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor


class Stream(Protocol):
    """Batches without end; after load_state(state()) the same ones come again."""

    def batch(self) -> Batch: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...
