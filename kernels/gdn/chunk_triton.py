"""The gated delta rule in chunks on Triton: the launches, and what is kept between forward and backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.kernels.common import SMALLEST_LOG_DECAY, start_state
from hybridize.kernels.decay.forward_triton import precision
from hybridize.kernels.engine import compiled_together, launch, product_tile
from hybridize.kernels.gdn import triton_backward, triton_forward
from hybridize.kernels.varlen import ChunkTable, chunk_table

CHUNK = 64
# (Block of value channels, warps, stages) for 16-bit inputs and for fp32 ones, whose tiles take twice the space.
CONFIGS = {
    "prepare": ((64, 4, 1),),
    "scan": ((32, 4, 3), (32, 4, 2), (16, 4, 1)),
    "read_out": ((64, 4, 2), (32, 4, 1)),
    "local_gradients": ((64, 4, 1), (32, 4, 1)),
    "scan_both_ways": ((64, 4, 3), (64, 4, 2), (32, 4, 2), (16, 4, 1)),
    "query_gradients": ((64, 4, 2), (64, 4, 1), (32, 4, 1)),
    "system_gradients": ((64, 4, 2), (64, 4, 1), (32, 4, 1)),
    "key_gradients": ((64, 4, 2), (64, 4, 1), (32, 4, 1)),
}
WIDE = {
    "prepare": ((32, 8, 1),),
    "scan": ((16, 4, 2), (16, 4, 1)),
    "read_out": ((32, 8, 1),),
    "local_gradients": ((32, 8, 1),),
    "scan_both_ways": ((16, 4, 1),),
    "query_gradients": ((32, 8, 1),),
    "system_gradients": ((32, 8, 1),),
    "key_gradients": ((32, 8, 1),),
}


class Plan(NamedTuple):
    """The sizes of one call, and how its scratch is laid out."""

    table: ChunkTable
    heads: int
    key_heads: int
    constants: dict[str, Any]  # what every kernel takes
    wide: bool  # fp32 inputs, whose tiles take twice the space

    def scratch(self, like: Tensor, *tile: int) -> Tensor:
        """Return [chunks,H,*tile], not initialised."""
        return like.new_empty(self.table.chunks, self.heads, *tile)

    def configs(self, *choices: tuple[int, int, int]) -> list[dict[str, Any]]:
        """Return configurations of (block of value channels, warps, stages)."""
        width = self.constants["BV"]
        return [{"TILE": min(width, t), "num_warps": warps, "num_stages": stages} for t, warps, stages in choices]

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run a kernel that has one program per chunk and head."""
        configs = self.configs(*(WIDE if self.wide else CONFIGS)[kernel.fn.__name__])
        table, programs = self.table, self.table.chunks * self.heads
        tables = (table.seq_start, table.chunk_start, table.chunk_seq)
        sizes = (self.heads, self.key_heads)
        launch(kernel, lambda meta: (programs,), configs, *args, *tables, *sizes, **self.constants, **constants)

    def states(self, like: Tensor) -> Tensor:
        """Return the states around each chunk [chunks+N,H,BV,BK], not initialised."""
        width = self.constants["BV"], self.constants["BK"]
        return like.new_empty(self.table.chunks + self.table.sequences, self.heads, *width)

    def launch_scan(self, kernel: Any, ways: int, *args: Any) -> None:
        """Run a kernel that has one program per sequence, head and block of value channels, and way through them."""
        table, states, width = self.table, self.table.sequences * self.heads, self.constants["BV"]
        configs = self.configs(*(WIDE if self.wide else CONFIGS)[kernel.fn.__name__])
        tables, sizes = (table.seq_start, table.chunk_start), (self.heads, self.key_heads)
        grid = lambda meta: (ways * states * (width // meta["TILE"]),)
        launch(kernel, grid, configs, *args, *tables, *sizes, **self.constants)


def plan(q: Tensor, k: Tensor, v: Tensor, table: ChunkTable) -> Plan:
    """Return the plan for q [B,T,H,D], k [B,T,Hk,D], v [B,T,Hk,Dv]."""
    widths = {"DK": q.shape[3], "DV": v.shape[3]}
    padded = {"B" + n[1]: product_tile(d) for n, d in widths.items()}
    wide = q.dtype == torch.float32
    constants = {**widths, **padded, "C": CHUNK, "PRECISION": precision(q)}
    return Plan(table, q.shape[2], k.shape[2], constants, wide)


def prepare(
    p: Plan, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inverses: Tensor | None, solve: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return w, u and the scalars; with solve, the systems are solved, and their inverses written if they are given."""
    w, u = p.scratch(k, CHUNK, p.constants["BK"]), p.scratch(k, p.constants["BV"], CHUNK)
    scalars = p.scratch(g, 4, CHUNK)
    flags = {"SOLVE": solve, "KEEP": inverses is not None, "LOWEST": SMALLEST_LOG_DECAY}
    args = (k, v, g, beta, inverses, w, u, scalars)
    p.launch(triton_forward.prepare, *args, **flags)
    return w, u, scalars


def scan(
    p: Plan, k: Tensor, w: Tensor, u: Tensor, scalars: Tensor, initial: Tensor | None, corrected: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill corrected, which may be u, with V'; return the states around each chunk and the final ones."""
    starts = p.states(k)
    final = scalars.new_empty(p.table.sequences, p.heads, p.constants["DK"], p.constants["DV"])
    p.launch_scan(triton_forward.scan, 1, k, w, u, scalars, initial, starts, corrected, final)
    return starts, final


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    @compiled_together
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
        scale: float, table: ChunkTable, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        p = plan(q, k, v, table)
        inverses = p.scratch(k, CHUNK, CHUNK) if keep else None
        w, u, scalars = prepare(p, k, v, g, beta, inverses, solve=True)
        starts, final = scan(p, k, w, u, scalars, initial, corrected=u)
        o = q.new_empty(*q.shape[:3], v.shape[3])
        p.launch(triton_forward.read_out, q, k, scalars, starts, u, o, scale)
        if keep:
            ctx.save_for_backward(q, k, v, g, beta, initial, inverses)
        ctx.scale, ctx.table = scale, table
        return o, final

    @staticmethod
    @compiled_together
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial, inverses = ctx.saved_tensors
        p = plan(q, k, v, ctx.table)
        bk, bv = p.constants["BK"], p.constants["BV"]
        d_o, d_final = d_o.contiguous(), d_final.contiguous()
        w, u, scalars = prepare(p, k, v, g, beta, inverses, solve=False)
        d_local, reads = torch.empty_like(u), p.scratch(q, CHUNK, bk)
        p.launch(triton_backward.local_gradients, q, k, d_o, scalars, d_local, reads, ctx.scale)

        starts, corrected, d_corrected = p.states(k), torch.empty_like(u), torch.empty_like(u)
        d_after, d_initial = p.scratch(q, bv, bk), None if initial is None else torch.empty_like(initial)
        forwards = (k, w, u, scalars, initial, starts, corrected)
        backwards = (d_o, reads, d_local, d_final, d_after, d_corrected, d_initial)
        p.launch_scan(triton_backward.scan_both_ways, 2, *forwards, *backwards, p.table.sequences * p.heads)

        d_q, d_gate, d_scores = torch.empty_like(q), p.scratch(g, CHUNK), p.scratch(q, CHUNK, CHUNK)
        inputs = (q, k, d_o, scalars, starts, corrected)
        p.launch(triton_backward.query_gradients, *inputs, d_q, d_gate, d_scores, ctx.scale)

        # These two are per query head; the heads that share a key head are summed at the end.
        d_k, d_v = k.new_empty(*q.shape), v.new_empty(*q.shape[:3], v.shape[3])
        d_g, d_beta = torch.empty_like(g), torch.empty_like(beta)
        d_system, d_grown, d_gate_key = torch.empty_like(d_scores), torch.empty_like(w), torch.empty_like(d_gate)
        passed = (d_system, d_grown, d_gate_key)
        system = (k, v, beta, scalars, inverses, w, u, starts, d_corrected)
        p.launch(triton_backward.system_gradients, *system, d_v, d_beta, *passed)
        keys = (q, k, g, beta, scalars, starts, corrected, d_after, d_scores, *passed, d_gate)
        p.launch(triton_backward.key_gradients, *keys, d_k, d_g, LOWEST=SMALLEST_LOG_DECAY)
        d_k, d_v = (sum_groups(x, p.key_heads) for x in (d_k, d_v))
        return d_q, d_k, d_v, d_g, d_beta, d_initial, None, None, None


def sum_groups(x: Tensor, key_heads: int) -> Tensor:
    """Sum [B,T,H,D] over the query heads that share a key head."""
    if x.shape[2] == key_heads:
        return x
    return x.unflatten(2, (key_heads, -1)).sum(3)  # fp32 inside, whatever x is


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float, initial: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (o [B,T,H,Dv], S [N,H,D,Dv] in fp32) of checked inputs."""
    table = chunk_table(q, CHUNK, cu_seqlens)
    g, beta = g.float().contiguous(), beta.float().contiguous()
    q, k, v = (x.to(q.dtype).contiguous() for x in (q, k, v))
    if initial is not None:
        shape = (table.sequences, *q.shape[2:], v.shape[3])
        initial = start_state(initial, shape, g).contiguous()
    inputs = [q, k, v, g, beta] if initial is None else [q, k, v, g, beta, initial]
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return _GatedDelta.apply(q, k, v, g, beta, initial, float(scale), table, keep)
