"""Linear attention with a scalar decay per head on Triton; chunk.py has the formulas."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.kernels.common import SMALLEST_LOG_DECAY, group_size
from hybridize.kernels.decay.triton_backward import gradient_kernel
from hybridize.kernels.decay.triton_kernels import gate_kernel, output_kernel, scan_kernel
from hybridize.kernels.engine import launch
from hybridize.kernels.varlen import ChunkTable

CHUNK = 64
BUSY = 120  # programs that keep most of a large GPU's processors at work
Config = dict[str, Any]


class Gates(NamedTuple):
    """What the kernels read of the gates, [chunks,H,C] padded: c fp64 the running sum of g, and fp32 row factors."""

    c: Tensor
    kept: Tensor  # e^(c_C - c) w
    lead: Tensor  # scale e^c


def token_stride(x: Tensor) -> tuple[Tensor, int]:
    """Return x [B,T,H,D] and the distance of its tokens in one row of B*T; copied only when they make no such row."""
    batch, tokens, heads, width = x.shape
    in_token = (width == 1 or x.stride(3) == 1) and (heads == 1 or x.stride(2) == width)
    if not in_token or (batch > 1 and x.stride(0) != tokens * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1)


def state_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the states between chunks: bf16 for bf16, and fp32 for fp16, whose range they may leave."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def precision(x: Tensor) -> str:
    """Return the precision of fp32 products; tf32 holds every digit of 16-bit inputs."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def block(width: int) -> int:
    """Return the tile that covers a head; tensor cores need 16."""
    return max(16, triton.next_power_of_2(width))


def prepare_gates(g: Tensor, w: Tensor, table: ChunkTable, scale: float) -> Gates:
    """Return the prepared gates of g and w, contiguous fp32 [B,T,H]."""
    heads = g.shape[2]
    c, kept, lead = (
        torch.empty(table.chunks, heads, CHUNK, device=g.device, dtype=dtype)
        for dtype in (torch.float64, torch.float32, torch.float32)
    )
    launch(
        gate_kernel,
        lambda meta: (table.chunks, triton.cdiv(heads, meta["BH"])),
        [{"BH": 4, "num_warps": 4}],
        *(g, w, c, kept, lead, table.seq_start, table.chunk_start, table.chunk_seq, scale),
        H=heads,
        CHUNK=CHUNK,
        FLOOR=SMALLEST_LOG_DECAY,
    )
    return Gates(c, kept, lead)


def scan_configs(programs: int, k: int, v: int) -> list[Config]:
    """Return blocks of 64x64, or narrower ones when there are few sequences and heads to share the work."""
    bk, bv = min(64, block(k)), min(64, block(v))
    while bv > 16 and programs * triton.cdiv(k, bk) * triton.cdiv(v, bv) < BUSY:
        bv //= 2
    return [{"BK": bk, "BV": bv, "num_warps": 4, "num_stages": stages} for stages in (4, 2, 1)]


def scan(
    a: Tensor,
    b: Tensor,
    factor: Tensor,
    c: Tensor,
    first: Tensor | None,
    last: Tensor,
    table: ChunkTable,
    dtype: torch.dtype,
    reverse: bool = False,
) -> Tensor:
    """Return the states [chunks,H,K,V] that scan_kernel carries from first to last, both [N,H,K,V] of any strides."""
    (a, stride_a), (b, stride_b) = token_stride(a), token_stride(b)
    heads, k, v = last.shape[1:]
    states = torch.empty(table.chunks, heads, k, v, device=a.device, dtype=dtype)
    given = last if first is None else first
    launch(
        scan_kernel,
        lambda meta: (table.sequences * heads * triton.cdiv(k, meta["BK"]) * triton.cdiv(v, meta["BV"]),),
        scan_configs(table.sequences * heads, k, v),
        *(a, b, factor, c, given, states, last, table.seq_start, table.chunk_start, stride_a, stride_b),
        *(*given.stride()[2:], *last.stride()[2:]),
        H=heads,
        GROUP_A=group_size(heads, a.shape[2]),
        GROUP_B=group_size(heads, b.shape[2]),
        K=k,
        V=v,
        CHUNK=CHUNK,
        PRECISION=precision(a),
        GIVEN=first is not None,
        REVERSE=reverse,
    )
    return states


def empty_state(table: ChunkTable, heads: int, k: int, v: int, value_major: bool, device: torch.device) -> Tensor:
    """Return new fp32 states [N,H,K,V], in memory [N,H,V,K] when value_major."""
    shape = (v, k) if value_major else (k, v)
    state = torch.empty(table.sequences, heads, *shape, device=device, dtype=torch.float32)
    return state.mT if value_major else state


def output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    skip: Tensor | None,
    gates: Gates,
    states: Tensor,
    table: ChunkTable,
    scale: float,
) -> Tensor:
    """Return o [B,T,H,V] from the states before each chunk."""
    (q, stride_q), (k, stride_k), (v, stride_v) = token_stride(q), token_stride(k), token_stride(v)
    heads, width, v_width = states.shape[1:]
    o = torch.empty(*q.shape[:2], heads, v_width, device=q.device, dtype=q.dtype)
    narrow, wide = min(64, block(v_width)), block(v_width)
    launch(
        output_kernel,
        lambda meta: (table.chunks * heads * triton.cdiv(v_width, meta["BV"]),),
        [
            {"BV": wide, "num_warps": 4, "num_stages": 1},
            {"BV": narrow, "num_warps": 4, "num_stages": 1},
        ],
        *(q, k, v, w, skip, gates.c, gates.lead, states, o),
        *(table.seq_start, table.chunk_start, table.chunk_seq, stride_q, stride_k, stride_v, scale),
        H=heads,
        GROUP_Q=group_size(heads, q.shape[2]),
        GROUP_K=group_size(heads, k.shape[2]),
        GROUP_V=group_size(heads, v.shape[2]),
        K=width,
        V=v_width,
        CHUNK=CHUNK,
        PRECISION=precision(q),
        SKIP=skip is not None,
        BK=block(width),
    )
    return o


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
    (q, stride_q), (k, stride_k), (v, stride_v) = token_stride(q), token_stride(k), token_stride(v)
    d_o, stride_do = token_stride(d_o)
    heads, width, v_width = states.shape[1:]
    groups = [group_size(heads, x.shape[2]) for x in (q, k, v)]
    dq, dk, dv, dg, dw = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v, g, w))
    d_skip = None if skip is None else skip.new_empty(table.chunks, heads, dtype=torch.float32)
    group = math.lcm(*groups)
    launch(
        gradient_kernel,
        lambda meta: (table.chunks * (heads // group),),
        [{"num_warps": 8, "num_stages": 1}],
        *(q, k, v, g, w, d_o, skip, gates.c, gates.lead, states, d_states, dq, dk, dv, dg, dw, d_skip),
        *(table.seq_start, table.chunk_start, table.chunk_seq, stride_q, stride_k, stride_v, stride_do, scale),
        H=heads,
        GROUP=group,
        GROUP_Q=groups[0],
        GROUP_K=groups[1],
        GROUP_V=groups[2],
        K=width,
        V=v_width,
        CHUNK=CHUNK,
        FLOOR=SMALLEST_LOG_DECAY,
        PRECISION=precision(q),
        SKIP=skip is not None,
        BK=block(width),
        BV=block(v_width),
    )
    return dq, dk, dv, dg, dw, None if skip is None or d_skip is None else d_skip.sum(0).to(skip.dtype)


def chunk_states(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    w: Tensor,
    initial_state: Tensor | None,
    table: ChunkTable,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the states [chunks,H,K,V] before each chunk of 64 in dtype, and the last ones [N,H,K,V] in fp32."""
    g, w = g.contiguous(), w.contiguous()
    final = empty_state(table, g.shape[2], k.shape[3], v.shape[3], False, k.device)
    gates = prepare_gates(g, w, table, 1.0)
    return scan(k, v, gates.kept, gates.c, initial_state, final, table, dtype), final


def decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    w: Tensor,
    initial_state: Tensor | None,
    table: ChunkTable,
    scale: float,
    value_major: bool = False,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B,T,H,V] = scale S^T q + skip v, and the last states fp32 [N,H,K,V], or [N,H,V,K] when value_major.

    S_t = e^(g_t) S_{t-1} + w_t k_t v_t^T; g and w fp32 [B,T,H]; q, k and v may have fewer heads; skip [H] or None.
    """
    return _DecayAttention.apply(q, k, v, g, w, initial_state, table, scale, value_major, skip)


class _DecayAttention(torch.autograd.Function):
    """Saves the inputs only: the states between chunks are cheaper to make again than to keep."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        w: Tensor,
        initial: Tensor | None,
        table: ChunkTable,
        scale: float,
        value_major: bool,
        skip: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        g, w = g.contiguous(), w.contiguous()
        heads, device = g.shape[2], q.device
        first = initial.mT if value_major and initial is not None else initial
        final = empty_state(table, heads, k.shape[3], v.shape[3], value_major, device)
        gates = prepare_gates(g, w, table, scale)
        states = scan(k, v, gates.kept, gates.c, first, final, table, state_dtype(q))
        ctx.save_for_backward(q, k, v, g, w, initial, skip)
        ctx.table, ctx.scale, ctx.value_major = table, scale, value_major
        ctx.set_materialize_grads(False)
        return output(q, k, v, w, skip, gates, states, table, scale), final.mT if value_major else final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, w, initial, skip = ctx.saved_tensors
        table, scale, value_major = ctx.table, ctx.scale, ctx.value_major
        heads = g.shape[2]
        first = initial.mT if value_major and initial is not None else initial
        if d_o is None:
            d_o = q.new_zeros(*q.shape[:2], heads, v.shape[3])
        if d_final is not None and value_major:
            d_final = d_final.mT
        gates = prepare_gates(g, w, table, scale)
        # Both ends of the scans are states of this shape; only the reverse scan's end is a result.
        d_first = empty_state(table, heads, k.shape[3], v.shape[3], value_major, q.device)
        states = scan(k, v, gates.kept, gates.c, first, d_first, table, state_dtype(q))
        d_states = scan(q, d_o, gates.lead, gates.c, d_final, d_first, table, state_dtype(q), reverse=True)
        dq, dk, dv, dg, dw, d_skip = gradients(q, k, v, g, w, d_o, skip, gates, states, d_states, table, scale)
        d_initial = None
        if initial is not None:
            d_initial = (d_first.mT if value_major else d_first).to(initial.dtype)
        return dq, dk, dv, dg, dw, d_initial, None, None, None, d_skip
