"""Triton: linear attention with a scalar decay per head, backward.

With E_ti = e^(c_t - c_i) for i <= t, A = scale (q k^T) E, B = do v^T, S the state before a chunk and R the gradient of
the state after it, kept = e^(c_C - c) w and lead = scale e^c:
dv_i = sum_t A_ti w_i do_t + kept_i R^T k_i, dk_i = sum_t scale B_ti E_ti w_i q_t + kept_i R v_i,
dq_t = sum_i scale B_ti E_ti w_i k_i + lead_t S do_t, dw_i = sum_t A_ti B_ti + e^(c_C - c_i) k_i.(R v_i), and dg_t sums
all that crosses t: reads from t on of earlier writes or of S, and what R takes of earlier writes or of S.
"""

import triton
import triton.language as tl

from hybridize.kernels.decay.triton_kernels import chunk_tokens, in_two, put_rows, state_tile, tile


@triton.jit
def pair_kernel(
    q,
    k,
    v,
    w,
    d_o,
    c,
    scores,
    d_scores,
    d_weight,
    d_gate,
    d_skip,
    seq_start,
    chunk_start,
    chunk_seq,
    stride_q,
    stride_k,
    stride_v,
    stride_do,
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
    """Write A w and scale B E w as tiles [i,t] for one chunk and head, and what the pairs add to dw, dg and d_skip."""
    pid = tl.program_id(0)
    h = pid % H
    m = (pid // H).to(tl.int64)
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, CHUNK)
    at = tl.arange(0, CHUNK)
    rows, columns = tl.arange(0, BK), tl.arange(0, BV)
    tokens = first + at
    real = tokens < end
    values = tile(v + h // GROUP_V * V, tokens[:, None], columns[None, :], stride_v, real[:, None], V, BV)
    grads = tile(d_o + h * V, tokens[None, :], columns[:, None], stride_do, real[None, :], V, BV)
    keys = tile(k + h // GROUP_K * K, tokens[:, None], rows[None, :], stride_k, real[:, None], K, BK)
    queries = tile(q + h // GROUP_Q * K, tokens[None, :], rows[:, None], stride_q, real[None, :], K, BK)
    gates = (m * H + h) * CHUNK + at
    high, low = in_two(tl.load(c + gates))
    weight = tl.load(w + tokens * H + h, mask=real, other=0.0)
    b = tl.dot(values, grads, input_precision=PRECISION)
    a = tl.dot(keys, queries, input_precision=PRECISION)
    if SKIP:
        own = tl.where(at[None, :] == at[:, None], b, 0.0)
        tl.store(d_skip + m * H + h, tl.sum(tl.sum(own, 1), 0))
    gap = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
    e = tl.exp(tl.where(at[None, :] >= at[:, None], gap, float("-inf"))) * scale
    a *= e
    tl.store(d_weight + gates, tl.sum(a * b, 1))
    e *= weight[:, None]
    target = (m * H + h) * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
    tl.store(d_scores + target, (b * e).to(d_scores.dtype.element_ty))
    a *= weight[:, None]
    tl.store(scores + target, a.to(scores.dtype.element_ty))
    # The gate after i scales what reads after i take of writes up to i. Sums of just these terms leave no noise at a
    # gate that forgets all, as differences of sums would.
    earlier = tl.cumsum(a * b, 0)
    tl.store(d_gate + gates, tl.sum(tl.where(at[None, :] > at[:, None], earlier, 0.0), 1))


@triton.jit
def gradient_kernel(
    x,
    y,
    z,
    u,
    other,
    own,
    factor,
    skip,
    out,
    row_sums,
    products,
    seq_start,
    chunk_start,
    chunk_seq,
    stride_x,
    stride_u,
    stride_own,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_X: tl.constexpr,
    GROUP_U: tl.constexpr,
    X: tl.constexpr,
    OUT: tl.constexpr,
    Y_INNER: tl.constexpr,
    Y_OUTER: tl.constexpr,
    Z_ROWS: tl.constexpr,
    Z_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    SKIP: tl.constexpr,
    ROW_SUMS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BX: tl.constexpr,
    BO: tl.constexpr,
):
    """Write out = sum factor (x y) + z u over the GROUP heads that share it, for one chunk and a block of channels.

    x, u and out have a row for each token; y is a state or its transpose, z a tile of pairs or its transpose. row_sums
    gets the rows of (x y) times those of own, products the sum of y times other; SKIP adds skip u.
    """
    OB: tl.constexpr = (OUT + BO - 1) // BO
    pid = tl.program_id(0)
    part = pid % OB
    columns = part * BO + tl.arange(0, BO)
    shared = pid // OB % (H // GROUP)
    m = (pid // (OB * (H // GROUP))).to(tl.int64)
    chunks = tl.num_programs(0) // (OB * (H // GROUP))
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, CHUNK)
    at = tl.arange(0, CHUNK)
    inner = tl.arange(0, BX)
    tokens = first + at
    real = tokens < end
    total = tl.zeros([CHUNK, BO], tl.float32)
    for member in range(GROUP):
        h = shared * GROUP + member
        left = tile(x + h // GROUP_X * X, tokens[:, None], inner[None, :], stride_x, real[:, None], X, BX)
        at_state = (m * H + h) * X * OUT
        state = state_tile(y + at_state, inner, columns, Y_INNER, Y_OUTER, X, OUT, BX, BO)
        pairs = tl.load(z + (m * H + h) * CHUNK * CHUNK + at[:, None] * Z_ROWS + at[None, :] * Z_COLUMNS)
        right = tile(u + h // GROUP_U * OUT, tokens[:, None], columns[None, :], stride_u, real[:, None], OUT, BO)
        raw = tl.dot(left.to(state.dtype), state, input_precision=PRECISION)
        if ROW_SUMS:
            mine = tile(own + h // GROUP * OUT, tokens[:, None], columns[None, :], stride_own, real[:, None], OUT, BO)
            tl.store(row_sums + ((part * chunks + m) * H + h) * CHUNK + at, tl.sum(raw * mine, 1))
        if PRODUCTS:
            second = state_tile(other + at_state, inner, columns, Y_INNER, Y_OUTER, X, OUT, BX, BO)
            product = tl.sum(tl.sum(state.to(tl.float32) * second.to(tl.float32), 1), 0)
            tl.store(products + (part * chunks + m) * H + h, product)
        total += raw * tl.load(factor + (m * H + h) * CHUNK + at)[:, None]
        total = tl.dot(pairs, right, total, input_precision=PRECISION)
        if SKIP:
            total += tl.load(skip + h) * right
    put_rows(out + shared * OUT, total, tokens, columns, H // GROUP * OUT, real, OUT)


@triton.jit
def gate_gradient_kernel(
    g,
    w,
    c,
    lead,
    d_weight,
    d_gate,
    read,
    written,
    products,
    dg,
    dw,
    seq_start,
    chunk_start,
    chunk_seq,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOOR: tl.constexpr,
    BH: tl.constexpr,
):
    """Gather dg and dw from row sums: read_t = q_t.(S do_t), written_i = k_i.(R v_i), products = sum of R S."""
    m = tl.program_id(0).to(tl.int64)
    chunks = tl.num_programs(0)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    at = tl.arange(0, CHUNK)
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, CHUNK)
    known = heads < H
    inside = known[None, :] & (at >= 0)[:, None]
    mask = known[None, :] & (first + at < end)[:, None]
    before = inside & (at > 0)[:, None]
    padded = (m * H + heads)[None, :] * CHUNK + at[:, None]
    tokens = (first + at)[:, None] * H + heads[None, :]
    last = tl.load(c + (m * H + heads) * CHUNK + CHUNK - 1, mask=known, other=0.0)
    sums = tl.load(c + padded, mask=inside, other=0.0)
    sums_before = tl.load(c + padded - 1, mask=before, other=0.0)
    taken, taken_before = tl.zeros([CHUNK, BH], tl.float32), tl.zeros([CHUNK, BH], tl.float32)
    across = tl.zeros([BH], tl.float32)
    reads = tl.zeros([CHUNK, BH], tl.float32)
    for part in tl.static_range(PARTS):
        shift = part * chunks.to(tl.int64) * H
        reads += tl.load(read + shift * CHUNK + padded, mask=inside, other=0.0)
        taken += tl.load(written + shift * CHUNK + padded, mask=inside, other=0.0)
        taken_before += tl.load(written + shift * CHUNK + padded - 1, mask=before, other=0.0)
        across += tl.load(products + shift + m * H + heads, mask=known, other=0.0)
    reads *= tl.load(lead + padded, mask=inside, other=0.0)
    weight_before = tl.load(w + tokens - H, mask=mask & before, other=0.0)
    earlier = taken_before * weight_before * tl.exp((last[None, :] - sums_before).to(tl.float32))
    total = tl.load(d_gate + padded - 1, mask=before, other=0.0) + (across * tl.exp(last.to(tl.float32)))[None, :]
    total += tl.cumsum(reads, 0, reverse=True) + tl.cumsum(earlier, 0)
    gate = tl.load(g + tokens, mask=mask, other=0.0)
    tl.store(dg + tokens, tl.where(gate >= FLOOR, total, 0.0), mask=mask)
    own = tl.load(d_weight + padded, mask=inside, other=0.0)
    tl.store(dw + tokens, own + taken * tl.exp((last[None, :] - sums).to(tl.float32)), mask=mask)
