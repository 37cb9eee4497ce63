"""Triton: the gradients of phi = -sum_t z_t.(H_t + ridge ||H_t|| I) x_t at fixed x and z, in k, g, w and H_0.

Notation of solve.py, scaled as in triton_kernels.py: n = ||H_t||, keys u = k / |k|, E includes |k|^2, e = E / n, H_0
divided by its norm, row = d ||H_0|| / n; solve_kernel wrote x n, z n / length and rho = length / n. With c = z.x of
these, the norm term acts like a gradient -ridge c rho / n^2 of H_t in the direction of H_t itself.
"""

import triton
import triton.language as tl

from hybridize.kernels.decay.triton_kernels import chunk_tokens, in_two
from hybridize.kernels.gka.triton_kernels import (
    decays,
    inverse_or_0,
    lengths,
    load_keys,
    load_rows,
    load_state,
    store_rows,
    unit_gradient,
)


@triton.jit
def start_gradient_kernel(
    k,
    g,
    w,
    h,
    sizes,
    x,
    z,
    inverse,
    rho,
    d_start,
    seq_start,
    chunk_start,
    chunk_seq,
    ridge,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    FLOOR: tl.constexpr,
    EPS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of the state before each chunk [chunks,H,D,D] by the chunk's own tokens."""
    C: tl.constexpr = 64
    m = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    keys, length = load_keys(k + head // GROUP * D, rows, columns, H // GROUP * D, end, D)
    solved = load_rows(x + head * D, rows, columns, H * D, end, D)
    adjoint = load_rows(z + head * D, rows, columns, H * D, end, D)
    norm = tl.load(inverse + rows * H + head, mask=rows < end, other=0.0)
    weight = tl.load(w + rows * H + head, mask=rows < end, other=0.0) * length * length
    f, d = decays(g + head, rows, end, H, FLOOR)
    kappa = tl.load(rho + rows * H + head, mask=rows < end, other=0.0) * d * norm
    # Gradients have any size, and fp16 has not: the largest weight becomes 1.
    largest = tl.max(kappa, 0)
    kappa *= inverse_or_0(largest)
    along = -ridge * tl.sum(solved * adjoint, 1) * kappa
    by_key = tl.sum(f * (along * norm)[:, None], 0) * weight
    total = tl.dot(tl.trans((adjoint * -kappa[:, None]).to(DTYPE)), solved.to(DTYPE), input_precision=PRECISION)
    total = tl.dot(tl.trans((keys * by_key[:, None]).to(DTYPE)), keys.to(DTYPE), total, input_precision=PRECISION)
    at = (m * H + head) * D * D
    size = tl.load(sizes + m * H + head)
    start = load_state(h + at, columns, D) * inverse_or_0(size)
    total = (total + start * tl.sum(along * d * size * norm, 0)) * largest
    mask = (columns < D)[:, None] & (columns < D)[None, :]
    target = d_start + at + columns[:, None] * D + columns[None, :]
    tl.store(target, total.to(d_start.dtype.element_ty), mask=mask)


@triton.jit
def reverse_scan_kernel(
    d_states,
    states,
    decay,
    products,
    largest,
    d_final,
    d_initial,
    chunk_start,
    H: tl.constexpr,
    SIZE: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Turn the gradients of the states before each chunk by its own tokens into those of the states after it.

    d_states [chunks,H,SIZE] in place, decay [chunks,H] of whole chunks; d_final (if GIVEN) and d_initial [N,H,SIZE].
    Of each block of a result, writes its product with the state before the chunk, and its largest element.
    """
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    head = pid // blocks % H
    n = (pid // (blocks * H)).to(tl.int64)
    state = tl.zeros([BLOCK], tl.float32)
    ends = (n * H + head) * SIZE + at
    if GIVEN:
        state = tl.load(d_final + ends, mask=mask, other=0.0)
    begin, stop = tl.load(chunk_start + n).to(tl.int64), tl.load(chunk_start + n + 1).to(tl.int64)
    steps = (stop - begin).to(tl.int32)
    # The next chunk is on its way while this one is stored.
    row = (stop - 1) * H + head
    ahead = tl.load(d_states + row * SIZE + at, mask=at < tl.where(steps > 0, SIZE, 0), other=0.0)
    start_ahead = tl.load(states + row * SIZE + at, mask=at < tl.where(steps > 0, SIZE, 0), other=0.0)
    factor_ahead = tl.load(decay + row, mask=steps > 0, other=0.0)
    for j in range(steps):
        row = (stop - 1 - j) * H + head
        own, start, factor = ahead, start_ahead, factor_ahead
        more = j + 1 < steps
        ahead = tl.load(d_states + (row - H) * SIZE + at, mask=at < tl.where(more, SIZE, 0), other=0.0)
        start_ahead = tl.load(states + (row - H) * SIZE + at, mask=at < tl.where(more, SIZE, 0), other=0.0)
        factor_ahead = tl.load(decay + row - H, mask=more, other=0.0)
        tl.store(d_states + row * SIZE + at, state.to(d_states.dtype.element_ty), mask=mask)
        tl.store(products + row * PARTS + pid % blocks, tl.sum(state * start, 0))
        tl.store(largest + row * PARTS + pid % blocks, tl.max(tl.abs(state), 0))
        state = own.to(tl.float32) + factor * state
    tl.store(d_initial + ends, state, mask=mask)


@triton.jit
def pair_gradient_kernel(
    k,
    w,
    c,
    sizes,
    x,
    z,
    inverse,
    rho,
    quadratic,
    through,
    d_keys,
    d_w,
    d_log,
    by_start,
    seq_start,
    chunk_start,
    chunk_seq,
    ridge,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write what the tokens of one chunk and head give each other, in d_k, d_w and the gradient of the sums of g.

    d_keys [tokens,H,D] is the gradient of u without that of u.H_0 u, which is by_start (H_0 + H_0^T) u / 2.
    """
    C: tl.constexpr = 64
    m = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    gates = rows * H + head
    keys, length = load_keys(k + head // GROUP * D, rows, columns, H // GROUP * D, end, D)
    u = keys.to(DTYPE)
    u_t = tl.trans(u)
    solved = load_rows(x + head * D, rows, columns, H * D, end, D).to(DTYPE)
    adjoint = load_rows(z + head * D, rows, columns, H * D, end, D).to(DTYPE)
    along = -ridge * tl.sum(solved.to(tl.float32) * adjoint.to(tl.float32), 1)
    norm = tl.load(inverse + gates, mask=rows < end, other=0.0)
    write = tl.load(w + gates, mask=rows < end, other=0.0)
    # Gradients have any size, and fp16 has not: the largest weight becomes 1.
    strength = tl.load(rho + gates, mask=rows < end, other=0.0)
    largest = tl.max(strength, 0)
    strength *= inverse_or_0(largest)
    along *= strength
    f, d = chunk_decays(c + (m * H + head) * C, norm, length)
    size = tl.load(sizes + m * H + head)
    row = d * size * norm
    key_start = tl.load(quadratic + gates, mask=rows < end, other=0.0)

    gram = tl.dot(u, u_t, input_precision=PRECISION)
    e = f * write[None, :]
    low = e.to(DTYPE)
    by_key = tl.sum(e * key_start[None, :], 1)
    own = tl.where(size > 0, row, 0.0) + by_key
    lost = tl.load(through + gates, mask=rows < end, other=0.0) * strength * row
    pairs = tl.dot(low, (gram * gram).to(DTYPE), input_precision=PRECISION)
    tl.store(by_start + gates, 2 * largest * tl.sum(e * (along * row)[:, None], 0), mask=rows < end)
    both = tl.dot(tl.trans(low), (e * along[:, None]).to(DTYPE), input_precision=PRECISION)
    both = (2 * both * gram).to(DTYPE)
    left = tl.dot(adjoint, u_t, input_precision=PRECISION)
    right = tl.dot(solved, u_t, input_precision=PRECISION)
    d_e = along[:, None] * (row[:, None] * key_start[None, :] + pairs) - left * right * strength[:, None]
    d_e *= f
    tl.store(d_w + gates, tl.sum(d_e, 0) * largest, mask=rows < end)
    earlier = rows[:, None] > rows[None, :]  # the diagonal does not depend on g
    d_e = tl.where(earlier, d_e * write[None, :], 0.0)
    d_sums = along * row * own - lost + tl.sum(d_e, 1) - tl.sum(d_e, 0)
    tl.store(d_log + gates, d_sums * largest, mask=rows < end)

    weighted = f * write[None, :] * -strength[:, None]
    part = tl.dot(both, u, input_precision=PRECISION)
    part = tl.dot(tl.trans((weighted * left).to(DTYPE)), solved, part, input_precision=PRECISION)
    part = tl.dot(tl.trans((weighted * right).to(DTYPE)), adjoint, part, input_precision=PRECISION)
    store_rows(d_keys + head * D, part * largest, rows, columns, H * D, end, D)


@triton.jit
def chunk_decays(c, norm, length):
    """Return e^(c_t - c_i) norm_t length_i^2, lower triangular, and e^(c_t) of the running sums c of one chunk."""
    at = tl.arange(0, 64)
    sums = tl.load(c + at)
    high, low = in_two(sums)
    gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    f = tl.exp(tl.where(at[:, None] >= at[None, :], gap, float("-inf")))
    return f * norm[:, None] * (length * length)[None, :], tl.exp(sums.to(tl.float32))


@triton.jit
def key_gradient_kernel(
    k,
    g,
    w,
    c,
    h,
    sizes,
    d_states,
    products,
    largest_parts,
    by_start,
    d_log,
    d_keys,
    d_k,
    d_g,
    d_w,
    seq_start,
    chunk_start,
    chunk_seq,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    FLOOR: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add to pair_gradient_kernel's results what goes through the states before and after a chunk, for one key head.

    Writes d_k and the d_g of its query heads and completes their d_w; d_states are those after each chunk.
    """
    C: tl.constexpr = 64
    key_heads: tl.constexpr = H // GROUP
    m = tl.program_id(0).to(tl.int64) // key_heads
    key_head = tl.program_id(0) % key_heads
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    keys, length = load_keys(k + key_head * D, rows, columns, key_heads * D, end, D)
    u = keys.to(DTYPE)
    is_last = rows == tl.minimum(first + C, end) - 1
    total = tl.zeros([C, BD], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        at = (m * H + head) * D * D
        gates = rows * H + head
        # The gradient of the state after the chunk, sum_i F_Ci w_i |k_i|^2 u_i u_i^T + d_C H_0, has any size.
        parts = (m * H + head) * PARTS + tl.arange(0, PARTS)
        most = tl.max(tl.load(largest_parts + parts), 0)
        carried = (load_state(d_states + at, columns, D) * inverse_or_0(most)).to(DTYPE)
        passed = tl.dot(u, carried, input_precision=PRECISION)
        passed = tl.dot(u, tl.trans(carried), passed, input_precision=PRECISION)
        sums = tl.load(c + (m * H + head) * C + tl.arange(0, C))
        whole = tl.load(c + (m * H + head) * C + C - 1)
        kept = tl.exp((whole - sums).to(tl.float32)) * length * length * most
        write = tl.load(w + gates, mask=rows < end, other=0.0)
        d_kept = kept * tl.sum(passed * u.to(tl.float32), 1) * 0.5
        total += passed * (kept * write)[:, None]

        start = (load_state(h + at, columns, D) * inverse_or_0(tl.load(sizes + m * H + head))).to(DTYPE)
        by_key = tl.load(by_start + gates, mask=rows < end, other=0.0)
        total += tl.dot(u, start, input_precision=PRECISION) * by_key[:, None]
        total += load_rows(d_keys + head * D, rows, columns, H * D, end, D)

        d_write = tl.load(d_w + gates, mask=rows < end, other=0.0) + d_kept
        tl.store(d_w + gates, d_write, mask=rows < end)
        d_kept = tl.where(is_last, 0.0, d_kept * write)
        decayed = tl.sum(tl.load(products + parts), 0) * tl.exp(whole.to(tl.float32))
        d_sums = tl.load(d_log + gates, mask=rows < end, other=0.0) - d_kept
        d_sums += tl.where(is_last, tl.sum(d_kept, 0) + decayed, 0.0)
        decay = tl.load(g + gates, mask=rows < end, other=0.0)
        d_decay = tl.where(decay < FLOOR, 0.0, tl.cumsum(d_sums, 0, reverse=True))
        tl.store(d_g + gates, d_decay, mask=rows < end)
    total *= inverse_or_0(length)[:, None]
    store_rows(d_k + key_head * D, total, rows, columns, key_heads * D, end, D)


@triton.jit
def mix_gradient_kernel(
    q,
    alpha,
    x,
    inverse,
    z,
    rho,
    d_out,
    d_q,
    d_alpha,
    total,
    D: tl.constexpr,
    BD: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write d_q and d_alpha of q + alpha (x - q) for q of length 1, rows of [total,D] and [total]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BD)
    mask = rows < total
    query = load_rows(q, rows, columns, D, total, D)
    d_mixed = load_rows(d_out, rows, columns, D, total, D)
    solved = load_rows(x, rows, columns, D, total, D) * tl.load(inverse + rows, mask=mask, other=0.0)[:, None]
    unit = query * (1 / (lengths(query)[0] + EPS))[:, None]
    tl.store(d_alpha + rows, tl.sum(d_mixed * (solved - unit), 1), mask=mask)
    d_unit = load_rows(z, rows, columns, D, total, D) * tl.load(rho + rows, mask=mask, other=0.0)[:, None]
    d_unit += d_mixed * (1 - tl.load(alpha + rows, mask=mask, other=0.0))[:, None]
    store_rows(d_q, unit_gradient(query, d_unit, EPS), rows, columns, D, total, D)
