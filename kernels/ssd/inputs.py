"""Checks that every form of ssd shares."""

from torch import Tensor

from hybridize.kernels.common import check_gates, check_tokens, group_size


def check_ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> None:
    """Raise ValueError when shapes do not fit."""
    heads = x.shape[2]
    check_tokens(x, dt=dt, B=b, C=c)
    check_gates(heads, dt=dt)
    group_size(heads, b.shape[2])
    if b.shape != c.shape:
        raise ValueError(f"B {tuple(b.shape)} and C {tuple(c.shape)} differ")
    for name, per_head in (("A", a), ("D", d)):
        if per_head is not None and per_head.shape != (heads,):
            raise ValueError(f"{name} must be [{heads}], but has shape {tuple(per_head.shape)}")


def add_skip(y: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    """Return y + D x, or y when there is no D."""
    return y if d is None else y + d.to(y.dtype)[:, None] * x
