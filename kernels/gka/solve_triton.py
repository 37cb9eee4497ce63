"""The solve of gka on Triton, with implicit differentiation; the formulas are those of solve.py."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from hybridize.kernels.common import SMALLEST_LOG_DECAY, group_size
from hybridize.kernels.decay.forward_triton import new_scan, precision, prepare_gates, scan, state_dtype
from hybridize.kernels.decay.scan_triton import chunk_states
from hybridize.kernels.engine import compiled_together, interpreted, launch, product_tile
from hybridize.kernels.gka.inputs import EPS, chebyshev_weights
from hybridize.kernels.gka.triton_backward import (
    gate_gradient_kernel,
    key_gradient_kernel,
    mix_gradient_kernel,
    pair_gradient_kernel,
    reverse_scan_kernel,
    start_gradient_kernel,
)
from hybridize.kernels.gka.triton_kernels import direction_kernel, solve_kernel
from hybridize.kernels.varlen import ChunkTable


def _constants(q: Tensor, u: Tensor) -> dict[str, Any]:
    """Return what all kernels are compiled for."""
    heads, dim = q.shape[2:]
    return {
        "H": heads,
        "GROUP": group_size(heads, u.shape[2]),
        "D": dim,
        "BD": product_tile(dim),
        "FLOOR": SMALLEST_LOG_DECAY,
        "EPS": EPS,
        "DTYPE": tl.float32 if u.dtype == torch.float32 else tl.float16,
        "PRECISION": precision(u),
    }


def _product_dtype(q: Tensor) -> torch.dtype:
    """Return what products are made of: 16-bit inputs are solved in fp16, with H and x scaled to fit it."""
    return torch.float32 if q.dtype == torch.float32 else torch.float16


def _directions(k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return k / |k| in dtype, and |k| [B,T,heads]."""
    u = torch.empty_like(k, dtype=dtype)
    length = torch.empty(k.shape[:3], device=k.device, dtype=torch.float32)
    launch(
        direction_kernel,
        lambda meta: (triton.cdiv(length.numel(), meta["ROWS"]),),
        [{"ROWS": 16, "num_warps": 4}],
        *(k, u, length, length.numel()),
        D=k.shape[3],
        BD=product_tile(k.shape[3]),
    )
    return u, length


def _solve(
    rhs: Tensor,
    keys: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    *results: Tensor | None,
    table: ChunkTable,
    ridge: float,
    num_iters: int,
    backward: bool,
) -> None:
    """Run solve_kernel on the chunks of all heads."""
    step, _ = chebyshev_weights(ridge, 0)
    constants = _constants(rhs, keys[0])
    launch(
        solve_kernel,
        lambda _: (table.chunks * rhs.shape[2],),
        [{"num_warps": 4, "num_stages": 1}],
        *(rhs, *keys, *gates, states, *results, table.seq_start, table.chunk_start, table.chunk_seq),
        *(step, 1 - step * ridge, (1 / (1 + 2 * ridge)) ** 2 / 4),
        **constants,
        ITERS=num_iters,
        PACKED=constants["DTYPE"] == tl.float16 and not interpreted(),
        BACKWARD=backward,
    )


class _Mix(torch.autograd.Function):
    """q + alpha (x - q) for unit q, and the last Gram state; the states between chunks are made again by backward."""

    @staticmethod
    @compiled_together
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        g: Tensor,
        w: Tensor,
        alpha: Tensor,
        initial: Tensor | None,
        table: ChunkTable,
        ridge: float,
        num_iters: int,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        states, final = chunk_states(k, k, g, w, initial, table, state_dtype(q))
        x = torch.empty_like(q, dtype=_product_dtype(q))
        inverse, out = torch.empty_like(g), torch.empty_like(q, dtype=k.dtype)
        low = None if k.dtype == torch.float32 else torch.empty_like(out)
        settings = {"table": table, "ridge": ridge, "num_iters": num_iters}
        sizes = torch.empty(table.chunks, q.shape[2], device=q.device, dtype=torch.float32)
        results = (sizes, x, inverse, out, low, None, None, None, None)
        _solve(q, _directions(k, x.dtype), (g, w, alpha), states, *results, **settings, backward=False)
        ctx.save_for_backward(q, k, g, w, alpha, initial, x, inverse, sizes)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        if low is not None:
            ctx.mark_non_differentiable(low)
        return out, low, final

    @staticmethod
    @compiled_together
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, _: None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, g, w, alpha, initial, x, inverse, sizes = ctx.saved_tensors
        table, ridge = ctx.settings["table"], ctx.settings["ridge"]
        heads, dim = q.shape[2:]
        gates = prepare_gates(g, w, table, 1.0)
        d_initial = torch.empty(table.sequences, heads, dim, dim, device=q.device, dtype=torch.float32)
        carried = new_scan(k, k, gates.kept, initial, d_initial, table, state_dtype(q))
        scan(carried, gates.c, table)
        states = carried.states
        z = torch.empty_like(x)
        rho, quadratic, through, product = (torch.empty_like(g) for _ in range(4))
        d_out = torch.zeros_like(q, dtype=k.dtype) if d_out is None else d_out.contiguous()
        results = (sizes, x, None, z, None, rho, quadratic, through, product)
        keys = _directions(k, x.dtype)
        _solve(d_out, keys, (g, w, alpha), states, *results, **ctx.settings, backward=True)
        d_q, d_alpha = torch.empty_like(q), torch.empty_like(g)
        constants = _constants(q, keys[0])
        launch(
            mix_gradient_kernel,
            lambda meta: (triton.cdiv(g.numel(), meta["ROWS"]),),
            [{"ROWS": 16, "num_warps": 4}],
            *(q, alpha, x, inverse, z, rho, d_out, d_q, d_alpha, g.numel()),
            **{n: constants[n] for n in ("D", "BD", "EPS")},
        )
        pairs = {n: constants[n] for n in ("H", "GROUP", "D", "BD", "DTYPE", "PRECISION")}
        starts = (table.seq_start, table.chunk_start, table.chunk_seq)
        d_w, d_log, by_key = (torch.empty_like(g) for _ in range(3))
        launch(
            gate_gradient_kernel,
            lambda _: (table.chunks * heads,),
            [{"num_warps": 4, "num_stages": 1}],
            *(*keys, w, gates.c, gates.lead, sizes, x, z, inverse, rho, quadratic, through, product),
            *(d_w, d_log, by_key, *starts, ridge),
            **pairs,
        )
        d_keys = torch.empty_like(q, dtype=k.dtype)
        launch(
            pair_gradient_kernel,
            lambda _: (table.chunks * heads,),
            [{"num_warps": 4, "num_stages": 1}],
            *(*keys, w, gates.c, x, z, inverse, rho, product, d_keys, *starts, ridge),
            **pairs,
        )
        d_states = torch.empty_like(states)
        launch(
            start_gradient_kernel,
            lambda _: (table.chunks * heads,),
            [{"num_warps": 8, "num_stages": 1}],
            *(k, gates.lead, states, sizes, x, z, inverse, rho, product, by_key, d_states, *starts, ridge),
            **pairs,
        )
        part = min(1024, product_tile(dim) ** 2)
        parts = triton.next_power_of_2(triton.cdiv(dim * dim, part))
        products = sizes.new_zeros(table.chunks, heads, parts)
        launch(
            reverse_scan_kernel,
            lambda meta: (table.sequences * heads * triton.cdiv(dim * dim, meta["BLOCK"]),),
            [{"num_warps": 4}],
            *(d_states, states, gates.c[..., -1].exp().float(), products),
            *(None if d_final is None else d_final.contiguous(), d_initial, table.chunk_start),
            H=heads,
            SIZE=dim * dim,
            GIVEN=d_final is not None,
            BLOCK=part,
            PARTS=parts,
        )
        d_k, d_g = torch.empty_like(k), torch.empty_like(g)
        launch(
            key_gradient_kernel,
            lambda _: (table.chunks * k.shape[2],),
            [{"num_warps": 8, "num_stages": 1}],
            *(k, g, w, gates.c, states, d_states, products, by_key, d_log, d_keys, d_k, d_g, d_w, *starts),
            **{n: constants[n] for n in ("H", "GROUP", "D", "BD", "FLOOR", "PRECISION")},
            PARTS=parts,
        )
        return d_q, d_k, d_g, d_w, d_alpha, None if initial is None else d_initial, None, None, None


def mix(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    w: Tensor,
    alpha: Tensor,
    initial: Tensor | None,
    table: ChunkTable,
    ridge: float,
    num_iters: int,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return q/|q| + alpha (x - q/|q|) [B,T,H,D] in k's dtype, what rounding took off it, and the last H [N,H,D,D].

    The second is None for fp32; all inputs are contiguous.
    """
    return _Mix.apply(q, k, g, w, alpha, initial, table, ridge, num_iters)
