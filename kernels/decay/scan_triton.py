"""Linear attention with a scalar decay per head on Triton; chunk.py has the formulas."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.kernels.decay.backward_triton import gradients
from hybridize.kernels.decay.forward_triton import (
    empty_state,
    new_scan,
    output,
    prepare_gates,
    scan,
    state_dtype,
)
from hybridize.kernels.decay.fused_triton import fits, fused
from hybridize.kernels.engine import compiled_together
from hybridize.kernels.varlen import ChunkTable


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
    carried = new_scan(k, v, gates.kept, initial_state, final, table, dtype)
    scan(carried, gates.c, table)
    return carried.states, final


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
    q_low: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B,T,H,V] = scale S^T q + skip v, and the last states fp32 [N,H,K,V], or [N,H,V,K] when value_major.

    S_t = e^(g_t) S_{t-1} + w_t k_t v_t^T; g and w fp32 [B,T,H]; q, k and v may have fewer heads; skip [H] or None.
    q_low, contiguous like q, is what rounding took off q: o is that of their sum, and its gradient goes to q.
    """
    return _DecayAttention.apply(q, k, v, g, w, initial_state, table, scale, value_major, skip, q_low)


class _DecayAttention(torch.autograd.Function):
    """Saves the inputs only: the states between chunks are cheaper to make again than to keep."""

    @staticmethod
    @compiled_together
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
        q_low: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        g, w = g.contiguous(), w.contiguous()
        initial = None if initial is None else initial.contiguous()
        heads, device = g.shape[2], q.device
        first = initial.mT if value_major and initial is not None else initial
        final = empty_state(table, heads, k.shape[3], v.shape[3], value_major, device)
        ctx.save_for_backward(q, k, v, g, w, initial, skip)
        ctx.table, ctx.scale, ctx.value_major = table, scale, value_major
        ctx.set_materialize_grads(False)
        if q_low is None and fits(q):
            o = fused(q, k, v, g, w, skip, first, final, table, scale)
        else:
            gates = prepare_gates(g, w, table, scale)
            carried = new_scan(k, v, gates.kept, first, final, table, state_dtype(q))
            scan(carried, gates.c, table)
            o = output(q, k, v, w, skip, gates, carried.states, table, scale, q_low)
        return o, final.mT if value_major else final

    @staticmethod
    @compiled_together
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, w, initial, skip = ctx.saved_tensors
        table, scale, value_major = ctx.table, ctx.scale, ctx.value_major
        heads = g.shape[2]
        first = initial.mT if value_major and initial is not None else initial
        if d_o is None:
            d_o = q.new_zeros(*q.shape[:2], heads, v.shape[3])
        if d_final is not None:
            d_final = d_final.contiguous().mT if value_major else d_final.contiguous()
        gates = prepare_gates(g, w, table, scale)
        new_end = lambda: empty_state(table, heads, k.shape[3], v.shape[3], value_major, q.device)
        carried = new_scan(k, v, gates.kept, first, new_end(), table, state_dtype(q))
        d_carried = new_scan(q, d_o, gates.lead, d_final, new_end(), table, state_dtype(q))
        scan(carried, gates.c, table, d_carried)
        states, d_states = carried.states, d_carried.states
        dq, dk, dv, dg, dw, d_skip = gradients(q, k, v, g, w, d_o, skip, gates, states, d_states, table, scale)
        d_initial = None
        if initial is not None:
            d_initial = (d_carried.last.mT if value_major else d_carried.last).to(initial.dtype)
        return dq, dk, dv, dg, dw, d_initial, None, None, None, d_skip, None
