"""Triton: linear attention with a scalar decay per head, forward in segments whose state never leaves the registers.

A segment is some consecutive chunks of a sequence. Layouts are those of triton_kernels.py, but a state lies transposed,
[V,K]: so both factors of its update are read as they lie. Gates are prepared once in fp32, [chunks,H,C] padded, with c
in powers of two: high + low = c log2(e), write = scale w 2^-low, kept = e^(c_C - c) w and lead = scale e^c.
"""

import triton
import triton.language as tl

from hybridize.kernels.decay.triton_kernels import chunk_gates, in_two, state_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def power_gate_kernel(
    g,
    w,
    high,
    low,
    write,
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
    """Prepare the gates of one chunk and BH heads."""
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    sums, left, weight, target, inside = chunk_gates(g, w, heads, seq_start, chunk_start, chunk_seq, H, CHUNK, FLOOR)
    whole, rest = in_two(sums * LOG2_E)
    tl.store(high + target, whole, mask=inside)
    tl.store(low + target, rest, mask=inside)
    tl.store(write + target, tl.exp2(-rest) * weight * scale, mask=inside)
    tl.store(kept + target, left, mask=inside)
    tl.store(lead + target, tl.exp2(whole + rest) * scale, mask=inside)


@triton.jit
def token_tile(
    x,
    columns,
    left,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the channels columns of a chunk's tokens, of which left are real unless it is WHOLE; zeros outside."""
    # Only the distance from the chunk's first token differs between threads: most of it is known when compiling.
    at = tl.arange(0, CHUNK)
    pointers = x + at[:, None] * STRIDE + columns[None, :]
    if WHOLE:
        if WIDTH % BLOCK == 0:
            return tl.load(pointers)
        return tl.load(pointers, mask=((at >= 0)[:, None]) & (columns < WIDTH)[None, :], other=0.0)
    return tl.load(pointers, mask=(at < left)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def segment_tokens(s, n, seq_start, chunk_start, segment_start, CHUNK: tl.constexpr):
    """Return the first chunk of segment s of sequence n, how many chunks it has, and its first token."""
    m = tl.load(segment_start + s)
    chunks = tl.load(segment_start + s + 1) - m
    first = tl.load(seq_start + n) + (m - tl.load(chunk_start + n)).to(tl.int64) * CHUNK
    return m.to(tl.int64), chunks, first


@triton.jit
def total_kernel(
    k,
    v,
    high,
    kept,
    totals,
    decays,
    seq_start,
    chunk_start,
    segment_start,
    segment_seq,
    followed,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    H: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUP_V: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Write totals [followed,H,V,K], what a segment adds to the state after it, and decays [followed,H], e^(sum of g).

    followed lists the segments that another one of their sequence follows; so all their chunks are whole.
    """
    KB: tl.constexpr = (K + BK - 1) // BK
    VB: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    columns = pid % VB * BV + tl.arange(0, BV)
    rows = pid // VB % KB * BK + tl.arange(0, BK)
    h = pid // (VB * KB) % H
    index = (pid // (VB * KB * H)).to(tl.int64)
    s = tl.load(followed + index)
    n = tl.load(segment_seq + s)
    m, chunks, first = segment_tokens(s, n, seq_start, chunk_start, segment_start, CHUNK)
    k += first * STRIDE_K + h // GROUP_K * K
    v += first * STRIDE_V + h // GROUP_V * V
    high += (m * H + h) * CHUNK
    kept += (m * H + h) * CHUNK
    at = tl.arange(0, CHUNK)
    total = tl.zeros([BV, BK], tl.float32)
    # From the last chunk to the first the decay that follows a chunk is known, and nothing but the sum is carried.
    after = 0.0
    decay = tl.load(high + (chunks - 1).to(tl.int64) * H * CHUNK + CHUNK - 1)
    for j in range(chunks):
        here = (chunks - 1 - j).to(tl.int64)
        decay_ahead = tl.load(high + (here - 1) * H * CHUNK + CHUNK - 1, mask=here > 0, other=0.0)
        keys = token_tile(k + here * CHUNK * STRIDE_K, rows, CHUNK, STRIDE_K, CHUNK, True, K, BK)
        values = token_tile(v + here * CHUNK * STRIDE_V, columns, CHUNK, STRIDE_V, CHUNK, True, V, BV)
        factor = tl.load(kept + here * H * CHUNK + at) * tl.exp2(after)
        scaled = (tl.trans(values) * factor[None, :]).to(values.dtype)
        total = tl.dot(scaled, keys, total, input_precision=PRECISION)
        after += decay
        decay = decay_ahead
    target = totals + (index * H + h) * K * V + columns[:, None] * K + rows[None, :]
    tl.store(target, total, mask=(columns < V)[:, None] & (rows < K)[None, :])
    tl.store(decays + index * H + h, tl.exp2(after))  # the same from every block


@triton.jit
def chunk_step(
    state,
    decay,
    q,
    k,
    v,
    o,
    gates,
    high,
    low,
    write,
    kept,
    lead,
    skip,
    rows,
    columns,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    left,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    SKIP: tl.constexpr,
    STATE: tl.constexpr,
    WHOLE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Write o of a chunk, of whose tokens left are real, and return the state [V,K] after it."""
    at = tl.arange(0, CHUNK)
    queries = token_tile(q, rows, left, STRIDE_Q, CHUNK, WHOLE, K, BK)
    keys = token_tile(k, rows, left, STRIDE_K, CHUNK, WHOLE, K, BK)
    values = token_tile(v, columns, left, STRIDE_V, CHUNK, WHOLE, V, BV)
    whole = tl.load(high + gates + at)
    gap = whole[:, None] - whole[None, :] + tl.load(low + gates + at)[:, None]
    e = tl.exp2(tl.where(at[:, None] >= at[None, :], gap, float("-inf"))) * tl.load(write + gates + at)[None, :]
    scores = (tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * e).to(values.dtype)
    out = tl.dot(queries.to(STATE), tl.trans(state.to(STATE)), input_precision=PRECISION)
    out *= tl.load(lead + gates + at)[:, None]
    out = tl.dot(scores, values, out, input_precision=PRECISION)
    if SKIP:
        out += skip * values
    target = o + at[:, None] * H * V + columns[None, :]
    if WHOLE and V % BV == 0:
        tl.store(target, out.to(o.dtype.element_ty))
    else:
        tl.store(target, out.to(o.dtype.element_ty), mask=(at < left)[:, None] & (columns < V)[None, :])
    scaled = (tl.trans(values) * tl.load(kept + gates + at)[None, :]).to(values.dtype)
    return tl.dot(scaled, keys, state * tl.exp2(decay), input_precision=PRECISION)


@triton.jit
def fused_kernel(
    q,
    k,
    v,
    skip,
    high,
    low,
    write,
    kept,
    lead,
    first_state,
    totals,
    decays,
    o,
    last_state,
    seq_start,
    chunk_start,
    segment_start,
    segment_seq,
    seq_segment,
    FIRST_K: tl.constexpr,
    FIRST_V: tl.constexpr,
    LAST_K: tl.constexpr,
    LAST_V: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    H: tl.constexpr,
    GROUP_Q: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUP_V: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    GIVEN: tl.constexpr,
    SKIP: tl.constexpr,
    STATE: tl.constexpr,
    TAILS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Write o of one segment, head and block of V as output_kernel does, and the last state of its sequence.

    The state starts from the first one and the totals of the sequence's earlier segments; products take it as STATE.
    """
    VB: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    columns = pid % VB * BV + tl.arange(0, BV)
    rows = tl.arange(0, BK)
    h = pid // VB % H
    s = pid // (VB * H)
    n = tl.load(segment_seq + s).to(tl.int64)
    m, chunks, first = segment_tokens(s, n, seq_start, chunk_start, segment_start, CHUNK)
    whole_chunks = chunks
    if TAILS:
        tokens = tl.load(seq_start + n + 1) - first
        whole_chunks = tl.minimum(chunks, (tokens // CHUNK).to(tl.int32))
    if GIVEN:
        start = first_state + (n * H + h) * K * V
        state = state_tile(start, columns, rows, FIRST_V, FIRST_K, V, K, BV, BK).to(tl.float32)
    else:
        state = tl.zeros([BV, BK], tl.float32)
    for earlier in range(tl.load(seq_segment + n), s):
        index = (earlier - n) * H + h  # every sequence before has one segment without a total
        added = state_tile(totals + index * K * V, columns, rows, K, 1, V, K, BV, BK)
        state = state * tl.load(decays + index) + added
    q += first * STRIDE_Q + h // GROUP_Q * K
    k += first * STRIDE_K + h // GROUP_K * K
    v += first * STRIDE_V + h // GROUP_V * V
    o += first * H * V + h * V
    gates = (m * H + h) * CHUNK
    bonus = 0.0
    if SKIP:
        bonus = tl.load(skip + h)
    # A scalar load is not pipelined, so each step fetches the decay of the next.
    decay = tl.load(high + gates + CHUNK - 1, mask=chunks > 0, other=0.0)
    for j in range(whole_chunks):
        decay_ahead = tl.load(high + gates + (H + 1) * CHUNK - 1, mask=j + 1 < chunks, other=0.0)
        state = chunk_step(
            *(state, decay, q, k, v, o, gates, high, low, write, kept, lead, bonus, rows, columns),
            *(STRIDE_Q, STRIDE_K, STRIDE_V, CHUNK, H, K, V, CHUNK, PRECISION, SKIP, STATE, True, BK, BV),
        )
        decay = decay_ahead
        q += CHUNK * STRIDE_Q
        k += CHUNK * STRIDE_K
        v += CHUNK * STRIDE_V
        o += CHUNK * H * V
        gates += H * CHUNK
    # Sequences of whole chunks are spared this, which costs the loop above registers.
    if TAILS and whole_chunks < chunks:
        left = (tokens - whole_chunks.to(tl.int64) * CHUNK).to(tl.int32)
        state = chunk_step(
            *(state, decay, q, k, v, o, gates, high, low, write, kept, lead, bonus, rows, columns),
            *(STRIDE_Q, STRIDE_K, STRIDE_V, left, H, K, V, CHUNK, PRECISION, SKIP, STATE, False, BK, BV),
        )
    if s + 1 == tl.load(seq_segment + n + 1):
        target = last_state + (n * H + h) * K * V + rows[None, :] * LAST_K + columns[:, None] * LAST_V
        tl.store(target, state, mask=(columns < V)[:, None] & (rows < K)[None, :])
