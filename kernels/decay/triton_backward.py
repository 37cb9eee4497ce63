"""Triton: linear attention with a scalar decay per head, backward.

With E_ti = e^(c_t - c_i) for i <= t, A = scale q k^T, B = do v^T, S the state before a chunk and R the gradient of the
state after it:
dv_i = sum_t A E w do_t + kept_i R^T k_i, dk_i = sum_t scale B E w q_t + kept_i R v_i,
dq_t = sum_i scale B E w k_i + lead_t S do_t, dw_i = sum_t A B E + e^(c_C - c_i) k_i.(R v_i), and dg_t is what all pairs
on the two sides of t have in common: writes before t with reads from t on, with R, and S with both.
"""

import triton
import triton.language as tl

from hybridize.kernels.decay.triton_kernels import chunk_tokens, in_two, put_rows, state_tile, tile


@triton.jit
def shared_sum(total, part, h, GROUP: tl.constexpr):
    """Add part to the sum over the GROUP heads that share a tensor; the first of them starts it."""
    if GROUP == 1:
        return part
    return tl.where(h % GROUP == 0, 0.0, total) + part


@triton.jit
def gradient_kernel(
    q,
    k,
    v,
    g,
    w,
    d_o,
    skip,
    c,
    lead,
    states,
    d_states,
    dq,
    dk,
    dv,
    dg,
    dw,
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
    GROUP: tl.constexpr,
    GROUP_Q: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUP_V: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
    SKIP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Write all gradients of one chunk and GROUP heads, a multiple of the heads that share q, k or v."""
    pid = tl.program_id(0)
    m = (pid // (H // GROUP)).to(tl.int64)
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, CHUNK)
    at = tl.arange(0, CHUNK)
    rows, columns = tl.arange(0, BK), tl.arange(0, BV)
    tokens = first + at
    real = tokens < end
    dq_sum, dk_sum = tl.zeros([CHUNK, BK], tl.float32), tl.zeros([CHUNK, BK], tl.float32)
    dv_sum = tl.zeros([CHUNK, BV], tl.float32)
    for member in range(GROUP):
        h = pid % (H // GROUP) * GROUP + member
        queries = tile(q + h // GROUP_Q * K, tokens[:, None], rows[None, :], stride_q, real[:, None], K, BK)
        keys = tile(k + h // GROUP_K * K, tokens[:, None], rows[None, :], stride_k, real[:, None], K, BK)
        values = tile(v + h // GROUP_V * V, tokens[:, None], columns[None, :], stride_v, real[:, None], V, BV)
        grads = tile(d_o + h * V, tokens[:, None], columns[None, :], stride_do, real[:, None], V, BV)
        gates = (m * H + h) * CHUNK
        sums, last = tl.load(c + gates + at), tl.load(c + gates + CHUNK - 1)
        weight = tl.load(w + tokens * H + h, mask=real, other=0.0)
        rest = tl.exp((last - sums).to(tl.float32))
        high, low = in_two(sums)

        # Tiles [i,t] with the writes i as rows, so that scores come from registers in two of their three products.
        gap = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
        e = tl.exp(tl.where(at[None, :] >= at[:, None], gap, float("-inf"))) * scale
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * e
        d_scores = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
        if SKIP:
            own = tl.where(at[None, :] == at[:, None], d_scores, 0.0)
            tl.store(d_skip + m * H + h, tl.sum(tl.sum(own, 1), 0))
        pairs = scores * d_scores
        d_weight = tl.sum(pairs, 1)
        crossing = tl.where(at[None, :] > at[:, None], pairs * weight[:, None], 0.0)
        d_sums = tl.sum(crossing, 0) - tl.sum(crossing, 1)
        scores = (scores * weight[:, None]).to(grads.dtype)
        d_scores = (d_scores * e * weight[:, None]).to(queries.dtype)

        r = state_tile(d_states + (m * H + h) * K * V, rows, columns, V, 1, K, V)
        dv_own = tl.dot(keys.to(r.dtype), r, input_precision=PRECISION) * (rest * weight)[:, None]
        dv_own = tl.dot(scores, grads, dv_own, input_precision=PRECISION)
        if SKIP:
            dv_own += tl.load(skip + h) * grads
        dv_sum = shared_sum(dv_sum, dv_own, h, GROUP_V)
        if h % GROUP_V == GROUP_V - 1:
            put_rows(dv + h // GROUP_V * V, dv_sum, tokens, columns, H // GROUP_V * V, real, V)

        dk_own = tl.dot(values.to(r.dtype), tl.trans(r), input_precision=PRECISION)
        survivors = tl.sum(dk_own * keys, 1) * rest
        dk_own = tl.dot(d_scores, queries, dk_own * (rest * weight)[:, None], input_precision=PRECISION)
        dk_sum = shared_sum(dk_sum, dk_own, h, GROUP_K)
        if h % GROUP_K == GROUP_K - 1:
            put_rows(dk + h // GROUP_K * K, dk_sum, tokens, rows, H // GROUP_K * K, real, K)

        s = state_tile(states + (m * H + h) * K * V, rows, columns, V, 1, K, V)
        r = state_tile(d_states + (m * H + h) * K * V, rows, columns, V, 1, K, V)
        across = tl.sum(tl.sum(r.to(tl.float32) * s.to(tl.float32), 1), 0) * tl.exp(last.to(tl.float32))
        dq_own = tl.dot(grads.to(s.dtype), tl.trans(s), input_precision=PRECISION)
        dq_own *= tl.load(lead + gates + at)[:, None]
        d_sums += tl.sum(dq_own * queries, 1)
        dq_own = tl.dot(tl.trans(d_scores), keys, dq_own, input_precision=PRECISION)
        dq_sum = shared_sum(dq_sum, dq_own, h, GROUP_Q)
        if h % GROUP_Q == GROUP_Q - 1:
            put_rows(dq + h // GROUP_Q * K, dq_sum, tokens, rows, H // GROUP_Q * K, real, K)

        d_weight += survivors
        # Sums over earlier writes and over later reads, without differences: a gate that forgets all gets no noise.
        earlier = tl.where(at[:, None] < at[None, :], (survivors * weight)[:, None], 0.0)
        d_gate = tl.cumsum(d_sums, 0, reverse=True) + tl.sum(earlier, 0) + across
        gate = tl.load(g + tokens * H + h, mask=real, other=0.0)
        tl.store(dg + tokens * H + h, tl.where(gate >= FLOOR, d_gate, 0.0), mask=real)
        tl.store(dw + tokens * H + h, d_weight, mask=real)
