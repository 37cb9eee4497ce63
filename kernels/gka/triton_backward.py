"""Triton: the gradients of phi = -sum_t z_t.(H_t + ridge ||H_t|| I) x_t at fixed x and z, in k, g, w and H_0.

Notation of solve.py, scaled as in triton_kernels.py: n = ||H_t||, keys u = k / |k|, E includes |k|^2, e = E / n, H_0
divided by its norm, row = d ||H_0|| / n; solve_kernel wrote x n, z n / length and rho = length / n. With c = z.x of
these, the norm term acts like a gradient -ridge c rho / n^2 of H_t in the direction of H_t itself.
"""

import triton
import triton.language as tl

from hybridize.kernels.decay.triton_kernels import chunk_tokens
from hybridize.kernels.gka.triton_kernels import decays, inverse_or_0, load_keys, load_rows, load_state, store_rows


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
def key_gradient_kernel(
    k,
    g,
    w,
    h,
    sizes,
    x,
    z,
    inverse,
    rho,
    d_states,
    products,
    largest_parts,
    d_k,
    d_g,
    d_w,
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
    PARTS: tl.constexpr,
):
    """Write d_k of one chunk and key head, and d_g and d_w of its query heads; d_states are those after each chunk."""
    C: tl.constexpr = 64
    key_heads: tl.constexpr = H // GROUP
    m = tl.program_id(0).to(tl.int64) // key_heads
    key_head = tl.program_id(0) % key_heads
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    keys, length = load_keys(k + key_head * D, rows, columns, key_heads * D, end, D)
    u = keys.to(DTYPE)
    u_t = tl.trans(u)
    gram = tl.dot(u, u_t, input_precision=PRECISION)
    is_last = rows == tl.minimum(first + C, end) - 1
    earlier = rows[:, None] > rows[None, :]
    d_keys = tl.zeros([C, BD], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        at = (m * H + head) * D * D
        gates = rows * H + head
        norm = tl.load(inverse + gates, mask=rows < end, other=0.0)
        write = tl.load(w + gates, mask=rows < end, other=0.0)
        strength = tl.load(rho + gates, mask=rows < end, other=0.0)
        largest = tl.max(strength, 0)
        strength *= inverse_or_0(largest)
        f, d = decays(g + head, rows, end, H, FLOOR)
        f *= (length * length)[None, :]
        e = f * norm[:, None] * write[None, :]
        solved = load_rows(x + head * D, rows, columns, H * D, end, D).to(DTYPE)
        adjoint = load_rows(z + head * D, rows, columns, H * D, end, D).to(DTYPE)
        along = -ridge * tl.sum(solved.to(tl.float32) * adjoint.to(tl.float32), 1)

        size = tl.load(sizes + m * H + head)
        start = (load_state(h + at, columns, D) * inverse_or_0(size)).to(DTYPE)
        row = d * size * norm
        keys_start = tl.dot(u, start, input_precision=PRECISION)
        quadratic = tl.sum(keys_start * u.to(tl.float32), 1)
        through = tl.sum(tl.dot(adjoint, start, input_precision=PRECISION) * solved.to(tl.float32), 1)
        own = tl.where(size > 0, row, 0.0) + tl.sum(e * quadratic[None, :], 1)
        d_log = strength * row * (along * own - through)

        left = tl.dot(adjoint, u_t, input_precision=PRECISION)
        right = tl.dot(solved, u_t, input_precision=PRECISION)
        low = e.to(DTYPE)
        pairs = tl.dot(low, (gram * gram).to(DTYPE), input_precision=PRECISION)
        d_e = (along[:, None] * (row[:, None] * quadratic[None, :] + pairs) - left * right) * strength[:, None]
        d_write = tl.sum(f * norm[:, None] * d_e, 0) * largest
        d_e = tl.where(earlier, e * d_e, 0.0)  # the diagonal does not depend on g
        d_log = (d_log + tl.sum(d_e, 1) - tl.sum(d_e, 0)) * largest

        weighted = e * -strength[:, None]
        part = tl.dot(tl.trans((weighted * left).to(DTYPE)), solved, input_precision=PRECISION)
        part = tl.dot(tl.trans((weighted * right).to(DTYPE)), adjoint, part, input_precision=PRECISION)
        along *= strength
        both = tl.dot(tl.trans(low), (e * along[:, None]).to(DTYPE), input_precision=PRECISION) * gram
        part += 2 * tl.sum(e * (along * row)[:, None], 0)[:, None] * keys_start
        d_keys += tl.dot((2 * both).to(DTYPE), u, part, input_precision=PRECISION) * largest

        # What the state after the chunk passes on: sum_i E_Ci u_i u_i^T and d_C H_0.
        parts = (m * H + head) * PARTS + tl.arange(0, PARTS)
        most = tl.max(tl.load(largest_parts + parts), 0)
        carried = (load_state(d_states + at, columns, D) * inverse_or_0(most)).to(DTYPE)
        passed = tl.dot(u, carried, input_precision=PRECISION)
        passed = tl.dot(u, tl.trans(carried), passed, input_precision=PRECISION) * most
        kept = tl.sum(tl.where(is_last[:, None], f, 0.0), 0)
        d_kept = kept * tl.sum(passed * u.to(tl.float32), 1) * 0.5
        d_write += d_kept
        d_keys += passed * (kept * write)[:, None]
        d_kept = tl.where(is_last, 0.0, d_kept * write)
        decayed = tl.sum(tl.load(products + parts), 0) * tl.sum(tl.where(is_last, d, 0.0), 0)
        d_log += tl.where(is_last, tl.sum(d_kept, 0) + decayed, 0.0) - d_kept

        tl.store(d_w + gates, d_write, mask=rows < end)
        decay = tl.load(g + gates, mask=rows < end, other=0.0)
        d_decay = tl.where(decay < FLOOR, 0.0, tl.cumsum(d_log, 0, reverse=True))
        tl.store(d_g + gates, d_decay, mask=rows < end)
    d_keys *= inverse_or_0(length)[:, None]
    store_rows(d_k + key_head * D, d_keys, rows, columns, key_heads * D, end, D)
