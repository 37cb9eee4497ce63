"""Triton: the gradients of phi = -sum_t z_t.(H_t + ridge ||H_t|| I) x_t at fixed x and z, in k, g, w and H_0.

Notation of solve.py, scaled as in triton_kernels.py: n = ||H_t||, keys u = k / |k|, E includes |k|^2, e = E / n, H_0
divided by its norm, row = d ||H_0|| / n; solve_kernel wrote x n, z n / length and rho = length / n. With z.x of these,
the norm term acts like a gradient -ridge z.x rho / n^2 of H_t in the direction of H_t itself. Kernels prefer small
parts to one whole, which would not fit the registers.
"""

import triton
import triton.language as tl

from hybridize.kernels.decay.triton_kernels import chunk_tokens, in_two
from hybridize.kernels.gka.triton_kernels import (
    inverse_or_0,
    lengths,
    load_operand,
    load_rows,
    store_rows,
    unit_gradient,
)


@triton.jit
def pair_decays(c):
    """Return e^(c_t - c_i), lower triangular, of the running sums c of one chunk."""
    at = tl.arange(0, 64)
    high, low = in_two(tl.load(c + at))
    gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(at[:, None] >= at[None, :], gap, float("-inf")))


@triton.jit
def gate_gradient_kernel(
    u,
    length,
    w,
    c,
    lead,
    sizes,
    x,
    z,
    inverse,
    rho,
    quadratic,
    through,
    product,
    d_w,
    d_log,
    by_key,
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
    """Write the parts of d_w and of the gradient d_log of the sums of g by the tokens of a chunk and head alone.

    The gradient by the norms is sum_i by_key_i k_i k_i^T for H_0, and 2 by_key_i H_0 k_i for k_i.
    """
    C: tl.constexpr = 64
    m = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    at = tl.arange(0, C)
    real = at < tl.minimum(end - first, C).to(tl.int32)
    base = first * H + head
    gates = at * H
    u = load_operand(u + head // GROUP * D, rows, columns, H // GROUP * D, end, D)
    u_t = tl.trans(u)
    gram = tl.dot(u, u_t, input_precision=PRECISION)
    gram = (gram * gram).to(DTYPE)
    left = tl.dot(load_operand(z + head * D, rows, columns, H * D, end, D), u_t, input_precision=PRECISION)
    right = tl.dot(load_operand(x + head * D, rows, columns, H * D, end, D), u_t, input_precision=PRECISION)
    left *= right
    tl.debug_barrier()  # loading what follows earlier would take too many registers
    norm = tl.load(inverse + base + gates, mask=real, other=0.0)
    strength = tl.load(rho + base + gates, mask=real, other=0.0)
    along = -ridge * tl.load(product + base + gates, mask=real, other=0.0)
    size = tl.load(sizes + m * H + head)
    decay = tl.load(lead + (m * H + head) * C + at) * norm
    row = decay * size

    f = pair_decays(c + (m * H + head) * C) * norm[:, None]
    write = tl.load(w + base + gates, mask=real, other=0.0)
    tl.store(by_key + base + gates, tl.sum(f * (along * strength * decay)[:, None], 0) * write, mask=real)
    key_start = tl.load(quadratic + base + gates, mask=real, other=0.0)
    key_size = tl.load(length + first * (H // GROUP) + head // GROUP + at * (H // GROUP), mask=real, other=0.0)
    write *= key_size * key_size
    e = f * write[None, :]
    pairs = tl.dot(e.to(DTYPE), gram, input_precision=PRECISION)
    own = tl.where(size > 0, row, 0.0) + tl.sum(e * key_start[None, :], 1)
    d_sums = (along * own - tl.load(through + base + gates, mask=real, other=0.0)) * strength * row
    d_e = (along[:, None] * (row[:, None] * key_start[None, :] + pairs) - left) * strength[:, None] * f
    key_size = tl.load(length + first * (H // GROUP) + head // GROUP + at * (H // GROUP), mask=real, other=0.0)
    tl.store(d_w + base + gates, tl.sum(d_e, 0) * key_size * key_size, mask=real)
    d_e = tl.where(at[:, None] > at[None, :], d_e, 0.0)  # the diagonal does not depend on g
    d_sums += tl.sum(d_e * write[None, :], 1) - tl.sum(d_e, 0) * write
    tl.store(d_log + base + gates, d_sums, mask=real)


@triton.jit
def pair_gradient_kernel(
    u,
    length,
    w,
    c,
    x,
    z,
    inverse,
    rho,
    product,
    d_keys,
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
    """Write the part d_keys [tokens,H,D] of d_k by the pairs of tokens of a chunk and head."""
    C: tl.constexpr = 64
    m = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    at = tl.arange(0, C)
    real = at < tl.minimum(end - first, C).to(tl.int32)
    base = first * H + head
    gates = at * H
    u = load_operand(u + head // GROUP * D, rows, columns, H // GROUP * D, end, D)
    norm = tl.load(inverse + base + gates, mask=real, other=0.0)
    key_size = tl.load(length + first * (H // GROUP) + head // GROUP + at * (H // GROUP), mask=real, other=0.0)
    weight = tl.load(w + base + gates, mask=real, other=0.0) * key_size * key_size
    # Gradients have any size, and fp16 has not: the largest strength becomes 1.
    strength = tl.load(rho + base + gates, mask=real, other=0.0)
    largest = tl.max(strength, 0)
    strength *= inverse_or_0(largest)
    along = -ridge * tl.load(product + base + gates, mask=real, other=0.0) * strength
    e = tl.trans(pair_decays(c + (m * H + head) * C)) * weight[:, None] * norm[None, :]
    both = tl.dot(e.to(DTYPE), tl.trans((e * along[None, :]).to(DTYPE)), input_precision=PRECISION)
    both *= 2 * tl.dot(u, tl.trans(u), input_precision=PRECISION)
    part = tl.dot(both.to(DTYPE), u, input_precision=PRECISION)
    e *= -strength[None, :]
    solved = load_operand(x + head * D, rows, columns, H * D, end, D)
    adjoint = load_operand(z + head * D, rows, columns, H * D, end, D)
    left = tl.dot(u, tl.trans(adjoint), input_precision=PRECISION)
    part = tl.dot((e * left).to(DTYPE), solved, part, input_precision=PRECISION)
    right = tl.dot(u, tl.trans(solved), input_precision=PRECISION)
    part = tl.dot((e * right).to(DTYPE), adjoint, part, input_precision=PRECISION)
    part *= (inverse_or_0(key_size) * largest)[:, None]
    store_rows(d_keys + head * D, part, rows, columns, H * D, end, D)


@triton.jit
def start_gradient_kernel(
    k,
    lead,
    h,
    sizes,
    x,
    z,
    inverse,
    rho,
    product,
    by_key,
    d_start,
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
    """Write the gradient of the state before each chunk [chunks,H,D,D] by the chunk's own tokens."""
    C: tl.constexpr = 64
    m = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    gates = rows * H + head
    norm = tl.load(inverse + gates, mask=rows < end, other=0.0)
    decay = tl.load(lead + (m * H + head) * C + tl.arange(0, C)) * norm
    strength = tl.load(rho + gates, mask=rows < end, other=0.0)
    weight = tl.load(by_key + gates, mask=rows < end, other=0.0)
    along = -ridge * tl.load(product + gates, mask=rows < end, other=0.0) * strength
    # Gradients have any size, and fp16 has not: the largest strength becomes 1.
    kappa = strength * decay
    largest = tl.max(kappa, 0)
    rescale = inverse_or_0(largest)
    adjoint = load_rows(z + head * D, rows, columns, H * D, end, D) * (-kappa * rescale)[:, None]
    solved = load_operand(x + head * D, rows, columns, H * D, end, D)
    total = tl.dot(tl.trans(adjoint.to(DTYPE)), solved, input_precision=PRECISION)
    keys = load_rows(k + head // GROUP * D, rows, columns, H // GROUP * D, end, D)
    weighted = (keys * (weight * rescale)[:, None]).to(DTYPE)
    total = tl.dot(tl.trans(weighted), keys.to(DTYPE), total, input_precision=PRECISION) * largest
    at = (m * H + head) * D * D
    size = tl.load(sizes + m * H + head)
    by_start = tl.sum(along * decay * (decay * size), 0) * inverse_or_0(size)
    mask = (columns < D)[:, None] & (columns < D)[None, :]
    inside = at + columns[:, None] * D + columns[None, :]
    total += tl.load(h + inside, mask=mask, other=0.0).to(tl.float32) * by_start
    tl.store(d_start + inside, total.to(d_start.dtype.element_ty), mask=mask)


@triton.jit
def reverse_scan_kernel(
    d_states,
    states,
    decay,
    products,
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
    Of each block of a result, writes its product with the state before the chunk.
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
        state = own.to(tl.float32) + factor * state
    tl.store(d_initial + ends, state, mask=mask)


@triton.jit
def key_gradient_kernel(
    k,
    g,
    w,
    c,
    h,
    d_states,
    products,
    by_key,
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
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add to the other kernels' results what goes through the states before and after a chunk, for one key head.

    Writes d_k and the d_g of its query heads and completes their d_w; d_states are those after each chunk. Keys and
    states have one dtype, whose range needs no scaling.
    """
    C: tl.constexpr = 64
    key_heads: tl.constexpr = H // GROUP
    m = tl.program_id(0).to(tl.int64) // key_heads
    key_head = tl.program_id(0) % key_heads
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    keys = load_operand(k + key_head * D, rows, columns, key_heads * D, end, D)
    is_last = rows == tl.minimum(first + C, end) - 1
    total = tl.zeros([C, BD], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        at = (m * H + head) * D * D
        gates = rows * H + head
        # What the state after the chunk passes on: sum_i F_Ci w_i k_i k_i^T and d_C H_0.
        carried = load_operand(d_states + at, columns, columns, D, D, D)
        passed = tl.dot(keys, carried, input_precision=PRECISION)
        sums = tl.load(c + (m * H + head) * C + tl.arange(0, C))
        whole = tl.load(c + (m * H + head) * C + C - 1)
        kept = tl.exp((whole - sums).to(tl.float32))
        write = tl.load(w + gates, mask=rows < end, other=0.0)
        d_kept = kept * tl.sum(passed * keys.to(tl.float32), 1)
        total += passed * (kept * write)[:, None]
        # Adding to the product before would make the compiler choose a layout that holds everything twice.
        total += tl.dot(keys, tl.trans(carried), input_precision=PRECISION) * (kept * write)[:, None]

        start = load_operand(h + at, columns, columns, D, D, D)
        weight = 2 * tl.load(by_key + gates, mask=rows < end, other=0.0)
        total += tl.dot(keys, start, input_precision=PRECISION) * weight[:, None]
        total += load_rows(d_keys + head * D, rows, columns, H * D, end, D)

        d_write = tl.load(d_w + gates, mask=rows < end, other=0.0) + d_kept
        tl.store(d_w + gates, d_write, mask=rows < end)
        d_kept = tl.where(is_last, 0.0, d_kept * write)
        parts = (m * H + head) * PARTS + tl.arange(0, PARTS)
        decayed = tl.sum(tl.load(products + parts), 0) * tl.exp(whole.to(tl.float32))
        d_sums = tl.load(d_log + gates, mask=rows < end, other=0.0) - d_kept
        d_sums += tl.where(is_last, tl.sum(d_kept, 0) + decayed, 0.0)
        decay = tl.load(g + gates, mask=rows < end, other=0.0)
        d_decay = tl.where(decay < FLOOR, 0.0, tl.cumsum(d_sums, 0, reverse=True))
        tl.store(d_g + gates, d_decay, mask=rows < end)
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
