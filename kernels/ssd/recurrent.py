"""Mamba-2's recurrence for decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.kernels.common import (
    SMALLEST_LOG_DECAY,
    cast,
    compute_dtype,
    expand_heads,
    needs_gradient,
    read_slots,
    start_state,
    store_slots,
    without_autocast,
)
from hybridize.kernels.engine import uses_triton
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
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what naive_ssd returns; inplace=True writes the new state over initial_state.

    dt_bias [H]: dt is a logit, and becomes softplus(dt + dt_bias).
    state_indices [N]: initial_state is a pool of states, and row n has the one with this index; -1 skips a row, whose
    output is then undefined. On a GPU this is one Triton launch unless a gradient is wanted.
    """
    check_ssd(x, dt, A, B, C, D)
    if uses_triton(x, x.shape[-1], B.shape[-1]) and not needs_gradient(x, dt, A, B, C, D, initial_state):
        from hybridize.kernels.ssd.recurrent_triton import recurrent_ssd_triton

        options = {"cu_seqlens": cu_seqlens, "inplace": inplace, "state_indices": state_indices}
        y, h = recurrent_ssd_triton(x, dt, A, B, C, D=D, initial_state=initial_state, dt_bias=dt_bias, **options)
        return y, h if output_final_state else None
    if dt_bias is not None:
        dt = F.softplus(dt.to(compute_dtype(x)) + dt_bias.to(compute_dtype(x)))
    layout = PaddedLayout(x, cu_seqlens)
    dtype, heads = x.dtype, x.shape[2]
    x, dt, B, C = (layout.pack(t) for t in cast(x, dt, B, C))
    B, C = expand_heads(B, heads), expand_heads(C, heads)
    decay = (dt * A.to(x.dtype)).clamp_min(SMALLEST_LOG_DECAY).exp()[..., None, None]
    written = (dt[..., None] * x)[..., None]
    h = start_state(read_slots(initial_state, state_indices), (layout.sequences, heads, x.shape[-1], B.shape[-1]), x)
    outputs = []
    for t in range(x.shape[1]):
        h = torch.addcmul(decay[:, t] * h, written[:, t], B[:, t, :, None, :])
        outputs.append((h @ C[:, t, :, :, None])[..., 0])
    y = torch.stack(outputs, 1) if outputs else x[:, :0]
    (h,) = store_slots(None if initial_state is None else [initial_state], state_indices, [h], inplace)
    return layout.unpack(add_skip(y, x, D)).to(dtype), h if output_final_state else None
