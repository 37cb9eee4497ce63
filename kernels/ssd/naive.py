"""Mamba-2's recurrence token by token: the specification."""

import torch
from torch import Tensor

from hybridize.kernels.common import cast, expand_heads, start_state, without_autocast
from hybridize.kernels.ssd.inputs import add_skip, check_ssd
from hybridize.kernels.varlen import PaddedLayout


@without_autocast
def naive_ssd(
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
) -> tuple[Tensor, Tensor | None]:
    """Return (y [B,T,H,P], h [B,H,P,N]); h_t = e^(dt A) h + dt x B^T, y_t = h_t C + D x."""
    check_ssd(x, dt, A, B, C, D)
    layout = PaddedLayout(x, cu_seqlens)
    dtype, heads = x.dtype, x.shape[2]
    A = A.to(cast(x)[0].dtype)
    x, dt, B, C = (layout.pack(t) for t in cast(x, dt, B, C))
    B, C = expand_heads(B, heads), expand_heads(C, heads)
    h = start_state(initial_state, (layout.sequences, heads, x.shape[-1], B.shape[-1]), x)
    outputs = []
    for t in range(x.shape[1]):
        written = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        h = (dt[:, t] * A).exp()[..., None, None] * h + written
        outputs.append((h @ C[:, t, :, :, None])[..., 0])
    y = torch.stack(outputs, 1) if outputs else x[:, :0]
    return layout.unpack(add_skip(y, x, D)).to(dtype), h if output_final_state else None
