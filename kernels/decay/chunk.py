"""Chunked linear attention: S_t = exp(g_t) S_{t-1} + w_t k_t v_t^T and o_t = S_t^T q_t.

M chunks of C tokens; q [M,H or Hk,C,D], k [M,Hk,C,D], v [M,H or Hk,C,Dv], g and w [M,H,C], states [M,H,D,Dv].
With c the running sum of g inside a chunk, E_ti = exp(c_t - c_i) w_i for i <= t and d_t = exp(c_t):
o_t = d_t S_0^T q_t + sum_i E_ti (q_t.k_i) v_i, and the chunk's last state is d_C S_0 + sum_i E_Ci k_i v_i^T.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.kernels.common import SMALLEST_LOG_DECAY


def decay_factors(g: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return E [M,H,C,C] (lower triangular) and d [M,H,C] of log decays and write weights [M,H,C]."""
    # Differences of running sums lose everything in fp32 once one step forgets at once, hence fp64 (which mps lacks).
    exact = torch.float32 if g.device.type == "mps" else torch.float64
    c = g.to(exact).clamp_min(SMALLEST_LOG_DECAY).cumsum(-1)
    gap = (c[..., :, None] - c[..., None, :]).to(g.dtype)
    future = torch.ones(gap.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
    e = gap.masked_fill(future, float("-inf")).exp()
    return e if weight is None else e * weight[..., None, :], c.to(g.dtype).exp()


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [M,H,R,X] by b [M,Hk,X,Y] whose heads are shared by groups of a's, without repeating b."""
    m, heads, rows, inner = a.shape
    key_heads = b.shape[1]
    a = a.reshape(m * key_heads, heads // key_heads * rows, inner)
    return torch.bmm(a, b.reshape(m * key_heads, inner, b.shape[-1])).reshape(m, heads, rows, b.shape[-1])


def by_group(x: Tensor, key_heads: int) -> Tensor:
    """View [M,H,...] as [M,Hk,H/Hk,...], so that it broadcasts against key heads."""
    return x.reshape(x.shape[0], key_heads, x.shape[1] // key_heads, *x.shape[2:])


def scale_heads(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x [M,Hk or H,R,X] by factor [M,H,R or 1,X or 1], giving H heads."""
    if x.shape[1] == factor.shape[1]:
        return x * factor
    return (x[:, :, None] * by_group(factor, x.shape[1])).flatten(1, 2)


def written_states(k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    """Return what each chunk adds to its state, sum_i E_Ci k_i v_i^T: [M,H,D,Dv]."""
    kept = scale_heads(k.transpose(-1, -2).contiguous(), e[..., -1:, :])
    return grouped_matmul(kept, v)


def read_out(q: Tensor, k: Tensor, v: Tensor, e: Tensor, d: Tensor, starts: Tensor) -> Tensor:
    """Return o [M,H,C,Dv] of queries against the chunk's own tokens and its start state."""
    scores = scale_heads(grouped_matmul(q, k.transpose(-1, -2)), e)
    inside = grouped_matmul(scores, v)
    before = torch.bmm(scale_heads(q, d[..., None]).flatten(0, 1), starts.flatten(0, 1))
    return inside + before.view_as(inside)


class _ScanStates(torch.autograd.Function):
    """The only sequential part: carry the states from chunk to chunk."""

    @staticmethod
    def forward(ctx: Any, added: Tensor, decay: Tensor, initial: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        starts = torch.empty_like(added)
        state = initial.clone()
        at = 0
        for n in counts:
            here = slice(at, at + n)
            starts[here] = state[:n]
            torch.addcmul(added[here], starts[here], decay[here, :, None, None], out=state[:n])
            at += n
        ctx.save_for_backward(starts, decay)
        ctx.counts = counts
        return starts, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_starts: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        starts, decay = ctx.saved_tensors
        d_added = torch.empty_like(starts)
        d_state = d_final.clone()
        at = starts.shape[0]
        for n in reversed(ctx.counts):
            here = slice(at - n, at)
            d_added[here] = d_state[:n]
            torch.addcmul(d_starts[here], d_added[here], decay[here, :, None, None], out=d_state[:n])
            at -= n
        d_decay = torch.linalg.vecdot(d_added.flatten(2), starts.flatten(2))
        return d_added, d_decay, d_state, None


def scan_states(added: Tensor, decay: Tensor, initial: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk [M,H,D,Dv] and the final ones [N,H,D,Dv]; counts as in ChunkLayout."""
    starts, final = _ScanStates.apply(added, decay, initial, counts)
    return starts, final
