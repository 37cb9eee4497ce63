"""Gated KalmaNet for decoding, in Triton: the whole layer in one launch, the Gram matrix in registers for the solve."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridize.kernels.decode import Rows, lined, new_state, read_gate, row_tokens, softplus
from hybridize.kernels.engine import capability, launch, multiprocessors, padded
from hybridize.kernels.gka.inputs import EPS, GkaState, smallest_norm

# With one warp for every 32 columns a thread has a tile of 4 x 32; at 128, two programs fit on a multiprocessor.
CONFIGS = {16: ({"num_warps": 1},), 32: ({"num_warps": 1},), 64: ({"num_warps": 2},), 128: ({"num_warps": 4},)}
SOME_TURNS = 8  # programs to a multiprocessor from which on a late start is made up for


@triton.jit
def columns(B: tl.constexpr):
    """Return 0 to B - 1 as [L, 1, B / L, 1] with L up to 32: the form of all vectors here, one entry a column."""
    L: tl.constexpr = min(B, 32)
    return tl.arange(0, L)[:, None, None, None] + L * tl.arange(0, B // L)[None, None, :, None]


@triton.jit
def as_rows(x):
    """Turn a vector [L, 1, M, 1] into [1, M, 1, L], one entry for every row of a matrix [L, M', M, L']."""
    return tl.permute(x, 1, 2, 3, 0)


@triton.jit
def offsets(B: tl.constexpr, BC: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of a matrix of B rows and BC columns, WIDTH numbers to a row, by (column, row, column, row).

    The hint makes Triton give a thread 4 neighbouring columns of every row that shares the row's higher part: a product
    with a vector from the left then reads 32 of its entries in a thread, and is summed over 4 threads of one warp.
    (A plain [row, column] tile is summed over all warps; a thread for every column reads the whole vector.)
    """
    return tl.max_contiguous(as_rows(columns(B)) * WIDTH + columns(BC), [32, 4, 2, 1])


@triton.jit
def sum_rows(x):
    """Sum a matrix over its rows; the result is a vector over its columns."""
    return tl.sum(tl.sum(x, 3, keep_dims=True), 1, keep_dims=True)


@triton.jit
def inverse_length(x, eps):
    """Return 1 / (|x| + eps)."""
    return 1 / (tl.sqrt(tl.sum(x * x)) + eps)


@triton.jit
def solve(gram, query, ridge, smallest, NUM_ITERS: tl.constexpr):
    """Solve (H + ridge ||H|| I) x = query by NUM_ITERS Chebyshev steps, as chebyshev() in naive.py; H = 0 gives 0."""
    # Scaled by the largest entry, so that no square underflows.
    size = tl.max(tl.abs(gram))
    scaled = gram * (1 / tl.where(size > 0, size, 1.0))
    norm = size * tl.sqrt(tl.sum(sum_rows(scaled * scaled)))
    inverse = tl.where(norm > smallest, 1 / tl.where(norm > smallest, norm, 1.0), 0.0)
    step = 2 / (1 + 2 * ridge)
    quarter = 1 / ((1 + 2 * ridge) * (1 + 2 * ridge) * 4)
    rhs = step * query
    before, x, omega = tl.zeros_like(rhs), rhs, 2.0
    for _ in range(NUM_ITERS):
        omega = 1 / (1 - quarter * omega)
        target = rhs + (1 - step * ridge) * x - (step * inverse) * sum_rows(gram * as_rows(x))  # H is symmetric
        target = before + omega * (target - before)
        before = x
        x = target
    return x * inverse


@triton.jit
def wait_a_turn(n, turn):
    """Let program n begin 8 us later, about half of what it takes at head size 128, if it is in the second turn."""
    if n // turn == 1:
        tl.inline_asm_elementwise("nanosleep.u32 8000; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_ahead(start, BYTES: tl.constexpr):
    """Ask for BYTES from a pointer to be brought into the L2 cache, by one thread."""
    FETCH: tl.constexpr = (
        "{ .reg .pred one; .reg .u32 tid; mov.u32 tid, %tid.x; setp.eq.u32 one, tid, 0; "
        f"@one cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0; }}"
    )
    tl.inline_asm_elementwise(FETCH, "=r,l", [start.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["T", "turn"])
def recurrent_gka_kernel(
    q, k, v, g, beta, alpha, o, h_in, u_in, h_out, u_out, slots, starts, a_log, dt_bias,
    scale, ridge, eps, smallest, T, turn,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    NUM_ITERS: tl.constexpr, ONE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr, HAS_STATE: tl.constexpr,
    LOGITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row. ONE: every row has one token, and no loop holds registers for the next.

    AHEAD: bytes of U to ask for before the solve, so that memory is read while it runs. The two programs of a
    multiprocessor begin together and would go on in step, both reading or both solving: the second of its first two (of
    the `turn` programs after the first `turn`) begins late.
    """
    head = tl.program_id(0)
    if AHEAD > 0:
        wait_a_turn(head, turn)
    n, h = (head // H).to(tl.int64), head % H
    slot = n
    if SLOTS:
        slot = tl.load(slots + n)
        if slot < 0:
            return
    d, c = columns(BD), columns(BV)
    in_d, in_v = d < D, c < DV
    gram_at, gram_mask = offsets(BD, BD, D), as_rows(in_d) & in_d
    u_at, u_mask = offsets(BD, BV, DV), as_rows(in_d) & in_v
    h_out += (slot * H + h) * D * D
    u_out += (slot * H + h) * D * DV
    if HAS_STATE:
        h_in += (slot * H + h) * D * D
        u_in += (slot * H + h) * D * DV
    b, first, end = row_tokens(starts, n, T, PACKED)
    q += b * q_b + h * q_h
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    if ONE:
        end = first + 1
    rate = 0.0
    if LOGITS:
        rate = -tl.exp(tl.load(a_log + h).to(tl.float32))
    # Vectors are read before the matrix they meet, so that Triton keeps the matrix's layout and converts theirs.
    some = d < tl.where(first < end, D, 0)
    key = tl.load(k + first * k_t + d, mask=some, other=0.0).to(tl.float32)
    query = tl.load(q + first * q_t + d, mask=some, other=0.0).to(tl.float32)
    gram = tl.zeros([min(BD, 32), BD // min(BD, 32), BD // min(BD, 32), min(BD, 32)], tl.float32)
    if HAS_STATE:
        gram = tl.load(h_in + gram_at, mask=gram_mask, other=0.0)
    for t in range(first, end):
        if not ONE:
            key = tl.load(k + t * k_t + d, mask=in_d, other=0.0).to(tl.float32)
            query = tl.load(q + t * q_t + d, mask=in_d, other=0.0).to(tl.float32)
        gate = (b * T + t) * H + h
        log_decay = tl.load(g + gate).to(tl.float32)
        if LOGITS:
            log_decay = rate * softplus(log_decay + tl.load(dt_bias + h).to(tl.float32))
        decay = tl.exp(log_decay)
        write = read_gate(beta, gate, LOGITS) + eps
        length = inverse_length(key, eps)
        gram = gram * decay + key * (write * length * write * length) * as_rows(key)
        if ONE or t == end - 1:
            tl.store(h_out + gram_at, gram, mask=gram_mask, cache_modifier=".cs")  # not read again: leaves the L2 first
        if AHEAD > 0:
            read_ahead(u_in, AHEAD)
        unit = query * inverse_length(query, eps)
        mixed = unit
        if NUM_ITERS > 0:
            mixed += read_gate(alpha, gate, LOGITS) * (solve(gram, unit, ridge, smallest, NUM_ITERS) - unit)
        mixed *= scale
        # The key is read again, so that its rows fill no registers meanwhile; ".ca" is the default, and named to keep
        # this load from being merged with the first.
        again = tl.load(k + t * k_t + d, mask=in_d, other=0.0, cache_modifier=".ca").to(tl.float32)
        value = tl.load(v + t * v_t + c, mask=in_v, other=0.0).to(tl.float32) * (write * length * write)
        u = value * as_rows(again)
        if HAS_STATE and ONE:
            u += decay * tl.load(u_in + u_at, mask=u_mask, other=0.0)
        elif HAS_STATE:
            u += decay * tl.load(tl.where(t > first, u_out, u_in) + u_at, mask=u_mask, other=0.0)
        elif t > first:
            u += decay * tl.load(u_out + u_at, mask=u_mask, other=0.0)
        tl.store(u_out + u_at, u, mask=u_mask, cache_modifier=".cs" if ONE else "")
        tl.store(o + gate * DV + c, sum_rows(u * as_rows(mixed)).to(o.dtype.element_ty), mask=in_v)
    if PACKED and first == end:  # a row without tokens keeps its state
        tl.store(h_out + gram_at, gram, mask=gram_mask)
        u = tl.zeros([min(BV, 32), BD // min(BD, 32), BV // min(BV, 32), min(BD, 32)], tl.float32)
        if HAS_STATE:
            u = tl.load(u_in + u_at, mask=u_mask, other=0.0)
        tl.store(u_out + u_at, u, mask=u_mask)


def bytes_ahead(u: Tensor | None) -> int:
    """Return the bytes of a head's U if one instruction, Hopper's, can bring them into the cache, else 0."""
    if u is None or capability(u.device) < (9, 0):
        return 0
    size: int = u.stride(1) * 4
    return 0 if size % 16 or u.data_ptr() % 16 else size


def turn_size(programs: int, block: int, device: torch.device) -> int:
    """Return how many programs begin at once and how many then begin late; with all of them, none does."""
    if block < 128 or programs < SOME_TURNS * multiprocessors(device):
        return programs
    return multiprocessors(device)


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
    one, programs = rows.tokens == 1 and rows.starts is None, rows.count * heads
    ahead = bytes_ahead(u_old) if one else 0
    launch(
        recurrent_gka_kernel,
        lambda meta: (programs,),
        CONFIGS[block],
        q, k, v, g, beta, alpha, o, h_old, u_old, h_new, u_new, rows.slots, rows.starts, a_log, dt_bias,
        scale, ridge, EPS, smallest_norm(torch.float32), rows.tokens,
        turn_size(programs, block, q.device) if ahead else programs,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        H=heads, GROUP=heads // k.shape[2], D=dim, DV=width, BD=block, BV=padded(width),
        NUM_ITERS=num_iters, ONE=one, PACKED=rows.starts is not None,
        SLOTS=rows.slots is not None,
        HAS_STATE=h_old is not None, LOGITS=decay_gate is not None, AHEAD=ahead,
    )  # fmt: skip
    return o, (h_new, u_new)
