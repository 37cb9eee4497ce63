"""What every kernel needs: the compute dtype, head checks, states and in-place results."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

SMALLEST_LOG_DECAY = -800.0  # exp of it is 0 even in fp64, and a chunk of them keeps some digits in fp32


P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(form: Callable[P, R]) -> Callable[P, R]:
    """Make a function of tensors run in the dtypes it chooses itself, also under torch.autocast."""

    @wraps(form)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(first.device.type, enabled=False):
            return form(*args, **kwargs)

    return run


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64 inputs and float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(x: Tensor, *others: Tensor) -> list[Tensor]:
    """Return all tensors in the compute dtype of the first."""
    dtype = compute_dtype(x)
    return [t.to(dtype) for t in (x, *others)]


def group_size(heads: int, key_heads: int) -> int:
    """Return how many query heads share one key head; ValueError when they do not divide."""
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"{heads} heads are no multiple of {key_heads} key/value heads")
    return heads // key_heads


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat [B,T,Hk,D] to [B,T,heads,D], each key head for its consecutive query heads."""
    group = group_size(heads, x.shape[2])
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def check_tokens(x: Tensor, **others: Tensor) -> None:
    """Raise ValueError when a tensor's batch or token count differs from that of x [B,T,...]."""
    for name, other in others.items():
        if other.shape[:2] != x.shape[:2]:
            raise ValueError(f"{name} has shape {tuple(other.shape)}, but the first input has {tuple(x.shape)}")


def check_gates(heads: int, **gates: Tensor) -> None:
    """Raise ValueError when a gate is not [B,T,heads]."""
    for name, gate in gates.items():
        if gate.ndim != 3 or gate.shape[2] != heads:
            raise ValueError(f"{name} must be [batch, tokens, {heads} heads], but has shape {tuple(gate.shape)}")


def start_state(initial: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return the initial state in like's dtype, or zeros; ValueError when its shape is not the expected one."""
    if initial is None:
        return like.new_zeros(tuple(shape))
    if tuple(initial.shape) != tuple(shape):
        raise ValueError(f"initial_state has shape {tuple(initial.shape)}, expected {tuple(shape)}")
    return initial.to(like.dtype)


def store_in_place(targets: Sequence[Tensor] | None, values: Sequence[Tensor]) -> None:
    """Write new states over the tensors that the caller gave as initial state."""
    if targets is None:
        raise ValueError("inplace=True needs an initial_state to write to")
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
