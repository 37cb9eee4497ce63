"""The gated delta rule's backward kernels: what each chunk needs, the reverse pass over the states, and the gradients.

Layouts and symbols are those of the forward kernels, which run again first and leave w, u, V' and the states. S is the
state before a chunk, S' the one after it, d_x the gradient of x. A gate's running sum G reaches the output through e^G
q, e^G k, e^-G k and S' alone, so its gradient is that of each of these times itself.
"""

import triton
import triton.language as tl

from hybridize.kernels.gdn.triton_forward import (
    decay_matrix,
    inverse_norm,
    last,
    load_rows,
    load_tile,
    locate,
    scan_states,
    store_rows,
    store_tile,
)


@triton.jit
def local_gradients(
    q, k, d_o, scalars, d_local, reads, scale, seq_start, chunk_start, chunk_seq, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Per chunk and head, what the reverse pass needs: scale e^G q, and the chunk's own part of d_V' [BV,C]."""
    pid = tl.program_id(0).to(tl.int64)
    c, h = pid // H, pid % H
    _, first, left = locate(c, seq_start, chunk_start, chunk_seq, C)
    own = scalars + pid * (4 * C) + tl.arange(0, C)
    hi, lo, norm = tl.load(own), tl.load(own + C), tl.load(own + 3 * C)
    queries = load_rows(q, first, left, H, h, DK, BK, C)
    keys = load_rows(k, first, left, HK, h // (H // HK), DK, BK, C)
    weight = inverse_norm(queries) * scale
    store_tile(reads, queries.to(tl.float32) * (weight * tl.exp(hi))[:, None], pid, C, BK)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = (scores * weight[:, None] * norm[None, :] * decay_matrix(hi, lo, C)).to(queries.dtype)
    for block in range(0, BV // TILE):
        given = load_rows(d_o, first, left, H, h, DV, TILE, C, block * TILE)
        part = tl.dot(tl.trans(given), scores, input_precision=PRECISION)
        store_tile(d_local, part, pid * (BV // TILE) + block, TILE, C)


@triton.jit
def query_gradients(
    q, k, d_o, scalars, starts, corrected, d_q, d_gate, d_scores, scale, seq_start, chunk_start, chunk_seq, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: d_q, d_gate = q.d_q [chunks,H,C], and d_scores = tril(d_o V'^T) E scale / |q|."""
    pid = tl.program_id(0).to(tl.int64)
    c, h = pid // H, pid % H
    n, first, left = locate(c, seq_start, chunk_start, chunk_seq, C)
    i = tl.arange(0, C)
    own = scalars + pid * (4 * C) + i
    d_products = tl.zeros([C, C], tl.float32)
    d_query = tl.zeros([C, BK], tl.float32)
    for block in range(0, BV // TILE):
        tile = pid * (BV // TILE) + block
        state_tile = (pid + n * H) * (BV // TILE) + block
        given = load_rows(d_o, first, left, H, h, DV, TILE, C, block * TILE)
        d_products = tl.dot(given, load_tile(corrected, tile, TILE, C), d_products, input_precision=PRECISION)
        d_query = tl.dot(given, load_tile(starts, state_tile, TILE, BK), d_query, input_precision=PRECISION)
    queries = load_rows(q, first, left, H, h, DK, BK, C)
    query_norm = inverse_norm(queries)
    hi, lo, norm = tl.load(own), tl.load(own + C), tl.load(own + 3 * C)
    d_products *= decay_matrix(hi, lo, C) * scale
    store_tile(d_scores, d_products * query_norm[:, None], pid, C, C)
    keys = load_rows(k, first, left, HK, h // (H // HK), DK, BK, C)
    d_products = (d_products * norm[None, :]).to(keys.dtype)
    d_query = tl.dot(d_products, keys, d_query * (scale * tl.exp(hi))[:, None], input_precision=PRECISION)
    unit = queries.to(tl.float32) * query_norm[:, None]
    along = tl.sum(unit * d_query, 1)
    tl.store(d_gate + pid * C + i, along)
    store_rows(d_q, (d_query - unit * along[:, None]) * query_norm[:, None], first, left, H, h, DK, BK, C)


@triton.jit
def scan_back(
    pid, k, d_o, w, reads, scalars, d_local, d_final, d_after, d_corrected, d_initial, seq_start, chunk_start, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Per sequence, head and TILE value channels, last chunk first: d_V' = its own part + e^(G_C - G) k d_S'.

    Then d_S = e^G_C d_S' + (scale e^G q)^T d_o - w^T d_V'. The gradient is held transposed, as the state is in scan.
    """
    blocks = BV // TILE
    row, first_channel = pid // blocks, (pid % blocks).to(tl.int32) * TILE
    n, h = row // H, row % H
    i = tl.arange(0, C)
    channel, key = first_channel + tl.arange(0, TILE)[:, None], tl.arange(0, BK)[None, :]
    inside = (channel < DV) & (key < DK)
    in_state = row * (DK * DV) + (key * DV + channel)
    d_state = tl.load(d_final + in_state, mask=inside, other=0.0)
    begin, end = tl.load(seq_start + n), tl.load(seq_start + n + 1)
    chunks = tl.load(chunk_start + n + 1) - tl.load(chunk_start + n)
    stop = tl.load(chunk_start + n + 1).to(tl.int64)
    decay = scalars + ((stop - 1) * H + h) * (4 * C) + C - 1
    coming = tl.load(decay, mask=chunks > 0, other=0.0)
    for step in range(0, chunks):
        chunk = (stop - 1 - step) * H + h
        first = begin + (chunks - 1 - step) * C
        decay -= H * (4 * C)
        passing, coming = coming, tl.load(decay, mask=step + 1 < chunks, other=0.0)
        in_tile = chunk * (BV * C) + (channel * C + i[None, :])
        tl.store(d_after + chunk * (BV * BK) + (channel * BK + key), d_state.to(d_after.dtype.element_ty))
        keys = load_rows(k, first, end - first, HK, h // (H // HK), DK, BK, C)
        queries = load_tile(reads, chunk, C, BK)
        writes = load_tile(w, chunk, C, BK)
        given = load_rows(d_o, first, end - first, H, h, DV, TILE, C, first_channel)
        kept = tl.load(scalars + chunk * (4 * C) + 2 * C + i)
        d_new = tl.dot(d_state.to(keys.dtype), tl.trans(keys), input_precision=PRECISION) * kept[None, :]
        d_new += tl.load(d_local + in_tile).to(tl.float32)
        tl.store(d_corrected + in_tile, d_new.to(d_corrected.dtype.element_ty))
        d_state *= tl.exp(passing)
        d_state = tl.dot(tl.trans(given), queries, d_state, input_precision=PRECISION)
        d_state = tl.dot((-d_new).to(writes.dtype), writes, d_state, input_precision=PRECISION)
    if d_initial is not None:
        tl.store(d_initial + in_state, d_state, mask=inside)


@triton.jit
def scan_both_ways(
    k, w, u, scalars, initial, starts, corrected,
    d_o, reads, d_local, d_final, d_after, d_corrected, d_initial,
    rows, seq_start, chunk_start, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The forward scan again, for its states, in half of the programs, and scan_back in the other half.

    Neither needs what the other writes, and each alone leaves most of a GPU idle when there are few sequences.
    """
    pid = tl.program_id(0).to(tl.int64)
    programs = rows * (BV // TILE)
    if pid < programs:
        scan_states(
            pid, k, w, u, scalars, initial, starts, corrected, None, seq_start, chunk_start, H, HK,
            PRECISION, DK, DV, BK, BV, C, TILE,
        )  # fmt: skip
    else:
        scan_back(
            pid - programs, k, d_o, w, reads, scalars, d_local, d_final, d_after, d_corrected, d_initial,
            seq_start, chunk_start, H, HK, PRECISION, DK, DV, BK, BV, C, TILE,
        )  # fmt: skip


@triton.jit
def system_gradients(
    k, v, beta, scalars, inverses, w, u, starts, d_corrected, d_v, d_beta, d_system, d_grown, d_gate_key,
    seq_start, chunk_start, chunk_seq, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: what passes through w = T (b e^G k), u = T (b v) and T.

    With X = T^T d_w and Y = T^T d_u, the system's gradient is d_A = -tril(Y u^T + X w^T, -1), and d_system is d_A E.
    d_v [tokens,H,Dv] is still to be summed over the heads that share a key head; d_grown times b is what reaches k
    through e^G k, and d_gate_key is k times that.
    """
    pid = tl.program_id(0).to(tl.int64)
    c, h = pid // H, pid % H
    n, first, left = locate(c, seq_start, chunk_start, chunk_seq, C)
    i = tl.arange(0, C)
    at = first * H + h + i * H
    b = tl.load(beta + at, mask=i < left, other=0.0)
    turned = tl.trans(load_tile(inverses, pid, C, C))
    d_b = tl.zeros([C], tl.float32)
    from_u = tl.zeros([C, C], tl.float32)
    minus_d_w = tl.zeros([C, BK], tl.float32)
    for block in range(0, BV // TILE):
        tile = pid * (BV // TILE) + block
        state_tile = (pid + n * H) * (BV // TILE) + block
        d_u = tl.trans(load_tile(d_corrected, tile, TILE, C))
        y = tl.dot(turned, d_u, input_precision=PRECISION)
        store_rows(d_v, y * b[:, None], first, left, H, h, DV, TILE, C, block * TILE)
        values = load_rows(v, first, left, HK, h // (H // HK), DV, TILE, C, block * TILE)
        d_b += tl.sum(y * values.to(tl.float32), 1)
        from_u = tl.dot(y.to(d_u.dtype), load_tile(u, tile, TILE, C), from_u, input_precision=PRECISION)
        minus_d_w = tl.dot(d_u, load_tile(starts, state_tile, TILE, BK), minus_d_w, input_precision=PRECISION)
    minus_x = tl.dot(turned, minus_d_w.to(turned.dtype), input_precision=PRECISION)
    writes = load_tile(w, pid, C, BK)
    from_w = tl.dot(minus_x.to(turned.dtype), tl.trans(writes), input_precision=PRECISION)
    own = scalars + pid * (4 * C) + i
    hi, lo, norm = tl.load(own), tl.load(own + C), tl.load(own + 3 * C)
    d_a = tl.where(i[:, None] > i[None, :], (from_w - from_u) * decay_matrix(hi, lo, C), 0.0)
    store_tile(d_system, d_a, pid, C, C)

    keys = load_rows(k, first, left, HK, h // (H // HK), DK, BK, C)
    grown = tl.dot((d_a * norm[None, :]).to(keys.dtype), keys, input_precision=PRECISION)
    grown -= minus_x * tl.exp(hi)[:, None]
    store_tile(d_grown, grown, pid, C, BK)
    along = tl.sum(grown * keys.to(tl.float32), 1) * norm
    tl.store(d_beta + at, d_b + along, mask=i < left)
    tl.store(d_gate_key + pid * C + i, along * b)


@triton.jit
def key_gradients(
    q, k, g, beta, scalars, starts, corrected, d_after, d_scores, d_system, d_grown, d_gate_key, d_gate, d_k, d_g,
    seq_start, chunk_start, chunk_seq, H, HK,
    LOWEST: tl.constexpr, PRECISION: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: d_k [tokens,H,D], still to be summed over the heads that share a key head, and d_g."""
    pid = tl.program_id(0).to(tl.int64)
    c, h = pid // H, pid % H
    n, first, left = locate(c, seq_start, chunk_start, chunk_seq, C)
    i = tl.arange(0, C)
    own = scalars + pid * (4 * C) + i
    hi, lo, norm = tl.load(own), tl.load(own + C), tl.load(own + 3 * C)
    at = first * H + h + i * H
    b = tl.load(beta + at, mask=i < left, other=0.0)

    product = tl.zeros([BK], tl.float32)  # d_S'.S', which is what reaches the last running sum as well
    shrunk = tl.zeros([C, BK], tl.float32)  # what reaches k through e^-G k
    for block in range(0, BV // TILE):
        tile = pid * (BV // TILE) + block
        state_tile = (pid + (n + 1) * H) * (BV // TILE) + block
        after = load_tile(d_after, tile, TILE, BK)
        product += tl.sum(load_tile(starts, state_tile, TILE, BK).to(tl.float32) * after.to(tl.float32), 0)
        new = tl.trans(load_tile(corrected, tile, TILE, C))
        shrunk = tl.dot(new, after, shrunk, input_precision=PRECISION)
    shrunk *= tl.exp((last(hi, C) - hi) + (last(lo, C) - lo))[:, None]
    d_key = shrunk + load_tile(d_grown, pid, C, BK).to(tl.float32) * b[:, None]
    queries = load_rows(q, first, left, H, h, DK, BK, C)
    d_key = tl.dot(tl.trans(load_tile(d_scores, pid, C, C)), queries, d_key, input_precision=PRECISION)
    keys = load_rows(k, first, left, HK, h // (H // HK), DK, BK, C)
    d_a = load_tile(d_system, pid, C, C).to(tl.float32) * (b * norm)[:, None]
    d_key = tl.dot(tl.trans(d_a.to(keys.dtype)), keys, d_key, input_precision=PRECISION)
    unit = keys.to(tl.float32) * norm[:, None]
    along = tl.sum(unit * d_key, 1)
    store_rows(d_k, (d_key - unit * along[:, None]) * norm[:, None], first, left, H, h, DK, BK, C)

    grown = tl.load(d_gate_key + pid * C + i)  # k times what reaches it through e^G k; the rest of along is by e^-G k
    d_sum = tl.load(d_gate + pid * C + i) + 2 * grown - along + tl.where(i == C - 1, tl.sum(product, 0), 0.0)
    decay = tl.load(g + at, mask=i < left, other=0.0)
    d_decay = tl.where(decay >= LOWEST, tl.cumsum(d_sum, 0, reverse=True), 0.0)
    tl.store(d_g + at, d_decay, mask=i < left)
