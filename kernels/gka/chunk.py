"""Gated KalmaNet in chunks, for training and prefill."""

import torch
from torch import Tensor

from hybridize.kernels.common import cast, without_autocast
from hybridize.kernels.decay import decay_factors, read_out, scan_states, written_states
from hybridize.kernels.engine import uses_triton
from hybridize.kernels.gka.inputs import EPS, GkaState, check_gka, default_scale, gka_start, unit
from hybridize.kernels.gka.solve import solve
from hybridize.kernels.varlen import ChunkLayout


@without_autocast
def chunk_gka(
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
    chunk_size: int = 64,
) -> tuple[Tensor, GkaState | None]:
    """Return what naive_gka returns, differentiable in every input and state, with memory linear in T.

    chunk_size is for the torch engine; Triton's chunks are 64 tokens.
    """
    check_gka(q, k, v, g, beta, alpha, ridge, num_iters)
    # In fp32, the states of wider heads exceed the shared memory of a GPU.
    if uses_triton(q, q.shape[-1], v.shape[-1], widest=64 if q.dtype == torch.float32 else 128):
        from hybridize.kernels.gka.chunk_triton import chunk_gka_triton

        o, state = chunk_gka_triton(q, k, v, g, beta, alpha, scale, ridge, num_iters, initial_state, cu_seqlens)
        return o, state if output_final_state else None
    layout = ChunkLayout(q, chunk_size, cu_seqlens)
    dtype, (heads, dim) = q.dtype, q.shape[2:]
    q, k, v, g, beta, alpha = (layout.pack(t) for t in cast(q, k, v, g, beta, alpha))
    q, k = unit(q), unit(k)
    e, d = decay_factors(g, (beta + EPS).square())
    # One pass carries both states, side by side: H is what the keys write for themselves.
    start = torch.cat(gka_start(initial_state, layout.sequences, heads, q, v), -1)
    added = written_states(k, torch.cat([k, v], -1), e)
    starts, final = scan_states(added, d[..., -1], layout.sort(start), layout.counts)
    x = q
    if num_iters:
        x = torch.lerp(q, solve(q, k, e, d, starts[..., :dim], ridge, num_iters), alpha[..., None])
    o = layout.unpack(read_out(x * default_scale(scale, dim), k, v, e, d, starts[..., dim:])).to(dtype)
    if not output_final_state:
        return o, None
    h, u = layout.unsort(final).split([dim, v.shape[-1]], -1)
    return o, (h.contiguous(), u.contiguous())
