"""The gated delta rule's forward kernels: the system of each chunk, the pass over the states, and the output.

They work on chunks of C tokens. G is the running sum of the log decays inside a chunk and E_ij = exp(G_i - G_j). In the
formulas q and k are normalised; the normalisation is a scalar a token, multiplied into small matrices.
Tiles that only kernels read are stored transposed where a dot wants them so, padded to the power of two above the
head's width, with zeros behind the last token: w [chunks,H,C,BK], u and V' [chunks,H,BV,C], and a chunk's scalars
[chunks,H,4,C]: G as two fp32 summands, exp(G_C - G) / |k|, and 1 / |k|. The states [chunks+N,H,BV,BK] are those before
each chunk and, behind those of its sequence, the one after the last.
"""

import triton
import triton.language as tl


@triton.jit
def locate(c, seq_start, chunk_start, chunk_seq, C: tl.constexpr):
    """Return the sequence of chunk c, the chunk's first token, and how many tokens are left of the sequence."""
    n = tl.load(chunk_seq + c)
    first = tl.load(seq_start + n) + (c - tl.load(chunk_start + n)).to(tl.int64) * C
    return n, first, tl.load(seq_start + n + 1) - first


@triton.jit
def in_rows(first, left, stride, head, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, at):
    """Return offsets into x [tokens,stride,D] of C tokens of one head, BD channels from at, and which of them exist."""
    i, d = tl.arange(0, C)[:, None], at + tl.arange(0, BD)[None, :]
    inside = i < left
    if BD > D or D & (D - 1):
        inside = inside & (d < D)
    return (first * stride + head) * D + (i * (stride * D) + d), inside


@triton.jit
def load_rows(x, first, left, stride, head, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, at=0):
    """Return those values, with zeros for what does not exist."""
    offsets, inside = in_rows(first, left, stride, head, D, BD, C, at)
    return tl.load(x + offsets, mask=inside, other=0.0)


@triton.jit
def store_rows(x, rows, first, left, stride, head, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, at=0):
    """Write those values."""
    offsets, inside = in_rows(first, left, stride, head, D, BD, C, at)
    tl.store(x + offsets, rows.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_tile(x, index, R: tl.constexpr, W: tl.constexpr):
    """Return tile number index of x [tiles,R,W]."""
    return tl.load(x + index * (R * W) + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :])


@triton.jit
def store_tile(x, tile, index, R: tl.constexpr, W: tl.constexpr):
    """Write tile number index of x [tiles,R,W]."""
    at = x + index * (R * W) + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    tl.store(at, tile.to(x.dtype.element_ty))


@triton.jit
def inverse_norm(rows):
    """Return 1 / |row| of [C,BD], as unit does."""
    rows = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(rows * rows, 1) + 1e-6)


@triton.jit
def decay_matrix(hi, lo, C: tl.constexpr):
    """Return E [C,C], zero above the diagonal, of G = hi + lo; the two summands keep small differences."""
    gap = (hi[:, None] - hi[None, :]) + (lo[:, None] - lo[None, :])
    return tl.exp(tl.where(tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :], gap, float("-inf")))


@triton.jit
def last(x, C: tl.constexpr):
    """Return the last element of x [C]."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
def join_blocks(x, a, i, j, size: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverses of the diagonal blocks twice as large as those whose inverses are in x."""
    joined = tl.where((i // (2 * size) == j // (2 * size)) & (i // size != j // size), a, 0.0)
    return x - tl.dot(tl.dot(x, joined, input_precision=PRECISION), x, input_precision=PRECISION)


@triton.jit
def inverse(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower triangular a [C,C] in fp32.

    With X the inverses of the diagonal blocks of size b, those of size 2b are X - X a' X, where a' is a inside the
    larger blocks and outside of the smaller ones. Every step is as stable as forward substitution. The first steps work
    on the diagonal alone, whose blocks of 16 fit a tensor-core instruction.
    """
    S: tl.constexpr = 16
    N: tl.constexpr = C // S
    own = tl.arange(0, N)[:, None, None, None] == tl.arange(0, N)[None, None, :, None]
    small = tl.sum(tl.where(own, tl.reshape(a, [N, S, N, S]), 0.0), 2)
    i, j = tl.arange(0, S)[None, :, None], tl.arange(0, S)[None, None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -small, 0.0))
    for level in tl.static_range(1, 4):
        x = join_blocks(x, small, i, j, 2**level, PRECISION)
    whole = tl.reshape(tl.where(own, x[:, :, None, :], 0.0), [C, C])
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for level in tl.static_range(4, 6):
        whole = join_blocks(whole, a, i, j, 2**level, PRECISION)
    return whole


@triton.jit
def prepare(
    k, v, g, beta, inverses, w, u, scalars, seq_start, chunk_start, chunk_seq, H, HK,
    SOLVE: tl.constexpr, KEEP: tl.constexpr, LOWEST: tl.constexpr, PRECISION: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: T = (I + tril(b k.k E, -1))^-1 (solved for, or read back), w = T (b e^G k), u = T (b v)."""
    pid = tl.program_id(0).to(tl.int64)
    c, h = pid // H, pid % H
    _, first, left = locate(c, seq_start, chunk_start, chunk_seq, C)
    i = tl.arange(0, C)
    at = first * H + h + i * H
    decay = tl.maximum(tl.load(g + at, mask=i < left, other=0.0), LOWEST, propagate_nan=tl.PropagateNan.ALL)
    total = tl.cumsum(decay.to(tl.float64), 0)  # one step that forgets at once leaves fp32 no digits for the others
    hi = total.to(tl.float32)
    lo = (total - hi.to(tl.float64)).to(tl.float32)
    b = tl.load(beta + at, mask=i < left, other=0.0)
    keys = load_rows(k, first, left, HK, h // (H // HK), DK, BK, C)
    norm = inverse_norm(keys)
    kept = norm * tl.exp((last(hi, C) - hi) + (last(lo, C) - lo))
    own = scalars + pid * (4 * C) + i
    tl.store(own, hi)
    tl.store(own + C, lo)
    tl.store(own + 2 * C, kept)
    tl.store(own + 3 * C, norm)
    if SOLVE:
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        system = products * (b * norm)[:, None] * norm[None, :] * decay_matrix(hi, lo, C)
        t = inverse(tl.where(i[:, None] > i[None, :], system, 0.0), C, PRECISION)
        if KEEP:
            store_tile(inverses, t, pid, C, C)
    else:
        t = load_tile(inverses, pid, C, C).to(tl.float32)
    read = (t * (b * norm * tl.exp(hi))[None, :]).to(keys.dtype)
    store_tile(w, tl.dot(read, keys, input_precision=PRECISION), pid, C, BK)
    write = tl.trans((t * b[None, :]).to(keys.dtype))
    for block in range(0, BV // TILE):
        values = load_rows(v, first, left, HK, h // (H // HK), DV, TILE, C, block * TILE)
        out = tl.dot(tl.trans(values), write, input_precision=PRECISION)
        store_tile(u, out, pid * (BV // TILE) + block, TILE, C)


@triton.jit
def scan_states(
    pid, k, w, u, scalars, initial, starts, corrected, final, seq_start, chunk_start, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Per sequence, head and TILE value channels, chunk by chunk: V' = u - w S, S <- e^G_C S + (e^(G_C - G) k)^T V'.

    The state is held transposed in registers, so that both products take it or what was just made of it as their left
    operand, which needs no way through shared memory.
    """
    blocks = BV // TILE
    row, first_channel = pid // blocks, (pid % blocks).to(tl.int32) * TILE
    n, h = row // H, row % H
    i = tl.arange(0, C)
    channel, key = first_channel + tl.arange(0, TILE)[:, None], tl.arange(0, BK)[None, :]
    inside = (channel < DV) & (key < DK)
    in_state = row * (DK * DV) + (key * DV + channel)
    if initial is None:
        state = tl.zeros([TILE, BK], tl.float32)
    else:
        state = tl.load(initial + in_state, mask=inside, other=0.0)
    begin, end = tl.load(seq_start + n), tl.load(seq_start + n + 1)
    start = tl.load(chunk_start + n)
    chunks = tl.load(chunk_start + n + 1) - start
    in_starts = channel * BK + key
    decay = scalars + (start.to(tl.int64) * H + h) * (4 * C) + C - 1
    coming = tl.load(decay, mask=chunks > 0, other=0.0)  # one step early, as a scalar's load is not pipelined
    for step in range(0, chunks):
        chunk = (start.to(tl.int64) + step) * H + h
        first = begin + step * C
        decay += H * (4 * C)
        passing, coming = coming, tl.load(decay, mask=step + 1 < chunks, other=0.0)
        in_tile = chunk * (BV * C) + (channel * C + i[None, :])
        before = starts + ((start.to(tl.int64) + n + step) * H + h) * (BV * BK)
        tl.store(before + in_starts, state.to(starts.dtype.element_ty))
        reads = load_tile(w, chunk, C, BK)
        keys = load_rows(k, first, end - first, HK, h // (H // HK), DK, BK, C)
        new = tl.load(u + in_tile).to(tl.float32)
        new -= tl.dot(state.to(reads.dtype), tl.trans(reads), input_precision=PRECISION)
        tl.store(corrected + in_tile, new.to(corrected.dtype.element_ty))
        kept = tl.load(scalars + chunk * (4 * C) + 2 * C + i)
        state *= tl.exp(passing)
        state = tl.dot((new * kept[None, :]).to(keys.dtype), keys, state, input_precision=PRECISION)
    after = starts + ((start + chunks + n) * H + h) * (BV * BK)
    tl.store(after + in_starts, state.to(starts.dtype.element_ty))
    if final is not None:
        tl.store(final + in_state, state, mask=inside)


@triton.jit
def scan(
    k, w, u, scalars, initial, starts, corrected, final, seq_start, chunk_start, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """scan_states as a kernel."""
    scan_states(
        tl.program_id(0).to(tl.int64), k, w, u, scalars, initial, starts, corrected, final, seq_start, chunk_start,
        H, HK, PRECISION, DK, DV, BK, BV, C, TILE,
    )  # fmt: skip


@triton.jit
def read_out(
    q, k, scalars, starts, corrected, o, scale, seq_start, chunk_start, chunk_seq, H, HK,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: o = scale (e^G q S + tril(q.k E) V'), in blocks of TILE value channels."""
    pid = tl.program_id(0).to(tl.int64)
    c, h = pid // H, pid % H
    n, first, left = locate(c, seq_start, chunk_start, chunk_seq, C)
    i = tl.arange(0, C)
    own = scalars + pid * (4 * C) + i
    hi, lo, norm = tl.load(own), tl.load(own + C), tl.load(own + 3 * C)
    queries = load_rows(q, first, left, H, h, DK, BK, C)
    keys = load_rows(k, first, left, HK, h // (H // HK), DK, BK, C)
    weight = inverse_norm(queries) * scale
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores *= weight[:, None] * norm[None, :] * decay_matrix(hi, lo, C)
    scores = scores.to(queries.dtype)
    weight *= tl.exp(hi)
    for block in range(0, BV // TILE):
        state = load_tile(starts, (pid + n * H) * (BV // TILE) + block, TILE, BK)
        new = load_tile(corrected, pid * (BV // TILE) + block, TILE, C)
        out = tl.dot(queries, tl.trans(state), input_precision=PRECISION) * weight[:, None]
        out = tl.dot(scores, tl.trans(new), out, input_precision=PRECISION)
        store_rows(o, out, first, left, H, h, DV, TILE, C, block * TILE)
