"""The gated delta rule for decoding."""

import torch
from torch import Tensor

from hybridize.kernels.common import (
    SMALLEST_LOG_DECAY,
    cast,
    compute_dtype,
    decay_of,
    expand_heads,
    needs_gradient,
    read_slots,
    start_state,
    store_slots,
    without_autocast,
)
from hybridize.kernels.engine import uses_triton
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
    decay_gate: tuple[Tensor, Tensor] | None = None,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what naive_gated_delta_rule returns; inplace=True writes the new state over initial_state.

    decay_gate = (A_log [H], dt_bias [H]): g and beta are logits, and g becomes -exp(A_log) softplus(g + dt_bias).
    state_indices [N]: initial_state is a pool of states, and row n has the one with this index; -1 skips a row, whose
    output is then undefined. On a GPU this is one Triton launch unless a gradient is wanted.
    """
    check_gdn(q, k, v, g, beta)
    dtype, (heads, dim) = q.dtype, q.shape[2:]
    scale = dim**-0.5 if scale is None else scale
    if uses_triton(q, dim, v.shape[-1]) and not needs_gradient(q, k, v, g, beta, initial_state):
        from hybridize.kernels.gdn.recurrent_triton import recurrent_gdn

        options = {"cu_seqlens": cu_seqlens, "inplace": inplace, "state_indices": state_indices}
        o, s = recurrent_gdn(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, decay_gate=decay_gate, **options
        )
        return o, s if output_final_state else None
    if decay_gate is not None:
        g, beta = decay_of(g, decay_gate), beta.to(compute_dtype(q)).sigmoid()
    layout = PaddedLayout(q, cu_seqlens)
    q, k, v, g, beta = (layout.pack(t) for t in cast(q, k, v, g, beta))
    q, k, v = unit(q) * scale, expand_heads(unit(k), heads), expand_heads(v, heads)
    decay = g.clamp_min(SMALLEST_LOG_DECAY).exp()[..., None, None]
    s = start_state(read_slots(initial_state, state_indices), (layout.sequences, heads, dim, v.shape[-1]), q)
    outputs = []
    for t in range(q.shape[1]):
        # Both products read the old state once: o = q.S~ + (q.k) delta.
        s = decay[:, t] * s
        kept, recalled = (torch.stack([q[:, t], k[:, t]], -2) @ s).unbind(-2)
        delta = beta[:, t, :, None] * (v[:, t] - recalled)
        s = torch.addcmul(s, k[:, t, :, :, None], delta[..., None, :])
        outputs.append(kept + (q[:, t] * k[:, t]).sum(-1, keepdim=True) * delta)
    o = layout.unpack(torch.stack(outputs, 1) if outputs else v[:, :0]).to(dtype)
    (s,) = store_slots(None if initial_state is None else [initial_state], state_indices, [s], inplace)
    return o, s if output_final_state else None
