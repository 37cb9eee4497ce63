"""Checks and normalisation that every form of the gated delta rule shares."""

from torch import Tensor

from hybridize.kernels.common import check_gates, check_tokens, group_size


def check_gdn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raise ValueError when shapes do not fit."""
    check_tokens(q, k=k, v=v, g=g, beta=beta)
    check_gates(q.shape[2], g=g, beta=beta)
    group_size(q.shape[2], k.shape[2])
    if v.shape[2] != k.shape[2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")


def unit(x: Tensor) -> Tensor:
    """Multiply by rsqrt(sum of squares + 1e-6)."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
