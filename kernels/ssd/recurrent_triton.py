"""Mamba-2's recurrence for decoding, in Triton: every state is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridize.kernels.decode import Rows, lined, new_state, row_tokens, softplus
from hybridize.kernels.engine import launch, padded

CONFIGS = ({"BP": 16, "num_warps": 1}, {"BP": 8, "num_warps": 1})


@triton.jit(do_not_specialize=["T"])
def recurrent_ssd_kernel(
    x, dt, a, b_, c_, skip, y, s_in, s_out, slots, starts, dt_bias, T,
    x_b, x_t, x_h, b_b, b_t, b_h, c_b, c_t, c_h,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr, SLOTS: tl.constexpr, HAS_STATE: tl.constexpr, SKIP: tl.constexpr, LOGITS: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """One program: BP value rows of one head's state [P, N], over the tokens of one row."""
    blocks: tl.constexpr = (P + BP - 1) // BP
    program = tl.program_id(0)
    head = program // blocks
    n, h = (head // H).to(tl.int64), head % H
    d, r = tl.arange(0, BN), (program % blocks) * BP + tl.arange(0, BP)
    in_d, in_r = d < N, r < P
    slot = n
    if SLOTS:
        slot = tl.load(slots + n)
        if slot < 0:
            return
    here = r[:, None] * N + d[None, :]
    mask = in_r[:, None] & in_d[None, :]
    s = tl.zeros([BP, BN], tl.float32)
    s_out += (slot * H + h) * P * N
    if HAS_STATE:
        s_in += (slot * H + h) * P * N
        s = tl.load(s_in + here, mask=mask, other=0.0)
    batch, first, end = row_tokens(starts, n, T, PACKED)
    rate = tl.load(a + h).to(tl.float32)
    for t in range(first, end):
        value = tl.load(x + batch * x_b + t * x_t + h * x_h + r, mask=in_r, other=0.0).to(tl.float32)
        key = tl.load(b_ + batch * b_b + t * b_t + (h // GROUP) * b_h + d, mask=in_d, other=0.0).to(tl.float32)
        query = tl.load(c_ + batch * c_b + t * c_t + (h // GROUP) * c_h + d, mask=in_d, other=0.0).to(tl.float32)
        step = tl.load(dt + (batch * T + t) * H + h).to(tl.float32)
        if LOGITS:
            step = softplus(step + tl.load(dt_bias + h).to(tl.float32))
        s = s * tl.exp(step * rate) + (step * value)[:, None] * key[None, :]
        out = tl.sum(s * query[None, :], 1)
        if SKIP:
            out += tl.load(skip + h).to(tl.float32) * value
        tl.store(y + ((batch * T + t) * H + h) * P + r, out.to(y.dtype.element_ty), mask=in_r)
    tl.store(s_out + here, s, mask=mask)


def recurrent_ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    inplace: bool,
    dt_bias: Tensor | None,
    state_indices: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (y [B,T,H,P], h [N,H,P,N]); arguments as recurrent_ssd has them, already checked."""
    x, B, C, dt = lined(x), lined(B), lined(C), dt.contiguous()
    heads, width = x.shape[2:]
    dim = B.shape[-1]
    rows = Rows(x, cu_seqlens, state_indices)
    old, new = new_state(initial_state, (heads, width, dim), rows, x, inplace)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(
        recurrent_ssd_kernel,
        lambda meta: (rows.count * heads * triton.cdiv(width, meta["BP"]),),
        CONFIGS,
        x, dt, A, B, C, D, y, old, new, rows.slots, rows.starts, dt_bias, rows.tokens,
        *x.stride()[:3], *B.stride()[:3], *C.stride()[:3],
        H=heads, GROUP=heads // B.shape[2], P=width, N=dim, BN=padded(dim),
        PACKED=rows.starts is not None, SLOTS=rows.slots is not None, HAS_STATE=old is not None,
        SKIP=D is not None, LOGITS=dt_bias is not None,
    )  # fmt: skip
    return y, new
