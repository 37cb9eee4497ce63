"""What every kernel needs: the compute dtype, head checks, states and in-place results."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_LOG_DECAY = -800.0  # exp of it is 0 even in fp64, and a chunk of them keeps some digits in fp32


P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(form: Callable[P, R]) -> Callable[P, R]:
    """Make a function of tensors run in the dtypes it chooses itself, also under torch.autocast."""

    @wraps(form)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kind = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).device.type
        if not torch.is_autocast_enabled(kind):
            return form(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
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


def read_slots(state: Tensor | None, slots: Tensor | None) -> Tensor | None:
    """Return the states [N,...] that slots [N] name in a pool of them; a row without one (-1) reads any."""
    return state if slots is None or state is None else state[slots.clamp_min(0)]


def store_slots(targets: Sequence[Tensor] | None, slots: Tensor | None, values: Sequence[Tensor], inplace: bool) -> Any:
    """Return the new states: values themselves, written over targets when in place, in their slots when there are."""
    if targets is None and (inplace or slots is not None):
        raise ValueError("inplace=True and state_indices need an initial_state to write to")
    if targets is None or not (inplace or slots is not None):
        return tuple(values)
    with torch.no_grad():
        out = tuple(targets) if inplace else tuple(t.clone() for t in targets)
        for target, value in zip(out, values, strict=True):
            if slots is None:
                target.copy_(value)
            else:
                target[slots[slots >= 0]] = value[slots >= 0].to(target.dtype)
    return out


def decay_of(logits: Tensor, decay_gate: tuple[Tensor, Tensor]) -> Tensor:
    """Return -exp(A_log) softplus(logits + dt_bias) for decay_gate = (A_log, dt_bias), in fp32 or better."""
    a_log, dt_bias = decay_gate
    dtype = compute_dtype(logits)
    return -a_log.to(dtype).exp() * F.softplus(logits.to(dtype) + dt_bias.to(dtype))


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Say whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
