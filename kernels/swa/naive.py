"""Sliding-window attention with the whole mask: the specification."""

import torch
from torch import Tensor

from hybridize.kernels.common import cast, expand_heads
from hybridize.kernels.swa.state import Rows, SlidingState, check_swa, merged_sinks, next_state, sliding_start


def naive_swa(
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
    """Return (o [B,T,H,D], SlidingState): query i sees keys j, i - window < j <= i, and the first `sinks` tokens."""
    check_swa(q, k, v, window, sinks)
    rows = Rows(q, lengths, cu_seqlens)
    state = sliding_start(initial_state, len(rows.sizes), k, v, window, sinks)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    first = merged_sinks(state, flat_k, flat_v, rows)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for n, size in enumerate(rows.sizes):
        here = slice(int(rows.start[n]), int(rows.start[n]) + size)
        keys = torch.cat([first[0][n], state.keys[n], flat_k[here]])
        values = torch.cat([first[1][n], state.values[n], flat_v[here]])
        query, keys, values = cast(flat_q[here], keys, values)
        keys, values = (expand_heads(x[None], q.shape[2])[0].transpose(0, 1) for x in (keys, values))
        seen = int(state.seen[n])
        i = seen + torch.arange(size, device=q.device)[:, None]
        j = seen - (window - 1) + torch.arange(window - 1 + size, device=q.device)[None]
        in_window = (j >= 0) & (j <= i) & (j > i - window)
        sunk = torch.arange(sinks, device=q.device)[None] <= i - window
        scores = scale * query.transpose(0, 1) @ keys.transpose(1, 2)
        scores = scores.masked_fill(~torch.cat([sunk, in_window], 1), float("-inf"))
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
    o = torch.cat(outputs) if outputs else flat_v[:0]
    final = next_state(state, flat_k, flat_v, first, rows) if output_final_state else None
    return o.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype), final
