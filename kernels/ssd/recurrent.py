"""Mamba-2's recurrence for decoding."""

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
from hybridize.kernels.ssd.inputs import add_skip, check_ssd
from hybridize.kernels.varlen import PaddedLayout


@without_autocast
def recurrent_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what naive_ssd returns; inplace=True writes the new state over initial_state."""
    check_ssd(x, dt, A, B, C, D)
    layout = PaddedLayout(x, cu_seqlens)
    dtype, heads = x.dtype, x.shape[2]
    x, dt, B, C = (layout.pack(t) for t in cast(x, dt, B, C))
    B, C = expand_heads(B, heads), expand_heads(C, heads)
    decay = (dt * A.to(x.dtype)).clamp_min(SMALLEST_LOG_DECAY).exp()[..., None, None]
    written = (dt[..., None] * x)[..., None]
    h = start_state(initial_state, (layout.sequences, heads, x.shape[-1], B.shape[-1]), x)
    outputs = []
    for t in range(x.shape[1]):
        h = torch.addcmul(decay[:, t] * h, written[:, t], B[:, t, :, None, :])
        outputs.append((h @ C[:, t, :, :, None])[..., 0])
    y = torch.stack(outputs, 1) if outputs else x[:, :0]
    if inplace:
        store_in_place(None if initial_state is None else [initial_state], [h])
        h = h if initial_state is None else initial_state
    return layout.unpack(add_skip(y, x, D)).to(dtype), h if output_final_state else None
