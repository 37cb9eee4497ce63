"""The gated delta rule token by token: the specification."""

import torch
from torch import Tensor

from hybridize.kernels.common import cast, expand_heads, start_state, without_autocast
from hybridize.kernels.gdn.inputs import check_gdn, unit
from hybridize.kernels.varlen import PaddedLayout


@without_autocast
def naive_gated_delta_rule(
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
) -> tuple[Tensor, Tensor | None]:
    """Return (o [B,T,H,Dv], S [B,H,D,Dv]); S~ = e^g S, S = S~ + beta k (v - S~^T k)^T, o = S^T q scale."""
    check_gdn(q, k, v, g, beta)
    layout = PaddedLayout(q, cu_seqlens)
    dtype, (heads, dim) = q.dtype, q.shape[2:]
    scale = dim**-0.5 if scale is None else scale
    q, k, v, g, beta = (layout.pack(t) for t in cast(q, k, v, g, beta))
    q, k, v = unit(q), expand_heads(unit(k), heads), expand_heads(v, heads)
    s = start_state(initial_state, (layout.sequences, heads, dim, v.shape[-1]), q)
    outputs = []
    for t in range(q.shape[1]):
        s = g[:, t].exp()[..., None, None] * s
        error = v[:, t] - (k[:, t, :, None, :] @ s)[..., 0, :]
        s = s + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[..., None, :]
        outputs.append((q[:, t, :, None, :] @ s)[..., 0, :] * scale)
    o = torch.stack(outputs, 1) if outputs else v[:, :0]
    return layout.unpack(o).to(dtype), s if output_final_state else None
