"""Mamba-2's recurrence in chunks on Triton: decay attention with queries C, keys B and values x."""

from torch import Tensor

from hybridize.kernels.common import start_state
from hybridize.kernels.decay.forward_triton import CHUNK
from hybridize.kernels.decay.scan_triton import decay_attention
from hybridize.kernels.varlen import chunk_table


def chunk_ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what chunk_ssd returns, whose arguments these are, in chunks of 64."""
    table = chunk_table(x, CHUNK, cu_seqlens)
    dt = dt.float()
    if initial_state is not None:
        initial_state = start_state(initial_state, (table.sequences, *x.shape[2:], B.shape[-1]), dt)
    skip = None if D is None else D.float()
    B, C = B.to(x.dtype), C.to(x.dtype)
    return decay_attention(C, B, x, dt * A.float(), dt, initial_state, table, 1.0, value_major=True, skip=skip)
