"""The gated delta rule for decoding, in Triton: every state is read and written once, whatever is done to it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridize.kernels.decode import Rows, lined, new_state, read_gate, row_tokens, softplus
from hybridize.kernels.engine import launch, padded

CONFIGS = ({"BV": 32, "num_warps": 1}, {"BV": 16, "num_warps": 1})


@triton.jit(do_not_specialize=["T"])
def recurrent_gdn_kernel(
    q, k, v, g, beta, o, s_in, s_out, slots, starts, a_log, dt_bias, scale, T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, SLOTS: tl.constexpr, HAS_STATE: tl.constexpr, LOGITS: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """One program: BV value columns of one head's state [D, DV], over the tokens of one row."""
    blocks: tl.constexpr = (DV + BV - 1) // BV
    program = tl.program_id(0)
    head = program // blocks
    n, h = (head // H).to(tl.int64), head % H
    d, c = tl.arange(0, BD), (program % blocks) * BV + tl.arange(0, BV)
    in_d, in_v = d < D, c < DV
    slot = n
    if SLOTS:
        slot = tl.load(slots + n)
        if slot < 0:
            return
    here = d[:, None] * DV + c[None, :]
    mask = in_d[:, None] & in_v[None, :]
    s = tl.zeros([BD, BV], tl.float32)
    s_out += (slot * H + h) * D * DV
    if HAS_STATE:
        s_in += (slot * H + h) * D * DV
        s = tl.load(s_in + here, mask=mask, other=0.0)
    b, first, end = row_tokens(starts, n, T, PACKED)
    rate = 0.0
    if LOGITS:
        rate = -tl.exp(tl.load(a_log + h).to(tl.float32))
    for t in range(first, end):
        query = tl.load(q + b * q_b + t * q_t + h * q_h + d, mask=in_d, other=0.0).to(tl.float32)
        key = tl.load(k + b * k_b + t * k_t + (h // GROUP) * k_h + d, mask=in_d, other=0.0).to(tl.float32)
        value = tl.load(v + b * v_b + t * v_t + (h // GROUP) * v_h + c, mask=in_v, other=0.0).to(tl.float32)
        gate = (b * T + t) * H + h
        log_decay = tl.load(g + gate).to(tl.float32)
        if LOGITS:
            log_decay = rate * softplus(log_decay + tl.load(dt_bias + h).to(tl.float32))
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        s *= tl.exp(log_decay)
        # Both products read the old state: o = S q + (q.k) delta.
        delta = read_gate(beta, gate, LOGITS) * (value - tl.sum(s * key[:, None], 0))
        out = tl.sum(s * query[:, None], 0) + tl.sum(query * key, 0) * delta
        s += key[:, None] * delta[None, :]
        tl.store(o + ((b * T + t) * H + h) * DV + c, out.to(o.dtype.element_ty), mask=in_v)
    tl.store(s_out + here, s, mask=mask)


def recurrent_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    inplace: bool,
    decay_gate: tuple[Tensor, Tensor] | None,
    state_indices: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (o [B,T,H,Dv], S [N,H,Dk,Dv]); arguments as recurrent_gated_delta_rule has them, already checked."""
    q, k, v, g, beta = lined(q), lined(k), lined(v), g.contiguous(), beta.contiguous()
    heads, dim = q.shape[2:]
    width = v.shape[-1]
    rows = Rows(q, cu_seqlens, state_indices)
    old, new = new_state(initial_state, (heads, dim, width), rows, q, inplace)
    o = torch.empty((*q.shape[:3], width), dtype=q.dtype, device=q.device)
    a_log, dt_bias = decay_gate or (None, None)
    launch(
        recurrent_gdn_kernel,
        lambda meta: (rows.count * heads * triton.cdiv(width, meta["BV"]),),
        CONFIGS,
        q, k, v, g, beta, o, old, new, rows.slots, rows.starts, a_log, dt_bias, scale, rows.tokens,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        H=heads, GROUP=heads // k.shape[2], D=dim, DV=width, BD=padded(dim),
        PACKED=rows.starts is not None, SLOTS=rows.slots is not None, HAS_STATE=old is not None,
        LOGITS=decay_gate is not None,
    )  # fmt: skip
    return o, new
