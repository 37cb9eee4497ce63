"""Runs the Triton kernels of linear attention with a scalar decay per head, forward."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hybridize.kernels.common import SMALLEST_LOG_DECAY, group_size
from hybridize.kernels.decay.triton_kernels import (
    gate_kernel,
    output_kernel,
    scan_both_ways_kernel,
    scan_kernel,
)
from hybridize.kernels.engine import launch, product_tile
from hybridize.kernels.varlen import ChunkTable

CHUNK = 64
BUSY = 120  # programs that keep most of a large GPU's processors at work
Config = dict[str, Any]
GATE_CONFIGS: list[Config] = [{"BH": 16, "num_warps": 4}]


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
        GATE_CONFIGS,
        *(g, w, c, kept, lead, table.seq_start, table.chunk_start, table.chunk_seq, scale),
        H=heads,
        CHUNK=CHUNK,
        FLOOR=SMALLEST_LOG_DECAY,
    )
    return Gates(c, kept, lead)


def scan_configs(programs: int, k: int, v: int, stages: tuple[int, ...]) -> list[Config]:
    """Return blocks of 64x64, or narrower ones when there are few sequences and heads to share the work."""
    bk, bv = min(64, product_tile(k)), min(64, product_tile(v))
    while bv > 16 and programs * triton.cdiv(k, bk) * triton.cdiv(v, bv) < BUSY:
        bv //= 2
    return [{"BK": bk, "BV": bv, "num_warps": 4, "num_stages": n} for n in stages]


class Scan(NamedTuple):
    """What carry_states takes: tokens [B,T,H,D], their factor [chunks,H,C], the first state if any, and its results."""

    a: Tensor
    b: Tensor
    factor: Tensor
    first: Tensor | None
    last: Tensor  # [N,H,K,V] like first, of any strides
    states: Tensor  # [chunks,H,K,V]

    def pointers(self) -> tuple[Tensor, ...]:
        """Return a, b and factor, and then where it starts, the states between and where it ends."""
        return self.a, self.b, self.factor, self._given(), self.states, self.last

    def strides(self) -> tuple[int, ...]:
        """Return the distances of tokens of a and b, and of rows and columns of both end states."""
        return self.a.stride(1), self.b.stride(1), *self._given().stride()[2:], *self.last.stride()[2:]

    def groups(self) -> tuple[int, int]:
        """Return how many heads share one of a, and one of b."""
        heads = self.last.shape[1]
        return group_size(heads, self.a.shape[2]), group_size(heads, self.b.shape[2])

    def _given(self) -> Tensor:
        return self.last if self.first is None else self.first


def new_scan(
    a: Tensor, b: Tensor, factor: Tensor, first: Tensor | None, last: Tensor, table: ChunkTable, dtype: torch.dtype
) -> Scan:
    """Return a scan of new states in dtype, from first to last."""
    states = torch.empty(table.chunks, *last.shape[1:], device=a.device, dtype=dtype)
    return Scan(token_stride(a)[0], token_stride(b)[0], factor, first, last, states)


def scan(forwards: Scan, c: Tensor, table: ChunkTable, backwards: Scan | None = None) -> None:
    """Carry the states from the first chunk to the last and, in the same launch, others from the last to the first."""
    heads, k, v = forwards.last.shape[1:]
    programs = table.sequences * heads * (1 if backwards is None else 2)
    group_a, group_b = forwards.groups()
    shared = {
        "H": heads,
        "GROUP_A": group_a,
        "GROUP_B": group_b,
        "K": k,
        "V": v,
        "CHUNK": CHUNK,
        "PRECISION": precision(forwards.a),
        "GIVEN": forwards.first is not None,
    }
    a, b, factor, first, states, last = forwards.pointers()
    args = (a, b, factor, c, first, states, last, table.seq_start, table.chunk_start, *forwards.strides())
    grid = lambda meta: (programs * triton.cdiv(k, meta["BK"]) * triton.cdiv(v, meta["BV"]),)
    # Both ways there are two programs on each processor, and three stages of both fit its shared memory.
    configs = scan_configs(programs, k, v, (4, 2, 1) if backwards is None else (3, 2, 1))
    if backwards is None:
        launch(scan_kernel, grid, configs, *args, **shared)
        return
    group_a, group_b = backwards.groups()
    shared |= {"GROUP_D_A": group_a, "GROUP_D_B": group_b, "D_GIVEN": backwards.first is not None}
    launch(scan_both_ways_kernel, grid, configs, *args, *backwards.pointers(), *backwards.strides(), **shared)


def empty_state(table: ChunkTable, heads: int, k: int, v: int, value_major: bool, device: torch.device) -> Tensor:
    """Return new fp32 states [N,H,K,V], in memory [N,H,V,K] when value_major."""
    shape = (v, k) if value_major else (k, v)
    state = torch.empty(table.sequences, heads, *shape, device=device, dtype=torch.float32)
    return state.mT if value_major else state


def output_configs(x: Tensor, width: int) -> list[Config]:
    """Return blocks of v's channels; fp32 tiles and products take more of everything."""
    if x.dtype == torch.float32:
        return [{"BV": min(32, product_tile(width)), "num_warps": 8, "num_stages": 1}]
    narrow = {"BV": min(64, product_tile(width)), "num_warps": 4, "num_stages": 1}
    return [{**narrow, "BV": product_tile(width)}, narrow] if x.dtype == torch.bfloat16 else [narrow]


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
    q_low: Tensor | None = None,
) -> Tensor:
    """Return o [B,T,H,V] from the states before each chunk."""
    (q, stride_q), (k, stride_k), (v, stride_v) = token_stride(q), token_stride(k), token_stride(v)
    heads, width, v_width = states.shape[1:]
    o = torch.empty(*q.shape[:2], heads, v_width, device=q.device, dtype=q.dtype)
    launch(
        output_kernel,
        lambda meta: (table.chunks * heads * triton.cdiv(v_width, meta["BV"]),),
        output_configs(q, v_width),
        *(q, q_low, k, v, w, skip, gates.c, gates.lead, states, o),
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
        BK=product_tile(width),
    )
    return o
