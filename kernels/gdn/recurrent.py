"""The gated delta rule for decoding."""

import torch
from torch import Tensor

from hybridize.kernels.common import (
    SMALLEST_LOG_DECAY,
    cast,
    expand_heads,
    start_state,
    store_in_place,
    without_autocast,
)
from hybridize.kernels.gdn.inputs import check_gdn, unit
from hybridize.kernels.varlen import PaddedLayout


@without_autocast
def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what naive_gated_delta_rule returns; inplace=True writes the new state over initial_state."""
    check_gdn(q, k, v, g, beta)
    layout = PaddedLayout(q, cu_seqlens)
    dtype, (heads, dim) = q.dtype, q.shape[2:]
    scale = dim**-0.5 if scale is None else scale
    q, k, v, g, beta = (layout.pack(t) for t in cast(q, k, v, g, beta))
    q, k, v = unit(q) * scale, expand_heads(unit(k), heads), expand_heads(v, heads)
    decay = g.clamp_min(SMALLEST_LOG_DECAY).exp()[..., None, None]
    s = start_state(initial_state, (layout.sequences, heads, dim, v.shape[-1]), q)
    outputs = []
    for t in range(q.shape[1]):
        # Both products read the old state once: o = q.S~ + (q.k) delta.
        s = decay[:, t] * s
        kept, recalled = (torch.stack([q[:, t], k[:, t]], -2) @ s).unbind(-2)
        delta = beta[:, t, :, None] * (v[:, t] - recalled)
        s = torch.addcmul(s, k[:, t, :, :, None], delta[..., None, :])
        outputs.append(kept + (q[:, t] * k[:, t]).sum(-1, keepdim=True) * delta)
    o = layout.unpack(torch.stack(outputs, 1) if outputs else v[:, :0]).to(dtype)
    if inplace:
        store_in_place(None if initial_state is None else [initial_state], [s])
        s = s if initial_state is None else initial_state
    return o, s if output_final_state else None
