"""Gated KalmaNet for decoding."""

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
    store_slots,
    without_autocast,
)
from hybridize.kernels.engine import uses_triton
from hybridize.kernels.gka.inputs import EPS, GkaState, chebyshev_weights, check_gka, default_scale, gka_start, unit
from hybridize.kernels.gka.naive import frobenius
from hybridize.kernels.gka.solve import inverse_norms
from hybridize.kernels.varlen import PaddedLayout


def solve_token(h: Tensor, q: Tensor, ridge: float, num_iters: int) -> Tensor:
    """Solve (H + ridge ||H|| I) x = q for one query per head, on H scaled to norm 1 so that all weights are numbers."""
    inverse = inverse_norms(frobenius(h)[..., None])
    step, weights = chebyshev_weights(ridge, num_iters)
    system = (h * (-step * inverse[..., None])).flatten(0, 1)
    q = step * q.flatten(0, 1)[..., None]
    before, x = torch.zeros_like(q), q
    for omega in weights:
        target = torch.baddbmm(torch.add(q, x, alpha=1 - step * ridge), system, x)
        before, x = x, torch.lerp(before, target, omega)
    return x.view_as(h[..., :1])[..., 0] * inverse


@without_autocast
def recurrent_gka(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    alpha: Tensor,
    *,
    scale: float | None = None,
    ridge: float = 0.02,
    num_iters: int = 30,
    initial_state: GkaState | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    inplace: bool = False,
    decay_gate: tuple[Tensor, Tensor] | None = None,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, GkaState | None]:
    """Return what naive_gka returns; inplace=True writes the new state over initial_state.

    decay_gate = (A_log [H], dt_bias [H]): g, beta and alpha are logits; g becomes -exp(A_log) softplus(g + dt_bias).
    state_indices [N]: initial_state is a pool of states, and row n has the one with this index; -1 skips a row, whose
    output is then undefined. On a GPU this is one Triton launch unless a gradient is wanted.
    """
    check_gka(q, k, v, g, beta, alpha, ridge, num_iters)
    dtype, heads = q.dtype, q.shape[2]
    scale = default_scale(scale, q.shape[-1])
    if uses_triton(q, q.shape[-1], v.shape[-1]) and not needs_gradient(q, k, v, g, beta, alpha, *initial_state or ()):
        from hybridize.kernels.gka.recurrent_triton import recurrent_gka_triton

        options = {"cu_seqlens": cu_seqlens, "inplace": inplace, "state_indices": state_indices}
        o, final = recurrent_gka_triton(
            q, k, v, g, beta, alpha, scale=scale, ridge=ridge, num_iters=num_iters, initial_state=initial_state,
            decay_gate=decay_gate, **options,
        )  # fmt: skip
        return o, final if output_final_state else None
    if decay_gate is not None:
        g = decay_of(g, decay_gate)
        beta, alpha = (x.to(compute_dtype(q)).sigmoid() for x in (beta, alpha))
    layout = PaddedLayout(q, cu_seqlens)
    q, k, v, g, beta, alpha = (layout.pack(t) for t in cast(q, k, v, g, beta, alpha))
    q, k, v = unit(q), expand_heads(unit(k), heads), expand_heads(v, heads)
    written = k * (beta + EPS).square()[..., None]
    decay = g.clamp_min(SMALLEST_LOG_DECAY).exp()[..., None, None]
    old = None if initial_state is None else tuple(read_slots(x, state_indices) for x in initial_state)
    h, u = gka_start(old, layout.sequences, heads, q, v)
    outputs = []
    for t in range(q.shape[1]):
        h = torch.addcmul(decay[:, t] * h, written[:, t, :, :, None], k[:, t, :, None, :])
        u = torch.addcmul(decay[:, t] * u, written[:, t, :, :, None], v[:, t, :, None, :])
        x = q[:, t]
        if num_iters:
            x = torch.lerp(x, solve_token(h, x, ridge, num_iters), alpha[:, t, :, None])
        outputs.append((scale * x[..., None, :] @ u)[..., 0, :])
    o = layout.unpack(torch.stack(outputs, 1) if outputs else v[:, :0]).to(dtype)
    state = store_slots(initial_state, state_indices, (h, u), inplace)
    return o, state if output_final_state else None
