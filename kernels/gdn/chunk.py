"""The gated delta rule in chunks, for training and prefill.

Inside a chunk with start state S_0, the corrections are V' = T (b v) - T (b d k) S_0, with the lower triangular
T = (I + tril(b k.k E, -1))^-1 (the WY form). Given them the layer is plain decayed linear attention,
o = d q S_0 + (q.k E) V'.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.kernels.common import cast, start_state, without_autocast
from hybridize.kernels.decay.chunk import decay_factors, grouped_matmul, read_out, scale_heads
from hybridize.kernels.engine import uses_triton
from hybridize.kernels.gdn.inputs import check_gdn, unit
from hybridize.kernels.varlen import ChunkLayout


class _ScanDelta(torch.autograd.Function):
    """Carry the states from chunk to chunk: V' = u - w S, S <- a S + kept^T V'."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, w: Tensor, kept: Tensor, decay: Tensor, initial: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = u.shape[1]
        starts = u.new_empty(*u.shape[:2], w.shape[-1], u.shape[-1])
        values = torch.empty_like(u)
        flat_u, flat_w, flat_kept = u.flatten(0, 1), w.flatten(0, 1), kept.flatten(0, 1)
        flat_starts, flat_values, flat_decay = (
            starts.flatten(0, 1),
            values.flatten(0, 1),
            decay.flatten()[:, None, None],
        )
        state = initial.clone()
        flat_state = state.flatten(0, 1)
        at = 0
        for n in counts:
            here = slice(at * heads, (at + n) * heads)
            s = flat_state[: n * heads]
            flat_starts[here] = s
            torch.baddbmm(flat_u[here], flat_w[here], s, alpha=-1, out=flat_values[here])
            s.mul_(flat_decay[here]).baddbmm_(flat_kept[here], flat_values[here])
            at += n
        ctx.save_for_backward(w, kept, decay, starts, values)
        ctx.counts = counts
        return values, starts, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_values: Tensor, d_starts: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_final.device.type, enabled=False):
            return _ScanDelta.gradients(ctx, d_values, d_starts, d_final)

    @staticmethod
    def gradients(ctx: Any, d_values: Tensor, d_starts: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs."""
        w, kept, decay, starts, values = ctx.saved_tensors
        heads = w.shape[1]
        d_after = torch.empty_like(starts)  # gradient of the state behind each chunk
        d_u = torch.empty_like(values)
        d_state = d_final.clone()
        flat_state = d_state.flatten(0, 1)
        given_values, given_starts = d_values.flatten(0, 1), d_starts.flatten(0, 1)
        flat_after, flat_u, flat_decay = d_after.flatten(0, 1), d_u.flatten(0, 1), decay.flatten()[:, None, None]
        flat_kept, turned_w = kept.flatten(0, 1), w.flatten(0, 1).transpose(-1, -2)
        at = starts.shape[0]
        for n in reversed(ctx.counts):
            here = slice((at - n) * heads, at * heads)
            s = flat_state[: n * heads]
            flat_after[here] = s
            torch.baddbmm(given_values[here], flat_kept[here].transpose(-1, -2), s, out=flat_u[here])
            torch.addcmul(given_starts[here], s, flat_decay[here], out=s)
            s.baddbmm_(turned_w[here], flat_u[here], alpha=-1)
            at -= n
        d_w = -torch.matmul(d_u, starts.transpose(-1, -2))
        d_kept = torch.matmul(d_after, values.transpose(-1, -2))
        d_decay = torch.linalg.vecdot(d_after.flatten(2), starts.flatten(2))
        return d_u, d_w, d_kept, d_decay, d_state, None


@without_autocast
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Return what naive_gated_delta_rule returns, differentiable in every input and the state, memory linear in T.

    chunk_size is that of the torch form; the Triton kernels have their own.
    """
    check_gdn(q, k, v, g, beta)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if uses_triton(q, q.shape[3], v.shape[3]):
        from hybridize.kernels.gdn import chunk_triton

        o, final = chunk_triton.chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens)
        return o, final if output_final_state else None
    o, final = torch_chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size)
    return o, final if output_final_state else None


def torch_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Return (o, S) of checked inputs."""
    layout = ChunkLayout(q, chunk_size, cu_seqlens)
    dtype, (heads, dim) = q.dtype, q.shape[2:]
    q, k, v, g, beta = (layout.pack(t) for t in cast(q, k, v, g, beta))
    q, k = unit(q) * scale, unit(k)
    start = layout.sort(start_state(initial_state, (layout.sequences, heads, dim, v.shape[-1]), q))
    e, d = decay_factors(g)
    system = scale_heads(grouped_matmul(k, k.transpose(-1, -2)), e) * beta[..., None]
    rhs = torch.cat([scale_heads(v, beta[..., None]), scale_heads(k, (beta * d)[..., None])], -1)
    # The diagonal is taken as one and the upper triangle is not read.
    u, w = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True).split([v.shape[-1], dim], -1)
    kept = scale_heads(k.transpose(-1, -2).contiguous(), e[..., -1:, :])
    values, starts, final = _ScanDelta.apply(u, w, kept, d[..., -1], start, layout.counts)
    o = layout.unpack(read_out(q, k, values, e, d, starts)).to(dtype)
    return o, layout.unsort(final)
