"""What sliding-window attention remembers between calls."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hybridize.kernels.common import check_tokens, group_size
from hybridize.kernels.varlen import sequence_bounds


class SlidingState(NamedTuple):
    """The last window - 1 keys and values (newest last), those of the sink tokens, and the tokens seen, int64 [N]."""

    keys: Tensor
    values: Tensor
    sink_keys: Tensor
    sink_values: Tensor
    seen: Tensor


class Rows:
    """Where each sequence lies in the flat token axis: start, size (tokens present) and real (tokens that count)."""

    def __init__(self, q: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None):
        bounds = sequence_bounds(q, cu_seqlens)
        device = q.device
        if bounds is not None and lengths is not None:
            raise ValueError("give lengths or cu_seqlens, not both")
        if bounds is None:
            self.sizes = [q.shape[1]] * q.shape[0]
            self.start = torch.arange(q.shape[0], device=device) * q.shape[1]
        else:
            self.sizes = [b - a for a, b in pairwise(bounds)]
            self.start = torch.tensor(bounds[:-1], device=device, dtype=torch.int64)
        self.size = torch.tensor(self.sizes, device=device, dtype=torch.int64)
        self.real = self.size if lengths is None else lengths.to(device=device, dtype=torch.int64)


def check_swa(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int) -> None:
    """Raise ValueError when shapes or settings cannot work."""
    check_tokens(q, k=k, v=v)
    group_size(q.shape[2], k.shape[2])
    if v.shape[2] != k.shape[2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if window < 1 or sinks < 0:
        raise ValueError(f"window must be at least 1 and sinks at least 0, but they are {window} and {sinks}")


def sliding_start(
    state: tuple[Tensor, ...] | None, rows: int, k: Tensor, v: Tensor, window: int, sinks: int
) -> SlidingState:
    """Return the given state, or an empty one; ValueError when its shapes are not those of this window."""
    past, first = (rows, window - 1), (rows, sinks)
    shapes = [(*past, *k.shape[2:]), (*past, *v.shape[2:]), (*first, *k.shape[2:]), (*first, *v.shape[2:]), (rows,)]
    if state is None:
        keys, values, sink_keys, sink_values = (k.new_zeros(s) for s in shapes[:4])
        return SlidingState(keys, values, sink_keys, sink_values, torch.zeros(rows, dtype=torch.int64, device=k.device))
    if [tuple(t.shape) for t in state] != shapes:
        raise ValueError(f"initial_state has shapes {[tuple(t.shape) for t in state]}, expected {shapes}")
    keys, values, sink_keys, sink_values, seen = state
    return SlidingState(keys.to(k.dtype), values.to(v.dtype), sink_keys.to(k.dtype), sink_values.to(v.dtype), seen)


def pick(past: Tensor, tokens: Tensor, rows: Rows, at: Tensor) -> Tensor:
    """Gather places at [N,X] of each row's past [N,P,...] followed by its tokens (flat [n,...]).

    Places behind the last token give some other token.
    """
    n, p = past.shape[:2]
    row = torch.arange(n, device=at.device)[:, None]
    fresh = (rows.start[:, None] + (at - p)).clamp(0, max(tokens.shape[0] - 1, 0))
    pool = torch.cat([past.flatten(0, 1), tokens])
    return pool[torch.where(at < p, row * p + at, n * p + fresh)]


def merged_sinks(state: SlidingState, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return sink keys and values after the flat tokens k and v [n,Hk,D] have arrived."""
    sinks = state.sink_keys.shape[1]
    slot = torch.arange(sinks, device=k.device)[None]
    token = slot - state.seen[:, None]
    arrives = (token >= 0) & (token < rows.real[:, None])
    at = torch.where(arrives, sinks + token, slot)
    return pick(state.sink_keys, k, rows, at), pick(state.sink_values, v, rows, at)


def next_state(state: SlidingState, k: Tensor, v: Tensor, sinks: tuple[Tensor, Tensor], rows: Rows) -> SlidingState:
    """Return the state after the real tokens among the flat k and v."""
    at = rows.real[:, None] + torch.arange(state.keys.shape[1], device=k.device)
    return SlidingState(pick(state.keys, k, rows, at), pick(state.values, v, rows, at), *sinks, state.seen + rows.real)
