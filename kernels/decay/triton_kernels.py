"""Triton: linear attention with a scalar decay per head, forward; the formulas are those of chunk.py.

Tensors are rows of all tokens, [tokens,heads,D] with a token stride; head h reads head h // group of a shared tensor.
Gates are prepared once, chunk by chunk and padded: c, kept and lead [chunks,H,C].
"""

import triton
import triton.language as tl


@triton.jit
def tile(x, rows, columns, stride, row_mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load x at rows times columns, in the shape in which those broadcast; zeros outside."""
    if WIDTH % BLOCK == 0:
        return tl.load(x + rows * stride + columns, mask=row_mask, other=0.0)
    return tl.load(x + rows * stride + columns, mask=row_mask & (columns < WIDTH), other=0.0)


@triton.jit
def put_rows(x, value, rows, columns, stride, row_mask, WIDTH: tl.constexpr):
    """Store value [C,BLOCK] as rows of x."""
    mask = row_mask[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * stride + columns[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def state_tile(
    x, rows, columns, stride_k, stride_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Load a block of one state [K,V]; zeros outside."""
    pointers = x + rows[:, None] * stride_k + columns[None, :] * stride_v
    if K % BK == 0 and V % BV == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=(rows < K)[:, None] & (columns < V)[None, :], other=0.0)


@triton.jit
def in_two(c):
    """Split fp64 into the sum of two fp32, whose differences stay exact where those of one would lose all digits."""
    high = c.to(tl.float32)
    return high, (c - high.to(tl.float64)).to(tl.float32)


@triton.jit
def chunk_tokens(m, seq_start, chunk_start, chunk_seq, CHUNK: tl.constexpr):
    """Return the first token of chunk m and the end of its sequence."""
    n = tl.load(chunk_seq + m)
    first = tl.load(seq_start + n) + (m - tl.load(chunk_start + n)).to(tl.int64) * CHUNK
    return first, tl.load(seq_start + n + 1)


@triton.jit
def chunk_gates(
    g, w, heads, seq_start, chunk_start, chunk_seq, H: tl.constexpr, CHUNK: tl.constexpr, FLOOR: tl.constexpr
):
    """Return the fp64 running sum of g in chunk program_id(0) [C,BH], e^(c_C - c) w, w, and where and what to store."""
    m = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, CHUNK)
    mask = (first + at < end)[:, None] & (heads < H)[None, :]
    source = (first + at)[:, None] * H + heads[None, :]
    decay = tl.load(g + source, mask=mask, other=0.0)
    decay = tl.where(decay < FLOOR, FLOOR, decay).to(tl.float64)  # NaN stays, which maximum would hide
    sums = tl.cumsum(decay, 0)
    rest = (tl.sum(decay, 0)[None, :] - sums).to(tl.float32)
    weight = tl.load(w + source, mask=mask, other=0.0)
    target = (m.to(tl.int64) * H + heads[None, :]) * CHUNK + at[:, None]
    inside = (heads < H)[None, :] & (at >= 0)[:, None]
    return sums, tl.exp(rest) * weight, weight, target, inside


@triton.jit
def gate_kernel(
    g,
    w,
    c,
    kept,
    lead,
    seq_start,
    chunk_start,
    chunk_seq,
    scale,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOOR: tl.constexpr,
    BH: tl.constexpr,
):
    """Write c, the fp64 running sum of g in a chunk, kept = e^(c_C - c) w and lead = scale e^c, for BH heads."""
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    sums, left, _, target, inside = chunk_gates(g, w, heads, seq_start, chunk_start, chunk_seq, H, CHUNK, FLOOR)
    tl.store(c + target, sums, mask=inside)
    tl.store(kept + target, left, mask=inside)
    tl.store(lead + target, tl.exp(sums.to(tl.float32)) * scale, mask=inside)


@triton.jit
def carry_states(
    pid,
    a,
    b,
    factor,
    c,
    first_state,
    states,
    last_state,
    seq_start,
    chunk_start,
    stride_a,
    stride_b,
    first_stride_k,
    first_stride_v,
    last_stride_k,
    last_stride_v,
    H: tl.constexpr,
    GROUP_A: tl.constexpr,
    GROUP_B: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    GIVEN: tl.constexpr,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Carry block pid, [BK,BV], of a state through a sequence, S <- e^(c_C) S + sum_i factor_i a_i b_i^T by chunks.

    states [chunks,H,K,V] gets S before each chunk. REVERSE goes from the last chunk to the first: the same recurrence
    with a = q, b = do and factor = lead gives the gradient of the state after each chunk.
    """
    KB: tl.constexpr = (K + BK - 1) // BK
    VB: tl.constexpr = (V + BV - 1) // BV
    columns = pid % VB * BV + tl.arange(0, BV)
    rows = pid // VB % KB * BK + tl.arange(0, BK)
    h = pid // (VB * KB) % H
    n = (pid // (VB * KB * H)).to(tl.int64)
    first, end = tl.load(seq_start + n), tl.load(seq_start + n + 1)
    m, stop = tl.load(chunk_start + n).to(tl.int64), tl.load(chunk_start + n + 1).to(tl.int64)
    steps = (stop - m).to(tl.int32)
    a += h // GROUP_A * K
    b += h // GROUP_B * V
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    if GIVEN:
        start = first_state + (n * H + h) * K * V
        state = state_tile(start, rows, columns, first_stride_k, first_stride_v, K, V, BK, BV).to(tl.float32)
    else:
        state = tl.zeros([BK, BV], tl.float32)
    step: tl.constexpr = -1 if REVERSE else 1
    if REVERSE:
        m = stop - 1
        first += (steps - 1).to(tl.int64) * CHUNK
    at = tl.arange(0, CHUNK)
    # A scalar load is not pipelined, so each step fetches the decay of the next.
    decay = tl.load(c + (m * H + h) * CHUNK + CHUNK - 1, mask=steps > 0, other=0.0)
    for j in range(steps):
        ahead = m + step * (j + 1)
        decay_ahead = tl.load(c + (ahead * H + h) * CHUNK + CHUNK - 1, mask=j + 1 < steps, other=0.0)
        here = m + step * j
        tokens = first + step * j * CHUNK + at
        left = tile(a, tokens[None, :], rows[:, None], stride_a, (tokens < end)[None, :], K, BK)
        right = tile(b, tokens[:, None], columns[None, :], stride_b, (tokens < end)[:, None], V, BV)
        scaled = (left * tl.load(factor + (here * H + h) * CHUNK + at)[None, :]).to(left.dtype)
        target = states + (here * H + h) * K * V + rows[:, None] * V + columns[None, :]
        tl.store(target, state.to(states.dtype.element_ty), mask=inside)
        state = tl.dot(scaled, right, state * tl.exp(decay.to(tl.float32)), input_precision=PRECISION)
        decay = decay_ahead
    target = last_state + (n * H + h) * K * V + rows[:, None] * last_stride_k + columns[None, :] * last_stride_v
    tl.store(target, state, mask=inside)


@triton.jit
def scan_kernel(
    a,
    b,
    factor,
    c,
    first_state,
    states,
    last_state,
    seq_start,
    chunk_start,
    stride_a,
    stride_b,
    first_stride_k,
    first_stride_v,
    last_stride_k,
    last_stride_v,
    H: tl.constexpr,
    GROUP_A: tl.constexpr,
    GROUP_B: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    GIVEN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """carry_states from the first chunk to the last, as a kernel."""
    carry_states(
        *(tl.program_id(0), a, b, factor, c, first_state, states, last_state, seq_start, chunk_start),
        *(stride_a, stride_b, first_stride_k, first_stride_v, last_stride_k, last_stride_v),
        *(H, GROUP_A, GROUP_B, K, V, CHUNK, PRECISION, GIVEN, False, BK, BV),
    )


@triton.jit
def scan_both_ways_kernel(
    a,
    b,
    factor,
    c,
    first_state,
    states,
    last_state,
    seq_start,
    chunk_start,
    stride_a,
    stride_b,
    first_stride_k,
    first_stride_v,
    last_stride_k,
    last_stride_v,
    d_a,
    d_b,
    d_factor,
    d_last,
    d_states,
    d_first,
    stride_d_a,
    stride_d_b,
    d_last_stride_k,
    d_last_stride_v,
    d_first_stride_k,
    d_first_stride_v,
    H: tl.constexpr,
    GROUP_A: tl.constexpr,
    GROUP_B: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    GIVEN: tl.constexpr,
    GROUP_D_A: tl.constexpr,
    GROUP_D_B: tl.constexpr,
    D_GIVEN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """carry_states of the states in half of the programs, and of their gradients, in reverse, in the other half.

    Neither needs what the other writes, and each alone leaves most of a GPU idle when there are few sequences.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0) // 2
    if pid < programs:
        carry_states(
            *(pid, a, b, factor, c, first_state, states, last_state, seq_start, chunk_start),
            *(stride_a, stride_b, first_stride_k, first_stride_v, last_stride_k, last_stride_v),
            *(H, GROUP_A, GROUP_B, K, V, CHUNK, PRECISION, GIVEN, False, BK, BV),
        )
    else:
        carry_states(
            *(pid - programs, d_a, d_b, d_factor, c, d_last, d_states, d_first, seq_start, chunk_start),
            *(stride_d_a, stride_d_b, d_last_stride_k, d_last_stride_v, d_first_stride_k, d_first_stride_v),
            *(H, GROUP_D_A, GROUP_D_B, K, V, CHUNK, PRECISION, D_GIVEN, True, BK, BV),
        )


@triton.jit
def output_kernel(
    q,
    q_low,
    k,
    v,
    w,
    skip,
    c,
    lead,
    states,
    o,
    seq_start,
    chunk_start,
    chunk_seq,
    stride_q,
    stride_k,
    stride_v,
    scale,
    H: tl.constexpr,
    GROUP_Q: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUP_V: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    SKIP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Write o = lead q S + (scale q k^T e^(c_t - c_i) w_i, causal) v + skip v for one chunk, head and block of V.

    With q_low, q stands for q + q_low.
    """
    VB: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    columns = pid % VB * BV + tl.arange(0, BV)
    h = pid // VB % H
    m = (pid // (VB * H)).to(tl.int64)
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, CHUNK)
    at = tl.arange(0, CHUNK)
    rows = tl.arange(0, BK)
    tokens = first + at
    real = tokens < end
    queries = tile(q + h // GROUP_Q * K, tokens[:, None], rows[None, :], stride_q, real[:, None], K, BK)
    keys = tile(k + h // GROUP_K * K, tokens[None, :], rows[:, None], stride_k, real[None, :], K, BK)
    values = tile(v + h // GROUP_V * V, tokens[:, None], columns[None, :], stride_v, real[:, None], V, BV)
    state = state_tile(states + (m * H + h) * K * V, rows, columns, V, 1, K, V, BK, BV)
    gates = (m * H + h) * CHUNK + at
    high, low = in_two(tl.load(c + gates))
    weight = tl.load(w + tokens * H + h, mask=real, other=0.0) * scale
    gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    e = tl.exp(tl.where(at[:, None] >= at[None, :], gap, float("-inf"))) * weight[None, :]
    scores = tl.dot(queries, keys, input_precision=PRECISION) * e
    out = tl.dot(queries.to(state.dtype), state, input_precision=PRECISION)
    if q_low is not None:
        rest = tile(q_low + h // GROUP_Q * K, tokens[:, None], rows[None, :], stride_q, real[:, None], K, BK)
        scores += tl.dot(rest, keys, input_precision=PRECISION) * e
        out += tl.dot(rest.to(state.dtype), state, input_precision=PRECISION)
    out *= tl.load(lead + gates)[:, None]
    out = tl.dot(scores.to(values.dtype), values, out, input_precision=PRECISION)
    if SKIP:
        out += tl.load(skip + h) * values
    put_rows(o + h * V, out, tokens, columns, H * V, real, V)
