"""Keys and values in a buffer with room behind them, so that a token is appended without copying those before it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class Buffer:
    """Keys and values [B, Hk, capacity, D], of which the first `tokens` are set and equal in all rows.

    Several layers may read one buffer; only its tenant, the first that appended and still exists, writes behind them.
    """

    def __init__(self, keys: Tensor, values: Tensor, tokens: int):
        self.keys, self.values, self.tokens = keys, values, tokens
        self._tenant: weakref.ref[Any] | None = None

    @staticmethod
    def empty(like: Tensor, rows: int, capacity: int, device: torch.device | None = None) -> Buffer:
        """A buffer for keys like `like` [..., Hk, tokens, D], with nothing set."""
        shape = (rows, like.shape[-3], capacity, like.shape[-1])
        keys, values = (torch.empty(shape, dtype=like.dtype, device=device or like.device) for _ in range(2))
        return Buffer(keys, values, 0)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Set more tokens of all rows from keys, values [Hk, T, D]."""
        here = slice(self.tokens, self.tokens + keys.shape[-2])
        self.keys[:, :, here], self.values[:, :, here] = keys, values
        self.tokens = here.stop

    def lends_to(self, layer: Any) -> bool:
        """Whether this layer may write behind the set tokens."""
        tenant = None if self._tenant is None else self._tenant()
        if tenant is None:
            self._tenant = weakref.ref(layer)
        return tenant is None or tenant is layer

    def rows(self, count: int) -> Buffer:
        """A buffer of its own with `count` copies of the one row."""
        more = Buffer.empty(self.keys, count, self.capacity)
        more.append(self.keys[0, :, : self.tokens], self.values[0, :, : self.tokens])
        return more


class GrowingLayer(DynamicLayer):
    """A DynamicLayer over a buffer. `keys` and `values` are views of its beginning; the room doubles when it is full.

    Where the room is another layer's, or tokens of the buffer itself were cropped, the first append copies it once.
    Without a buffer it makes its own at the first token, for `room` tokens at least.
    """

    def __init__(self, buffer: Buffer | None = None, room: int = 0) -> None:
        super().__init__()
        self.buffer, self.room = buffer, room
        if buffer is not None:
            self.lazy_initialization(buffer.keys, buffer.values)
            self._show(buffer.tokens)

    def _show(self, tokens: int) -> None:
        assert self.buffer is not None
        self.keys, self.values = self.buffer.keys[:, :, :tokens], self.buffer.values[:, :, :tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hk, T, D]; returns views of all of them."""
        if self.buffer is None:
            self.buffer = Buffer.empty(key_states, key_states.shape[0], max(self.room, key_states.shape[-2]))
            self.lazy_initialization(key_states, value_states)
            self._show(0)
        tokens = self.get_seq_length()
        total = tokens + key_states.shape[-2]
        self._own(tokens, total)
        self.buffer.keys[:, :, tokens:total], self.buffer.values[:, :, tokens:total] = key_states, value_states
        self._show(total)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _own(self, tokens: int, total: int) -> None:
        """Have a buffer in which tokens up to `total` may be written behind the first `tokens`."""
        assert self.buffer is not None and self.keys is not None and self.values is not None
        held = self.buffer
        if total <= held.capacity and tokens >= held.tokens and held.lends_to(self):
            return
        self.buffer = Buffer.empty(held.keys, self.keys.shape[0], max(total, 2 * tokens))
        self.buffer.keys[:, :, :tokens], self.buffer.values[:, :, :tokens] = self.keys, self.values
        self.buffer.tokens = min(tokens, held.tokens)
        self.buffer.lends_to(self)

    def get_seq_length(self) -> int:
        return self.keys.shape[-2] if self.is_initialized and self.keys is not None else 0

    def reset(self) -> None:
        """Forget all tokens; the buffer is left as it is, since others may read it."""
        self.keys = self.values = self.buffer = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take each row from the given one; what is equal in all rows stays where it is."""
        tokens = self.get_seq_length()
        if self.buffer is None or tokens <= self.buffer.tokens:
            return
        for x in (self.buffer.keys, self.buffer.values):
            own = x[:, :, self.buffer.tokens : tokens]
            own.copy_(own.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length():
            assert self.keys is not None
            self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the order given: a copy, with room for half as many tokens again."""
        tokens = self.get_seq_length()
        if self.buffer is None or not tokens:
            return
        assert self.keys is not None and self.values is not None
        chosen = indices.to(self.keys.device)
        chosen = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        held, keys, values = self.buffer, self.keys, self.values
        self.buffer = Buffer.empty(held.keys, len(chosen), tokens + tokens // 2 + 1)
        torch.index_select(keys, 0, chosen, out=self.buffer.keys[:, :, :tokens])
        torch.index_select(values, 0, chosen, out=self.buffer.values[:, :, :tokens])
        self.buffer.tokens = min(tokens, held.tokens)
        self.buffer.lends_to(self)
        self._show(tokens)
