"""What the Triton decode kernels share: which tokens and which state a program works on."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridize.kernels.varlen import sequence_bounds


class Rows:
    """The rows of [B,T,...]: a batch, or the N sequences of cu_seqlens; and the state slot of each."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, state_indices: Tensor | None):
        bounds = sequence_bounds(x, cu_seqlens)
        self.tokens = x.shape[1]
        self.count = x.shape[0] if bounds is None else len(bounds) - 1
        self.starts = None if cu_seqlens is None else cu_seqlens.to(x.device, torch.int64)
        self.slots = None if state_indices is None else state_indices.to(x.device, torch.int64)
        if self.slots is not None and self.slots.shape != (self.count,):
            raise ValueError(f"state_indices must be [{self.count}], but has shape {tuple(self.slots.shape)}")


def lined(x: Tensor) -> Tensor:
    """Return x with its channels one after the other, copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def new_state(
    initial: Tensor | None, shape: Sequence[int], rows: Rows, like: Tensor, inplace: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the fp32 state to read (None: zeros) and the one to write, the same tensor when in place.

    With state slots the state has any number of them, and rows that name none (index -1) are skipped.
    """
    if initial is None:
        if inplace or rows.slots is not None:
            raise ValueError("inplace=True and state_indices need an initial_state to write to")
        return None, torch.empty((rows.count, *shape), dtype=torch.float32, device=like.device)
    slots = initial.shape[0] if rows.slots is not None else rows.count
    if tuple(initial.shape) != (slots, *shape):
        raise ValueError(f"initial_state has shape {tuple(initial.shape)}, expected {(slots, *shape)}")
    if not inplace:
        old = initial.float().contiguous()
        # Slots that no row names keep what they held.
        return old, torch.empty_like(old) if rows.slots is None else old.clone()
    if initial.dtype != torch.float32 or not initial.is_contiguous():
        raise ValueError("inplace=True needs a contiguous fp32 initial_state")
    return initial, initial


@triton.jit
def row_tokens(starts, n, T, PACKED: tl.constexpr):
    """Return the batch index, first token and end of row n."""
    if PACKED:
        return n * 0, tl.load(starts + n), tl.load(starts + n + 1)
    return n, n * 0, n * 0 + T


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def read_gate(gate, at, LOGITS: tl.constexpr):
    """Read a gate in [0, 1], or the logit of one."""
    x = tl.load(gate + at).to(tl.float32)
    if LOGITS:
        x = sigmoid(x)
    return x
