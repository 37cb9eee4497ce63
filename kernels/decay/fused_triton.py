"""Runs the fused Triton kernels of linear attention with a scalar decay per head, whose states stay in registers."""

import torch
import triton
from torch import Tensor

from hybridize.kernels.common import SMALLEST_LOG_DECAY, group_size
from hybridize.kernels.decay.forward_triton import (
    CHUNK,
    GATE_CONFIGS,
    Config,
    precision,
    state_dtype,
    token_stride,
)
from hybridize.kernels.decay.triton_fused import fused_kernel, power_gate_kernel, total_kernel
from hybridize.kernels.engine import launch, product_tile
from hybridize.kernels.varlen import ChunkTable, segment_table

DTYPES = [torch.bfloat16]  # the others keep their states in fp32, whose products take more registers than there are
PROGRAMS = 256  # as many as a large GPU runs at once, two on each processor
SHORTEST = 4  # chunks of a segment, below which its own state costs as much as it saves
TOTAL_CONFIGS: list[Config] = [{"BK": 128, "BV": 64, "num_warps": 4, "num_stages": stages} for stages in (3, 2)]
FUSED_CONFIGS: list[Config] = [{"BV": 64, "num_warps": 4, "num_stages": stages} for stages in (2, 1)]


def fits(q: Tensor) -> bool:
    """Say whether the fused kernels run on queries like these."""
    return q.dtype in DTYPES


def segment_length(table: ChunkTable, blocks: int) -> int:
    """Return how many chunks a segment has when every sequence gives so many blocks of states."""
    return max(SHORTEST, triton.cdiv(table.chunks, max(1, PROGRAMS // blocks)))


def narrowed(configs: list[Config], **widths: int) -> list[Config]:
    """Return the configurations with tiles no wider than a head needs."""
    return [{**c, **{n: min(c[n], product_tile(width)) for n, width in widths.items() if n in c}} for c in configs]


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    w: Tensor,
    skip: Tensor | None,
    first: Tensor | None,
    last: Tensor,
    table: ChunkTable,
    scale: float,
) -> Tensor:
    """Return o [B,T,H,V] and fill last; first and last are [N,H,K,V] of any strides, g and w contiguous [B,T,H]."""
    (q, stride_q), (k, stride_k), (v, stride_v) = token_stride(q), token_stride(k), token_stride(v)
    heads, width, v_width = last.shape[1:]
    gates = high, low, write, kept, lead = g.new_empty(5, table.chunks, heads, CHUNK).unbind()
    launch(
        power_gate_kernel,
        lambda meta: (table.chunks, triton.cdiv(heads, meta["BH"])),
        GATE_CONFIGS,
        *(g, w, *gates, table.seq_start, table.chunk_start, table.chunk_seq, scale),
        H=heads,
        CHUNK=CHUNK,
        FLOOR=SMALLEST_LOG_DECAY,
    )
    configs = narrowed(FUSED_CONFIGS, BV=v_width)
    segments = segment_table(table, segment_length(table, heads * triton.cdiv(v_width, configs[0]["BV"])))
    shared = {
        "STRIDE_K": stride_k,
        "STRIDE_V": stride_v,
        "H": heads,
        "GROUP_K": group_size(heads, k.shape[2]),
        "GROUP_V": group_size(heads, v.shape[2]),
        "K": width,
        "V": v_width,
        "CHUNK": CHUNK,
        "PRECISION": precision(q),
    }
    places = (table.seq_start, table.chunk_start, segments.segment_start, segments.segment_seq)
    followed = segments.segments - table.sequences
    totals = decays = high  # read by none when no segment follows another
    if followed:
        totals, decays = g.new_empty(followed, heads, v_width, width), g.new_empty(followed, heads)
        launch(
            total_kernel,
            lambda meta: (followed * heads * triton.cdiv(width, meta["BK"]) * triton.cdiv(v_width, meta["BV"]),),
            narrowed(TOTAL_CONFIGS, BK=width, BV=v_width),
            *(k, v, high, kept, totals, decays, *places, segments.followed),
            **shared,
        )
    o = torch.empty(*q.shape[:2], heads, v_width, device=q.device, dtype=q.dtype)
    given = last if first is None else first
    launch(
        fused_kernel,
        lambda meta: (segments.segments * heads * triton.cdiv(v_width, meta["BV"]),),
        configs,
        *(q, k, v, skip, high, low, write, kept, lead, given, totals, decays, o, last, *places, segments.seq_segment),
        STRIDE_Q=stride_q,
        FIRST_K=given.stride(2),
        FIRST_V=given.stride(3),
        LAST_K=last.stride(2),
        LAST_V=last.stride(3),
        GROUP_Q=group_size(heads, q.shape[2]),
        GIVEN=first is not None,
        SKIP=skip is not None,
        STATE=getattr(triton.language, str(state_dtype(q)).removeprefix("torch.")),
        TAILS=table.chunks * CHUNK != q.shape[0] * q.shape[1],
        BK=product_tile(width),
        **shared,
    )
    return o
