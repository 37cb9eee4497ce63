"""Checks and constants that every form of gka shares."""

import math

import torch
from torch import Tensor

from hybridize.kernels.common import check_gates, check_tokens, group_size, start_state

EPS = 1e-6  # added to norms and to the write gate
GkaState = tuple[Tensor, Tensor]


def check_gka(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, alpha: Tensor, ridge: float, n: int) -> None:
    """Raise ValueError when shapes or solver settings cannot work."""
    check_tokens(q, k=k, v=v, g=g, beta=beta, alpha=alpha)
    check_gates(q.shape[2], g=g, beta=beta, alpha=alpha)
    group_size(q.shape[2], k.shape[2])
    if v.shape[2] != k.shape[2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if ridge <= 0 or n < 0:
        raise ValueError(f"ridge must be positive and num_iters at least 0, but they are {ridge} and {n}")


def gka_start(state: GkaState | None, rows: int, heads: int, q: Tensor, v: Tensor) -> GkaState:
    """Return the two start states (H [N,H,D,D], U [N,H,D,Dv]), zeros when none are given."""
    h, u = (None, None) if state is None else state
    d = q.shape[-1]
    return start_state(h, (rows, heads, d, d), q), start_state(u, (rows, heads, d, v.shape[-1]), q)


def unit(x: Tensor) -> Tensor:
    """Divide by norm + 1e-6; zero vectors stay zero, with a finite gradient."""
    squared = x.square().sum(-1, keepdim=True)
    positive = squared > 0
    norm = torch.where(positive, squared, 1.0).sqrt() * positive
    return x / (norm + EPS)


def smallest_norm(dtype: torch.dtype) -> float:
    """Return the norm below which a Gram matrix counts as zero, so that its inverse stays finite."""
    return torch.finfo(dtype).tiny * 1e6


def chebyshev_weights(ridge: float, num_iters: int) -> tuple[float, list[float]]:
    """Return the step and the weights omega of the iteration on (H/||H|| + ridge I), whose spectrum is in [r, 1+r]."""
    rho = 1 / (1 + 2 * ridge)
    omega, weights = 2.0, []
    for _ in range(num_iters):
        omega = 1 / (1 - rho * rho / 4 * omega)
        weights.append(omega)
    return 2 / (1 + 2 * ridge), weights


def default_scale(scale: float | None, dim: int) -> float:
    """Return the read-out scale, D**-0.5 unless given."""
    return 1 / math.sqrt(dim) if scale is None else scale
