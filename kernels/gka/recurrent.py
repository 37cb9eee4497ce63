"""Gated KalmaNet for decoding."""

import torch
from torch import Tensor

from hybridize.kernels.common import SMALLEST_LOG_DECAY, cast, expand_heads, store_in_place, without_autocast
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
) -> tuple[Tensor, GkaState | None]:
    """Return what naive_gka returns, one token at a time; inplace=True writes the new states over initial_state."""
    check_gka(q, k, v, g, beta, alpha, ridge, num_iters)
    layout = PaddedLayout(q, cu_seqlens)
    dtype, heads = q.dtype, q.shape[2]
    q, k, v, g, beta, alpha = (layout.pack(t) for t in cast(q, k, v, g, beta, alpha))
    scale = default_scale(scale, q.shape[-1])
    q, k, v = unit(q), expand_heads(unit(k), heads), expand_heads(v, heads)
    written = k * (beta + EPS).square()[..., None]
    decay = g.clamp_min(SMALLEST_LOG_DECAY).exp()[..., None, None]
    h, u = gka_start(initial_state, layout.sequences, heads, q, v)
    outputs = []
    for t in range(q.shape[1]):
        h = torch.addcmul(decay[:, t] * h, written[:, t, :, :, None], k[:, t, :, None, :])
        u = torch.addcmul(decay[:, t] * u, written[:, t, :, :, None], v[:, t, :, None, :])
        x = q[:, t]
        if num_iters:
            x = torch.lerp(x, solve_token(h, x, ridge, num_iters), alpha[:, t, :, None])
        outputs.append((scale * x[..., None, :] @ u)[..., 0, :])
    o = layout.unpack(torch.stack(outputs, 1) if outputs else v[:, :0]).to(dtype)
    state = (h, u)
    if inplace:
        store_in_place(initial_state, state)
        state = initial_state or state
    return o, state if output_final_state else None
