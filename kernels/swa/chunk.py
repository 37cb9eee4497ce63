"""Sliding-window attention in blocks of queries, so that no mask or score is tokens x tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.kernels.swa.state import Rows, SlidingState, check_swa, merged_sinks, next_state, sliding_start

LARGEST_BLOCK = 256  # queries per block; each block copies block + window - 1 keys


class Blocks:
    """Blocks of queries and the keys each one sees: absolute positions, and places in the flat tensors."""

    def __init__(self, rows: Rows, seen: Tensor, window: int, size: int, past: bool, tokens: int):
        device = seen.device
        numbers = [-(-s // size) for s in rows.sizes]
        self.size = size
        self.row = torch.repeat_interleave(torch.tensor(numbers, device=device, dtype=torch.int64))
        first = torch.cat([torch.arange(n, device=device) for n in numbers]) * size
        fresh = first[:, None] + torch.arange(size, device=device)
        ahead = first[:, None] + torch.arange(size + window - 1, device=device) - (window - 1)
        start, total, before = rows.start[self.row, None], rows.size[self.row, None], seen[self.row, None]
        last = max(tokens - 1, 0)
        self.queries = (start + fresh).clamp(max=last)
        self.position = before + fresh
        self.key_position = before + ahead
        keys = (start + ahead).clamp(0, last)
        if past:
            kept = window - 1
            keys = torch.where(ahead < 0, self.row[:, None] * kept + kept + ahead, len(rows.sizes) * kept + keys)
        self.keys = keys
        # The tokens in order, without the padding of each row's last block.
        self.wanted = (fresh < total).flatten().nonzero()[:, 0]


def chunk_swa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    lengths: Tensor | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, SlidingState | None]:
    """Return what naive_swa returns, with memory linear in T and in the window; one token costs one row of scores."""
    check_swa(q, k, v, window, sinks)
    rows = Rows(q, lengths, cu_seqlens)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    tokens, heads, dim = flat_q.shape
    if tokens == 0:
        state = sliding_start(initial_state, len(rows.sizes), k, v, window, sinks)
        return q.new_zeros(*q.shape[:3], v.shape[-1]), state if output_final_state else None
    state = sliding_start(initial_state, len(rows.sizes), k, v, window, sinks)
    first = merged_sinks(state, flat_k, flat_v, rows)
    past = initial_state is not None
    size = min(max(rows.sizes), LARGEST_BLOCK)
    blocks = Blocks(rows, state.seen, window, size, past, tokens)
    pool_k = torch.cat([state.keys.flatten(0, 1), flat_k]) if past else flat_k
    pool_v = torch.cat([state.values.flatten(0, 1), flat_v]) if past else flat_v
    keys = torch.cat([first[0][blocks.row], pool_k[blocks.keys]], 1).transpose(1, 2)
    values = torch.cat([first[1][blocks.row], pool_v[blocks.keys]], 1).transpose(1, 2)
    i, j = blocks.position[:, :, None], blocks.key_position[:, None]
    in_window = (j >= 0) & (j <= i) & (j > i - window)
    sunk = torch.arange(sinks, device=q.device) <= i - window
    mask = torch.cat([sunk, in_window], -1)
    # The query heads of a key head are rows of one attention, so keys are never repeated.
    group = heads // k.shape[2]
    query = flat_q[blocks.queries].reshape(-1, size, k.shape[2], group, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    o = F.scaled_dot_product_attention(query, keys, values, mask.repeat(1, group, 1)[:, None], scale=scale)
    o = o.unflatten(2, (group, size)).permute(0, 3, 1, 2, 4).reshape(-1, heads, v.shape[-1])
    final = next_state(state, flat_k, flat_v, first, rows) if output_final_state else None
    return o[blocks.wanted].reshape(*q.shape[:3], v.shape[-1]), final
