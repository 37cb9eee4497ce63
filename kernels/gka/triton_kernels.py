"""Triton: the Chebyshev solve of gka for all tokens of a chunk; the formulas are those of solve.py.

Keys are rescaled to length 1 (u), and w to w |k|^2, so that E/||H|| <= 1 and all operands fit fp16. The iterates are
those of the system divided by its norm, on right-hand sides of length about 1; H0 comes divided by its own norm.
"""

import triton
import triton.language as tl

from hybridize.kernels.decay.triton_kernels import chunk_tokens, in_two


@triton.jit
def load_rows(x, rows, columns, stride, end, D: tl.constexpr):
    """Load rows of x [tokens,...] as fp32; zeros from token end on and from column D on."""
    mask = (rows < end)[:, None] & (columns < D)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, value, rows, columns, stride, end, D: tl.constexpr):
    """Store value as rows of x."""
    mask = (rows < end)[:, None] & (columns < D)[None, :]
    tl.store(x + rows[:, None] * stride + columns[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def inverse_or_0(x):
    """Return 1/x, and 0 where x is 0 or so small that 1/x is infinite."""
    usable = x > 1e-37
    return tl.where(usable, 1 / tl.where(usable, x, 1.0), 0.0)


@triton.jit
def lengths(x):
    """Return the lengths of the rows of x and their inverses, 0 for zero rows; no square under- or overflows."""
    largest = tl.max(tl.abs(x), 1)
    x = x * inverse_or_0(largest)[:, None]
    length = tl.sqrt(tl.sum(x * x, 1)) * largest
    return length, inverse_or_0(length)


@triton.jit
def load_operand(x, rows, columns, stride, end, D: tl.constexpr):
    """Load rows of x [tokens,...] in their dtype; zeros from token end on and from column D on."""
    mask = (rows < end)[:, None] & (columns < D)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def direction_kernel(k, u, length, total, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Split the rows of k [total,D] into u of length 1, zero for zero rows, and their lengths."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BD)
    keys = load_rows(k, rows, columns, D, total, D)
    size, inverse = lengths(keys)
    store_rows(u, keys * inverse[:, None], rows, columns, D, total, D)
    tl.store(length + rows, size, mask=rows < total)


@triton.jit
def load_state(h, columns, D: tl.constexpr):
    """Return the state h [D,D] as fp32."""
    mask = (columns < D)[:, None] & (columns < D)[None, :]
    return tl.load(h + columns[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def frobenius(state):
    """Return the Frobenius norm of a state; no square under- or overflows."""
    largest = tl.max(tl.abs(state))
    state = state * inverse_or_0(largest)
    return tl.sqrt(tl.sum(state * state)) * largest


@triton.jit
def decays(g, rows, end, H: tl.constexpr, FLOOR: tl.constexpr):
    """Return F_ti = e^(c_t - c_i), lower triangular, and d_t = e^(c_t) of the log decays g in a chunk."""
    decay = tl.load(g + rows * H, mask=rows < end, other=0.0)
    c = tl.cumsum(tl.where(decay < FLOOR, FLOOR, decay).to(tl.float64), 0)
    high, low = in_two(c)
    gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(rows[:, None] >= rows[None, :], tl.exp(gap), 0.0), tl.exp(c.to(tl.float32))


@triton.jit
def gram_norms(gram, quadratic, e, d, size, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return e / ||H_t||, d size / ||H_t|| and 1/||H_t|| (0 for H_t = 0) from u u^T, u^T H0 u and e = F w |k|^2."""
    largest = tl.maximum(d * size, tl.max(e, 1))
    row = inverse_or_0(largest)
    e, d = e * row[:, None], d * size * row
    mixed = tl.dot(e.to(DTYPE), (gram * gram).to(DTYPE), input_precision=PRECISION)
    total = d * d * tl.where(size > 0, 1.0, 0.0) + 2 * d * tl.sum(e * quadratic[None, :], 1) + tl.sum(mixed * e, 1)
    root = tl.sqrt(tl.maximum(total, 0.0))
    inverse = tl.where(root * largest > 1e-32, inverse_or_0(root), 0.0)
    return e * inverse[:, None], d * inverse, row * inverse


@triton.jit
def pack(x, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Round x to DTYPE; PACKED puts two fp16 into one int32, since the compiler gives each a register of its own."""
    if PACKED:
        low, high = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return x.to(DTYPE)


@triton.jit
def unpack(x, varying, PACKED: tl.constexpr):
    """Return in fp32 what pack has stored; varying keeps the compiler from unpacking once, before a loop."""
    if PACKED:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,r,f",
            [x, varying],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return tl.reshape(tl.join(low, high), [x.shape[0], x.shape[1] * 2])
    else:
        return x.to(tl.float32)


@triton.jit
def chebyshev(
    rhs,
    u,
    h,
    e,
    row,
    rest,
    rho4,
    ITERS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return x after ITERS times x <- omega (rhs + rest x - step H x) + (1 - omega) before; -step is in e and row.

    Registers are what this loop is short of: only x is fp32, and unrolling makes the compiler spill.
    """
    u_t = tl.trans(u)
    x = rhs.to(tl.float32)
    if PACKED:
        # Multiplying by I brings x into the layout of a product once, instead of in every iteration.
        columns = tl.arange(0, u.shape[1])
        x = tl.dot(rhs, (columns[:, None] == columns[None, :]).to(DTYPE))
    rhs = pack(x, DTYPE, PACKED)
    before = tl.zeros_like(rhs)
    omega = 2.0
    for _ in range(ITERS):
        omega = 1 / (1 - rho4 * omega)
        a = x.to(DTYPE)
        after = pack(x, DTYPE, PACKED)
        scores = tl.dot(a, u_t, input_precision=PRECISION)
        scores = (scores * omega).to(DTYPE) * e
        x = unpack(after, omega, PACKED) * rest + unpack(rhs, omega, PACKED)
        x = unpack(before, omega, PACKED) * (1 - omega) + x * omega
        x = tl.dot(scores, u, x, input_precision=PRECISION)
        x = tl.dot(a * (row * omega).to(DTYPE)[:, None], h, x, input_precision=PRECISION)
        before = after
    return x


@triton.jit
def unit_gradient(x, d_y, EPS: tl.constexpr):
    """Return the gradient of x whose row over (its length + EPS) has the gradient d_y."""
    length, inverse = lengths(x)
    factor = 1 / (length + EPS)
    along = tl.sum(x * inverse[:, None] * d_y, 1) * length * factor
    return (d_y - x * (inverse * along)[:, None]) * factor[:, None]


@triton.jit
def unit_kernel(x, out, d_out, total, D: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Divide the rows of x [total,D] by their length + EPS, or with d_out, turn the gradient of that into x's."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BD)
    value = load_rows(x, rows, columns, D, total, D)
    if d_out is None:
        value *= (1 / (lengths(value)[0] + EPS))[:, None]
    else:
        value = unit_gradient(value, load_rows(d_out, rows, columns, D, total, D), EPS)
    store_rows(out, value, rows, columns, D, total, D)


@triton.jit
def solve_kernel(
    rhs,
    u,
    length,
    g,
    w,
    alpha,
    h,
    sizes,
    x,
    inverse,
    out,
    out_low,
    rho,
    quadratic,
    through,
    product,
    seq_start,
    chunk_start,
    chunk_seq,
    step,
    rest,
    rho4,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ITERS: tl.constexpr,
    FLOOR: tl.constexpr,
    EPS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Solve the systems of a chunk and head.

    rhs [tokens,H,D], u = k / |k| [tokens,H/GROUP,D] and length = |k|, gates [tokens,H], h [chunks,H,D,D].
    Forward: rhs is q; writes x times ||H|| [tokens,H,D], inverse = 1/||H||, sizes = ||h|| and out = q + alpha (x - q)
    for q of length 1, and to out_low, if given, what rounding took off out.
    BACKWARD: rhs is the gradient of out and the right-hand sides are alpha rhs; writes to out their solutions z, times
    ||H|| and divided by the length of alpha rhs, that length / ||H|| to rho, and [tokens,H] quadratic = u.h u and
    through = z.h x of h divided by its norm, and product = z.x.
    """
    C: tl.constexpr = 64
    m = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0) % H
    first, end = chunk_tokens(m, seq_start, chunk_start, chunk_seq, C)
    rows = first + tl.arange(0, C)
    columns = tl.arange(0, BD)
    width: tl.constexpr = H * D
    u = load_operand(u + head // GROUP * D, rows, columns, H // GROUP * D, end, D)
    u_t = tl.trans(u)
    start = load_state(h + (m * H + head) * D * D, columns, D)
    if BACKWARD:
        size = tl.load(sizes + m * H + head)
    else:
        size = frobenius(start)
        tl.store(sizes + m * H + head, size)
    h0 = (start * inverse_or_0(size)).to(DTYPE)
    by_key = tl.sum(tl.dot(u, h0, input_precision=PRECISION) * u.to(tl.float32), 1)
    gram = tl.dot(u, u_t, input_precision=PRECISION)
    e, d = decays(g + head, rows, end, H, FLOOR)
    key_size = tl.load(length + rows * (H // GROUP) + head // GROUP, mask=rows < end, other=0.0)
    e *= (tl.load(w + rows * H + head, mask=rows < end, other=0.0) * key_size * key_size)[None, :]
    e, d, norm = gram_norms(gram, by_key, e, d, size, DTYPE, PRECISION)
    e = (e * -step).to(DTYPE)
    row = d * -step

    b = load_rows(rhs + head * D, rows, columns, width, end, D)
    if BACKWARD:
        b *= tl.load(alpha + rows * H + head, mask=rows < end, other=0.0)[:, None]
        size_rhs, norm_rhs = lengths(b)
        tl.store(rho + rows * H + head, size_rhs * norm, mask=rows < end)
        tl.store(quadratic + rows * H + head, by_key, mask=rows < end)
        b *= norm_rhs[:, None]
    else:
        tl.store(inverse + rows * H + head, norm, mask=rows < end)
        b *= (1 / (lengths(b)[0] + EPS))[:, None]
    y = chebyshev((b * step).to(DTYPE), u, h0, e, row, rest, rho4, ITERS, DTYPE, PRECISION, PACKED)

    if BACKWARD:
        store_rows(out + head * D, y, rows, columns, width, end, D)
        from_start = tl.dot(y.to(DTYPE), h0, input_precision=PRECISION)
        solved = load_rows(x + head * D, rows, columns, width, end, D)
        tl.store(product + rows * H + head, tl.sum(y * solved, 1), mask=rows < end)
        tl.store(through + rows * H + head, tl.sum(from_start * solved, 1), mask=rows < end)
    else:
        tl.debug_barrier()  # what follows reads norm back rather than hold it over the loop
        mix = tl.load(alpha + rows * H + head, mask=rows < end, other=0.0)
        norm = tl.load(inverse + rows * H + head, mask=rows < end, other=0.0)
        query = load_rows(rhs + head * D, rows, columns, width, end, D)
        unit = query * (1 / (lengths(query)[0] + EPS))[:, None]
        store_rows(x + head * D, y, rows, columns, width, end, D)
        mixed = unit * (1 - mix)[:, None] + y * (mix * norm)[:, None]
        store_rows(out + head * D, mixed, rows, columns, width, end, D)
        if out_low is not None:
            mixed -= mixed.to(out.dtype.element_ty).to(tl.float32)
            store_rows(out_low + head * D, mixed, rows, columns, width, end, D)
