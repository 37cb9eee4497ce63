"""Gated KalmaNet in chunks on Triton."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.kernels.common import start_state
from hybridize.kernels.decay.forward_triton import CHUNK
from hybridize.kernels.decay.scan_triton import decay_attention
from hybridize.kernels.engine import launch, product_tile
from hybridize.kernels.gka.inputs import EPS, GkaState, default_scale
from hybridize.kernels.gka.solve_triton import mix
from hybridize.kernels.gka.triton_kernels import unit_kernel
from hybridize.kernels.varlen import chunk_table


class _Unit(torch.autograd.Function):
    """x / (|x| + 1e-6) of the rows of x [...,D], in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        return _unit(x, None, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _unit(x, d_out.contiguous(), x.dtype), None


def _unit(x: Tensor, d_out: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    dim = x.shape[-1]
    rows = x.numel() // dim
    launch(
        unit_kernel,
        lambda meta: (triton.cdiv(rows, meta["ROWS"]),),
        [{"ROWS": 32, "num_warps": 4}],
        *(x, out, d_out, rows),
        D=dim,
        EPS=EPS,
        BD=product_tile(dim),
    )
    return out


def chunk_gka_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    alpha: Tensor,
    scale: float | None,
    ridge: float,
    num_iters: int,
    initial_state: GkaState | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, GkaState]:
    """Return chunk_gka of checked inputs, with the states."""
    table = chunk_table(q, CHUNK, cu_seqlens)
    heads, dim = q.shape[2:]
    # fp16 has too little range for x and for the value path's weights.
    wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    q, keys = q.contiguous(), _Unit.apply(k.contiguous(), wide)
    g, beta, alpha = (t.float().contiguous() for t in (g, beta, alpha))
    w = (beta + EPS).square()
    h, u = (None, None) if initial_state is None else initial_state
    if h is not None:
        h = start_state(h, (table.sequences, heads, dim, dim), g).contiguous()
    if u is not None:
        u = start_state(u, (table.sequences, heads, dim, v.shape[-1]), g).contiguous()
    if not num_iters:  # then x is q
        alpha, num_iters = torch.zeros_like(alpha), 1
    mixed, low, h = mix(q, keys, g, w, alpha, h, table, ridge, num_iters)
    # o = U^T x can be a small difference of large parts of x, more than bf16 holds.
    o, u = decay_attention(mixed, keys, v.to(wide), g, w, u, table, default_scale(scale, dim), q_low=low)
    return o.to(q.dtype), (h, u)
