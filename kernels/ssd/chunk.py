"""Mamba-2's recurrence in chunks: linear attention with queries C, keys B, values x and write weights dt."""

from torch import Tensor

from hybridize.kernels.common import cast, start_state, without_autocast
from hybridize.kernels.decay import decay_factors, grouped_matmul, read_out, scan_states
from hybridize.kernels.engine import uses_triton
from hybridize.kernels.ssd.inputs import add_skip, check_ssd
from hybridize.kernels.varlen import ChunkLayout


@without_autocast
def chunk_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Return what naive_ssd returns, differentiable in every input and the state, memory linear in T.

    chunk_size is for the torch engine.
    """
    check_ssd(x, dt, A, B, C, D)
    if uses_triton(x, x.shape[-1], B.shape[-1]):
        from hybridize.kernels.ssd.chunk_triton import chunk_ssd_triton

        y, last = chunk_ssd_triton(x, dt, A, B, C, D, initial_state, cu_seqlens)
        return y, last if output_final_state else None
    layout = ChunkLayout(x, chunk_size, cu_seqlens)
    dtype, (heads, width) = x.dtype, x.shape[2:]
    A = A.to(cast(x)[0].dtype)
    x, dt, B, C = (layout.pack(t) for t in cast(x, dt, B, C))
    start = layout.sort(start_state(initial_state, (layout.sequences, heads, width, B.shape[-1]), x))
    e, d = decay_factors(dt * A[:, None], dt)
    # Written as [P,N], the layout of the state: x^T of each head times B of its group.
    added = grouped_matmul(x.transpose(-1, -2) * e[..., -1:, :], B)
    starts, final = scan_states(added, d[..., -1], start, layout.counts)
    y = read_out(C, B, x, e, d, starts.transpose(-1, -2))
    y = layout.unpack(add_skip(y.transpose(1, 2), x.transpose(1, 2), D).transpose(1, 2)).to(dtype)
    return y, layout.unsort(final) if output_final_state else None
