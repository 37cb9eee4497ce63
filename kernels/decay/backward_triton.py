"""Runs the Triton kernels of linear attention with a scalar decay per head, backward."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hybridize.kernels.common import SMALLEST_LOG_DECAY, group_size
from hybridize.kernels.decay.forward_triton import CHUNK, Config, Gates, precision, token_stride
from hybridize.kernels.decay.triton_backward import gate_gradient_kernel, gradient_kernel, pair_kernel
from hybridize.kernels.engine import launch, product_tile
from hybridize.kernels.varlen import ChunkTable

PAIR_CONFIGS: list[Config] = [{"num_warps": 4, "num_stages": 1}]


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    w: Tensor,
    d_o: Tensor,
    skip: Tensor | None,
    gates: Gates,
    states: Tensor,
    d_states: Tensor,
    table: ChunkTable,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, g, w and skip from the states before and their gradients after each chunk."""
    heads, width, v_width = states.shape[1:]
    pairs = _pairs(q, k, v, w, d_o, skip is not None, gates, table, scale)
    key_major, value_major = (v_width, 1), (1, v_width)
    by_write, by_read = (CHUNK, 1), (1, CHUNK)
    parts = triton.cdiv(width, channels_of(q, width))
    read, written = states.new_empty(2, parts, table.chunks, heads, CHUNK, dtype=torch.float32)
    products = read.new_empty(parts, table.chunks, heads)
    dq, dk, dv, dg, dw = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v, g, w))
    _channel_gradients(
        dq, q, d_o, states, value_major, pairs.d_scores, by_read, k, gates.lead, table, read, d_states, products
    )
    _channel_gradients(dk, k, v, d_states, value_major, pairs.d_scores, by_write, q, gates.kept, table, written)
    _channel_gradients(dv, v, k, d_states, key_major, pairs.scores, by_write, d_o, gates.kept, table, skip=skip)
    launch(
        gate_gradient_kernel,
        lambda meta: (table.chunks, triton.cdiv(heads, meta["BH"])),
        [{"BH": 4, "num_warps": 4}],
        *(g, w, gates.c, gates.lead, pairs.d_weight, pairs.d_gate, read, written, products, dg, dw),
        *(table.seq_start, table.chunk_start, table.chunk_seq),
        H=heads,
        PARTS=parts,
        CHUNK=CHUNK,
        FLOOR=SMALLEST_LOG_DECAY,
    )
    return dq, dk, dv, dg, dw, None if skip is None else pairs.d_skip.sum(0).to(skip.dtype)


class Pairs(NamedTuple):
    """What the pairs (i,t) of each chunk and head give: tiles [chunks,H,C,C] by write i, and rows [chunks,H,C]."""

    scores: Tensor
    d_scores: Tensor
    d_weight: Tensor
    d_gate: Tensor
    d_skip: Tensor  # [chunks,H]


def _pairs(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, d_o: Tensor, skip: bool, gates: Gates, table: ChunkTable, scale: float
) -> Pairs:
    (q, stride_q), (k, stride_k), (v, stride_v), (d_o, stride_do) = (token_stride(x) for x in (q, k, v, d_o))
    heads = w.shape[2]
    scores, d_scores = q.new_empty(2, table.chunks, heads, CHUNK, CHUNK)
    d_weight, d_gate = w.new_empty(2, table.chunks, heads, CHUNK)
    d_skip = w.new_empty(table.chunks, heads)
    launch(
        pair_kernel,
        lambda meta: (table.chunks * heads,),
        PAIR_CONFIGS,
        *(q, k, v, w, d_o, gates.c, scores, d_scores, d_weight, d_gate, d_skip),
        *(table.seq_start, table.chunk_start, table.chunk_seq, stride_q, stride_k, stride_v, stride_do, scale),
        H=heads,
        GROUP_Q=group_size(heads, q.shape[2]),
        GROUP_K=group_size(heads, k.shape[2]),
        GROUP_V=group_size(heads, v.shape[2]),
        K=k.shape[3],
        V=v.shape[3],
        CHUNK=CHUNK,
        PRECISION=precision(q),
        SKIP=skip,
        BK=product_tile(k.shape[3]),
        BV=product_tile(v.shape[3]),
    )
    return Pairs(scores, d_scores, d_weight, d_gate, d_skip)


def channels_of(x: Tensor, width: int) -> int:
    """Return how many channels of a gradient a program writes."""
    return min(32 if x.dtype == torch.float32 else 64, product_tile(width))


def gradient_configs(x: Tensor) -> list[Config]:
    """Return pipelined configurations first; 16-bit tiles fit the registers of 4 warps when the states are too."""
    warps = 4 if x.dtype == torch.bfloat16 else 8
    return [{"num_warps": warps, "num_stages": stages} for stages in ((1,) if x.dtype == torch.float32 else (2, 1))]


def _channel_gradients(
    out: Tensor,
    own: Tensor,
    x: Tensor,
    y: Tensor,
    y_strides: tuple[int, int],
    z: Tensor,
    z_strides: tuple[int, int],
    u: Tensor,
    factor: Tensor,
    table: ChunkTable,
    row_sums: Tensor | None = None,
    other: Tensor | None = None,
    products: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Fill out, the gradient of own, as gradient_kernel says."""
    (own, stride_own), (x, stride_x), (u, stride_u) = token_stride(own), token_stride(x), token_stride(u)
    heads, width, channels = factor.shape[1], x.shape[3], channels_of(x, out.shape[3])
    group = group_size(heads, out.shape[2])
    launch(
        gradient_kernel,
        lambda meta: (table.chunks * (heads // group) * triton.cdiv(out.shape[3], channels),),
        gradient_configs(x),
        *(x, y, z, u, other, own, factor, skip, out, row_sums, products),
        *(table.seq_start, table.chunk_start, table.chunk_seq, stride_x, stride_u, stride_own),
        H=heads,
        GROUP=group,
        GROUP_X=group_size(heads, x.shape[2]),
        GROUP_U=group_size(heads, u.shape[2]),
        X=width,
        OUT=out.shape[3],
        Y_INNER=y_strides[0],
        Y_OUTER=y_strides[1],
        Z_ROWS=z_strides[0],
        Z_COLUMNS=z_strides[1],
        CHUNK=CHUNK,
        PRECISION=precision(x),
        SKIP=skip is not None,
        ROW_SUMS=row_sums is not None,
        PRODUCTS=products is not None,
        BX=product_tile(width),
        BO=channels,
    )
