"""Gated KalmaNet token by token: the specification."""

import torch
from torch import Tensor

from hybridize.kernels.common import cast, expand_heads, without_autocast
from hybridize.kernels.gka.inputs import EPS, GkaState, check_gka, default_scale, gka_start, smallest_norm, unit
from hybridize.kernels.varlen import PaddedLayout


def frobenius(h: Tensor) -> Tensor:
    """Return the Frobenius norm of [...,D,D] without underflow, and with a finite gradient at zero."""
    largest = h.detach().abs().amax((-2, -1), keepdim=True)
    squared = (h / torch.where(largest > 0, largest, 1.0)).square().sum((-2, -1))
    return torch.where(squared > 0, squared, 1.0).sqrt() * largest[..., 0, 0]


def chebyshev(h: Tensor, q: Tensor, ridge: float, num_iters: int) -> Tensor:
    """Solve (H + ridge ||H|| I) x = q by num_iters Chebyshev steps (arXiv 2511.21016, algorithm 1); H = 0 gives 0."""
    norm = frobenius(h)[..., None]
    usable = norm > smallest_norm(h.dtype)
    norm = torch.where(usable, norm, 1.0)
    lam = ridge * norm
    step = 2 / (2 * lam + norm)
    rho = 1 / (1 + 2 * ridge)
    omega = 2.0
    before, x = torch.zeros_like(q), step * q
    for _ in range(num_iters):
        omega = 1 / (1 - rho * rho / 4 * omega)
        residual = (h @ x[..., None])[..., 0] + lam * x - q
        before, x = x, omega * (x - step * residual) - (omega - 1) * before
    return torch.where(usable, x, 0.0)


@without_autocast
def naive_gka(
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
) -> tuple[Tensor, GkaState | None]:
    """Return (o [B,T,H,Dv], (H, U)); H = e^g H + k k^T, U = e^g U + k v^T, o = U^T (q + alpha (x - q)) scale."""
    check_gka(q, k, v, g, beta, alpha, ridge, num_iters)
    layout = PaddedLayout(q, cu_seqlens)
    dtype, heads = q.dtype, q.shape[2]
    q, k, v, g, beta, alpha = (layout.pack(t) for t in cast(q, k, v, g, beta, alpha))
    write = (beta + EPS)[..., None]
    q, k, v = unit(q), expand_heads(unit(k), heads) * write, expand_heads(v, heads) * write
    h, u = gka_start(initial_state, layout.sequences, heads, q, v)
    outputs = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()[..., None, None]
        h = decay * h + k[:, t, :, :, None] * k[:, t, :, None, :]
        u = decay * u + k[:, t, :, :, None] * v[:, t, :, None, :]
        x = chebyshev(h, q[:, t], ridge, num_iters) if num_iters else q[:, t]
        mixed = q[:, t] + alpha[:, t, :, None] * (x - q[:, t])
        outputs.append((mixed[..., None, :] @ u)[..., 0, :] * default_scale(scale, q.shape[-1]))
    o = torch.stack(outputs, 1) if outputs else v[:, :0]
    return layout.unpack(o).to(dtype), (h, u) if output_final_state else None
