"""Gated KalmaNet for decoding, in Triton: the whole layer in one launch, the Gram matrix in registers for the solve."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridize.kernels.decode import Rows, lined, new_state, read_gate, row_tokens, softplus
from hybridize.kernels.engine import launch, padded
from hybridize.kernels.gka.inputs import EPS, GkaState, smallest_norm

# One thread for every column. At 128 a thread uses 168 registers, so a multiprocessor holds three programs.
CONFIGS = {
    16: ({"num_warps": 1},),
    32: ({"num_warps": 1},),
    64: ({"num_warps": 2},),
    128: ({"num_warps": 4},),
}


@triton.jit
def read_vector(pointer, d, in_d, eps):
    """Read a vector [D]; return it and what its length is to be multiplied with."""
    x = tl.load(pointer + d, mask=in_d, other=0.0).to(tl.float32)
    return x, 1 / (tl.sqrt(tl.sum(x * x, 0)) + eps)


@triton.jit
def read_row(pointer, d, in_d):
    """Read a vector as a row [1, D]; ".ca" is the default, named to keep this load from being merged with another."""
    return tl.load(pointer + d, mask=in_d, other=0.0, cache_modifier=".ca").to(tl.float32)[None, :]


@triton.jit
def solve(gram, query, ridge, smallest, NUM_ITERS: tl.constexpr):
    """Solve (H + ridge ||H|| I) x = query by NUM_ITERS Chebyshev steps, as chebyshev() in naive.py; H = 0 gives 0."""
    # Scaled by the largest entry, so that no square underflows.
    size = tl.max(tl.max(tl.abs(gram), 1), 0)
    scaled = gram * (1 / tl.where(size > 0, size, 1.0))
    norm = size * tl.sqrt(tl.sum(tl.sum(scaled * scaled, 1), 0))
    inverse = tl.where(norm > smallest, 1 / tl.where(norm > smallest, norm, 1.0), 0.0)
    BD: tl.constexpr = query.shape[0]
    step = 2 / (1 + 2 * ridge)
    quarter = 1 / ((1 + 2 * ridge) * (1 + 2 * ridge) * 4)
    # Vectors are columns [D, 1] of the matrix's own layout, one entry a thread: x is exchanged once per step.
    rhs = step * query[:, None]
    before, x, omega = tl.zeros_like(rhs), rhs, 2.0
    for _ in range(NUM_ITERS):
        omega = 1 / (1 - quarter * omega)
        # Four sums side by side, because each addition waits for the one before it.
        sums = tl.sum(tl.reshape(gram * tl.trans(x), [BD, BD // 4, 4]), 1)
        target = rhs + (1 - step * ridge) * x - (step * inverse) * tl.sum(sums, 1)[:, None]
        target = before + omega * (target - before)
        before = x
        x = target
    return tl.reshape(x * inverse, query.shape)


@triton.jit
def by_column(rows, columns, WIDTH: tl.constexpr):
    """Offsets [columns, rows] into a matrix with rows of WIDTH numbers: every thread gets whole columns of it.

    So products with the matrix from the left need no exchange between threads, and neighbouring threads still read
    neighbouring numbers. Without the hint Triton would give a thread four neighbouring numbers instead.
    """
    return tl.max_contiguous(rows[None, :] * WIDTH + columns[:, None], [1, 1])


@triton.jit(do_not_specialize=["T"])
def recurrent_gka_kernel(
    q, k, v, g, beta, alpha, o, h_in, u_in, h_out, u_out, slots, starts, a_log, dt_bias,
    scale, ridge, eps, smallest, T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    NUM_ITERS: tl.constexpr, ONE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr, HAS_STATE: tl.constexpr,
    LOGITS: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row. ONE: every row has one token, and no loop holds registers for the next."""
    head = tl.program_id(0)
    n, h = (head // H).to(tl.int64), head % H
    slot = n
    if SLOTS:
        slot = tl.load(slots + n)
        if slot < 0:
            return
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    in_d, in_v = d < D, c < DV
    gram_at, gram_mask = by_column(d, d, D), in_d[None, :] & in_d[:, None]
    u_at, u_mask = by_column(d, c, DV), in_d[None, :] & in_v[:, None]
    h_out += (slot * H + h) * D * D
    u_out += (slot * H + h) * D * DV
    gram = tl.zeros([BD, BD], tl.float32)
    if HAS_STATE:
        h_in += (slot * H + h) * D * D
        u_in += (slot * H + h) * D * DV
        gram = tl.load(h_in + gram_at, mask=gram_mask, other=0.0)  # symmetric: its columns are its rows
    b, first, end = row_tokens(starts, n, T, PACKED)
    q += b * q_b + h * q_h
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    if ONE:
        end = first + 1
    rate = 0.0
    if LOGITS:
        rate = -tl.exp(tl.load(a_log + h).to(tl.float32))
    for t in range(first, end):
        gate = (b * T + t) * H + h
        log_decay = tl.load(g + gate).to(tl.float32)
        if LOGITS:
            log_decay = rate * softplus(log_decay + tl.load(dt_bias + h).to(tl.float32))
        decay = tl.exp(log_decay)
        write = read_gate(beta, gate, LOGITS) + eps
        key, inverse = read_vector(k + t * k_t, d, in_d, eps)
        # Read once more, because the key as a row fills registers in every thread: only from here on, and with all
        # its factors on the one entry of the column that the thread owns.
        row = read_row(k + t * k_t, d, in_d)
        gram = gram * decay + (key * (write * inverse * write * inverse))[:, None] * row
        query, unit = read_vector(q + t * q_t, d, in_d, eps)
        query *= unit
        if ONE or t == end - 1:
            tl.store(h_out + gram_at, gram, mask=gram_mask)
        mixed = query
        if NUM_ITERS > 0:
            mixed += read_gate(alpha, gate, LOGITS) * (solve(gram, query, ridge, smallest, NUM_ITERS) - query)
        mixed *= scale
        row = read_row(k + t * k_t, d, in_d)
        value = tl.load(v + t * v_t + c, mask=in_v, other=0.0).to(tl.float32) * (write * inverse * write)
        u = value[:, None] * row
        if HAS_STATE and ONE:
            u += decay * tl.load(u_in + u_at, mask=u_mask, other=0.0)
        elif HAS_STATE:
            u += decay * tl.load(tl.where(t > first, u_out, u_in) + u_at, mask=u_mask, other=0.0)
        elif t > first:
            u += decay * tl.load(u_out + u_at, mask=u_mask, other=0.0)
        tl.store(u_out + u_at, u, mask=u_mask)
        out = tl.sum(u * mixed[None, :], 1)
        tl.store(o + gate * DV + c, out.to(o.dtype.element_ty), mask=in_v)
    if PACKED and first == end:  # a row without tokens keeps its state
        tl.store(h_out + gram_at, gram, mask=gram_mask)
        u = tl.zeros([BV, BD], tl.float32)
        if HAS_STATE:
            u = tl.load(u_in + u_at, mask=u_mask, other=0.0)
        tl.store(u_out + u_at, u, mask=u_mask)


def recurrent_gka_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    alpha: Tensor,
    *,
    scale: float,
    ridge: float,
    num_iters: int,
    initial_state: GkaState | None,
    cu_seqlens: Tensor | None,
    inplace: bool,
    decay_gate: tuple[Tensor, Tensor] | None,
    state_indices: Tensor | None,
) -> tuple[Tensor, GkaState]:
    """Return (o [B,T,H,Dv], (H, U)); arguments as recurrent_gka has them, already checked."""
    q, k, v, g, beta, alpha = lined(q), lined(k), lined(v), g.contiguous(), beta.contiguous(), alpha.contiguous()
    heads, dim = q.shape[2:]
    width = v.shape[-1]
    block = padded(dim)
    rows = Rows(q, cu_seqlens, state_indices)
    h_old, u_old = initial_state or (None, None)
    h_old, h_new = new_state(h_old, (heads, dim, dim), rows, q, inplace)
    u_old, u_new = new_state(u_old, (heads, dim, width), rows, q, inplace)
    o = torch.empty((*q.shape[:3], width), dtype=q.dtype, device=q.device)
    a_log, dt_bias = decay_gate or (None, None)
    launch(
        recurrent_gka_kernel,
        lambda meta: (rows.count * heads,),
        CONFIGS[block],
        q, k, v, g, beta, alpha, o, h_old, u_old, h_new, u_new, rows.slots, rows.starts, a_log, dt_bias,
        scale, ridge, EPS, smallest_norm(torch.float32), rows.tokens,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        H=heads, GROUP=heads // k.shape[2], D=dim, DV=width, BD=block, BV=padded(width),
        NUM_ITERS=num_iters, ONE=rows.tokens == 1 and rows.starts is None, PACKED=rows.starts is not None,
        SLOTS=rows.slots is not None,
        HAS_STATE=h_old is not None, LOGITS=decay_gate is not None,
    )  # fmt: skip
    return o, (h_new, u_new)
