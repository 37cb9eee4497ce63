"""Which tokens of a batch are real, and where packed documents begin: decided once per forward, read by every mixer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

State = dict[str, Tensor]  # one converted layer's memory: named tensors, batch first


def inert(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x [B, T, ...] with zeros behind each row's `lengths` real tokens, even where x is not finite."""
    if lengths is None:
        return x
    behind = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill(behind.view(*behind.shape, *[1] * (x.dim() - 2)), 0)


@dataclass(frozen=True)
class PaddedRows:
    """Rows with padding somewhere: real tokens are moved to the front, so that all padding is padding at the end.

    mask [B, T]: true at real tokens; order [B, T]: positions, real ones first and in order; lengths [B]: how many.
    """

    mask: Tensor
    order: Tensor
    lengths: Tensor
    cu_seqlens: None = None

    @staticmethod
    def from_mask(mask: Tensor) -> PaddedRows:
        """Layout of a mask [B, T] that is true at real tokens."""
        return PaddedRows(mask, torch.argsort((~mask).to(torch.int8), dim=1, stable=True), mask.sum(1))

    def to(self, device: torch.device) -> PaddedRows:
        return replace(self, order=self.order.to(device), lengths=self.lengths.to(device))

    def cut(self, start: int, stop: int) -> PaddedRows:
        """The layout of tokens start to stop of every row."""
        return PaddedRows.from_mask(self.mask[:, start:stop])

    def select(self, rows: Tensor) -> PaddedRows:
        """The layout of some rows, in the order given."""
        return PaddedRows.from_mask(self.mask[rows.to(self.mask.device)])

    def pack(self, x: Tensor) -> Tensor:
        index = self.order.view(*self.order.shape, *[1] * (x.dim() - 2))
        moved = x.expand(self.order.shape[0], *x.shape[1:]).gather(1, index.expand(-1, -1, *x.shape[2:]))
        return inert(moved, self.lengths)  # a gate of 0 keeps the state as it is

    def unpack(self, y: Tensor) -> Tensor:
        index = self.order.view(*self.order.shape, *[1] * (y.dim() - 2)).expand_as(y)
        return torch.zeros_like(y).scatter(1, index, y)

    def states_in(self, state: State | None) -> State | None:
        return state

    def states_out(self, new: State, old: State | None) -> State:
        return new


@dataclass(frozen=True)
class PackedDocuments:
    """Rows that hold several documents: real tokens of all rows in one sequence, with the documents' borders.

    opens [B, T]: true where a token begins a document that is not its row's first; mask [B, T]: true at real tokens.
    index [N]: where each real token stands in the flattened [B*T] batch; cu_seqlens [S+1]; row [S]: the row of each
    document; continues [S]: whether it goes on from the row's state; last [B]: each row's last document, -1 for none.
    """

    opens: Tensor
    mask: Tensor
    index: Tensor
    cu_seqlens: Tensor
    row: Tensor
    continues: Tensor
    last: Tensor
    lengths: None = None

    @staticmethod
    def from_opens(opens: Tensor, mask: Tensor | None) -> PackedDocuments:
        """Layout of rows in which tokens marked in `opens` [B, T] begin a document; mask [B, T] marks real tokens."""
        batch, length = opens.shape
        mask = torch.ones_like(opens) if mask is None else mask
        index = mask.flatten().nonzero()[:, 0]
        row = index // length
        first = torch.ones_like(index, dtype=torch.bool)
        first[1:] = row[1:] != row[:-1]
        new = opens.flatten()[index]
        border = (first | new).nonzero()[:, 0]
        cu_seqlens = torch.cat([border, border.new_tensor([len(index)])])
        last = torch.full((batch,), -1, device=index.device)
        last.scatter_reduce_(0, row[border], torch.arange(len(border), device=index.device), "amax")
        return PackedDocuments(opens, mask, index, cu_seqlens, row[border], ~new[border], last)

    def to(self, device: torch.device) -> PackedDocuments:
        names = ("index", "cu_seqlens", "row", "continues", "last")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def cut(self, start: int, stop: int) -> TokenLayout:
        """The layout of tokens start to stop of every row."""
        opens, mask = self.opens[:, start:stop], self.mask[:, start:stop]
        return PackedDocuments.from_opens(opens, mask) if opens.any() else PaddedRows.from_mask(mask)

    def select(self, rows: Tensor) -> PackedDocuments:
        """The layout of some rows, in the order given."""
        rows = rows.to(self.mask.device)
        return PackedDocuments.from_opens(self.opens[rows], self.mask[rows])

    def pack(self, x: Tensor) -> Tensor:
        return x.expand(self.mask.shape[0], *x.shape[1:]).flatten(0, 1)[self.index][None]

    def unpack(self, y: Tensor) -> Tensor:
        flat = y.new_zeros(self.mask.numel(), *y.shape[2:])
        return flat.index_copy(0, self.index, y[0]).unflatten(0, self.mask.shape)

    def states_in(self, state: State | None) -> State | None:
        if state is None:
            return None

        def spread(x: Tensor) -> Tensor:
            goes_on = self.continues.view(-1, *[1] * (x.dim() - 1))
            return torch.where(goes_on, x[self.row], torch.zeros_like(x[:1]))

        return {name: spread(x) for name, x in state.items()}

    def states_out(self, new: State, old: State | None) -> State:
        def gather(name: str) -> Tensor:
            x = new[name]
            kept = torch.zeros_like(x[:1]) if old is None else old[name]
            seen = (self.last >= 0).view(-1, *[1] * (x.dim() - 1))
            return torch.where(seen, x[self.last.clamp(min=0)], kept)

        return {name: gather(name) for name in new}


TokenLayout = PaddedRows | PackedDocuments


def token_layout(mask: Tensor | None, position_ids: Tensor | None, began: Tensor | bool) -> TokenLayout | None:
    """Layout of a batch, or None where every token is real and every row is one document.

    mask [B, T], true at real tokens; position_ids [B, T]; began [B]: the rows that have seen real tokens before, where
    a first position of 0 begins a new document. A document begins wherever positions do not go up from one real token
    to the next; positions of padding mean nothing.
    """
    if position_ids is not None:
        real = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask
        place = torch.arange(real.shape[1], device=real.device).expand_as(real)
        before = torch.where(real, place, -1).cummax(1).values.roll(1, dims=1)  # the latest real token before each
        before[:, 0] = -1
        down = position_ids <= position_ids.gather(1, before.clamp(min=0))
        opens = real & torch.where(
            before >= 0, down, (position_ids == 0) & torch.as_tensor(began, device=real.device).view(-1, 1)
        )
        if opens.any():
            return PackedDocuments.from_opens(opens, mask)
    if mask is not None and not mask.all():
        return PaddedRows.from_mask(mask)
    return None
