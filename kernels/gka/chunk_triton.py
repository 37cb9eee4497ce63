"""Gated KalmaNet in chunks on Triton."""

import torch
from torch import Tensor

from hybridize.kernels.common import start_state
from hybridize.kernels.decay.scan_triton import CHUNK, decay_attention
from hybridize.kernels.gka.inputs import EPS, GkaState, default_scale, unit
from hybridize.kernels.gka.solve_triton import mix
from hybridize.kernels.varlen import chunk_table


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
    q, keys = q.contiguous(), unit(k.float()).to(wide).contiguous()
    g, beta, alpha = (t.float().contiguous() for t in (g, beta, alpha))
    w = (beta + EPS).square()
    h, u = (None, None) if initial_state is None else initial_state
    if h is not None:
        h = start_state(h, (table.sequences, heads, dim, dim), g)
    if u is not None:
        u = start_state(u, (table.sequences, heads, dim, v.shape[-1]), g)
    if not num_iters:  # then x is q
        alpha, num_iters = torch.zeros_like(alpha), 1
    mixed, h = mix(q, keys, g, w, alpha, h, table, ridge, num_iters)
    o, u = decay_attention(mixed, keys, v.to(wide), g, w, u, table, default_scale(scale, dim))
    return o.to(q.dtype), (h, u)
