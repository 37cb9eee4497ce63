"""The kernels on a CUDA device, against the naive forms in fp64 on the CPU."""

import pytest
import torch
from kernel_cases import OPS, assert_close, call, make_inputs, make_state

from hybridize.kernels.short_conv import short_conv
from hybridize.kernels.swa import chunk_swa, naive_swa

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_device(tensors, dtype=torch.float32):
    """Move a dict or tuple of tensors to the device, leaf by leaf."""
    if isinstance(tensors, dict):
        return {n: x.to("cuda", dtype).requires_grad_() for n, x in tensors.items()}
    return None if tensors is None else tuple(x.to("cuda", dtype).requires_grad_() for x in tensors)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("gate", ["usual", "mixed"])
@pytest.mark.parametrize("bounds", [None, [0, 70, 70, 71, 300]])
def test_forms(name, gate, bounds):
    rows = 2 if bounds is None else len(bounds) - 1
    inputs, state = make_inputs(name, 1 if bounds else 2, 300, gate=gate, dim=64), make_state(name, rows, dim=64)
    packed = None if bounds is None else torch.tensor(bounds)
    expected = call(OPS[name].naive, inputs, state, cu_seqlens=packed)
    for form in (OPS[name].chunk, OPS[name].recurrent, OPS[name].naive):
        given = None if packed is None else packed.cuda()
        found = call(form, on_device(inputs), on_device(state), cu_seqlens=given)
        assert_close([x.cpu() for x in found], expected, OPS[name].fp32)


@pytest.mark.parametrize("name", OPS)
def test_gradients(name):
    inputs, state = make_inputs(name, 2, 200, dim=32), make_state(name, 2, dim=32)
    grads = []
    for move in (lambda x: {n: t.clone().requires_grad_() for n, t in x.items()}, on_device):
        leaves = move(inputs)
        start = move(dict(enumerate(state)))
        outputs = call(OPS[name].chunk, leaves, tuple(start.values()))
        sum((x * torch.arange(x.numel(), device=x.device).view_as(x).sin()).sum() for x in outputs).backward()
        grads.append([x.grad.cpu() for x in (*leaves.values(), *start.values())])
    assert_close(grads[1], grads[0], 1e-3)


@pytest.mark.parametrize("window,sinks", [(64, 0), (100, 4)])
def test_sliding_window(window, sinks):
    q, k, v = (torch.randn(2, 600, h, 64, dtype=torch.float64) for h in (6, 2, 2))
    expected, state = naive_swa(q, k, v, window=window, sinks=sinks)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        leaves = on_device((q, k, v), dtype)
        o, final = chunk_swa(*leaves, window=window, sinks=sinks)
        o.float().square().sum().backward()
        assert_close([x.cpu() for x in (o, *final[:4])], [expected, *state[:4]], bound)
        assert all(x.grad.isfinite().all() for x in leaves)
        step, _ = chunk_swa(*(x[:, :1] for x in leaves), window=window, sinks=sinks, initial_state=final)
        assert step.shape == (2, 1, 6, 64)


def test_short_conv():
    x, weight = torch.randn(2, 100, 32, dtype=torch.float64), torch.randn(32, 4, dtype=torch.float64)
    expected = short_conv(x, weight, activation="silu")
    found = short_conv(*on_device((x, weight)), activation="silu", lengths=torch.tensor([100, 100], device="cuda"))
    assert_close([t.cpu() for t in found], list(expected), 1e-6)
    packed = short_conv(
        *(t[:1] if t.ndim == 3 else t for t in on_device((x, weight))), cu_seqlens=torch.tensor([0, 9, 100])
    )
    assert packed[1].shape == (2, 3, 32)


def bf16_inputs(name, batch, tokens, heads=32, dim=128):
    """Return random inputs at full size, with gates that forget within a few tokens."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(h, dtype=torch.bfloat16):
        return torch.randn(batch, tokens, h, dim, device="cuda", generator=generator, dtype=dtype)

    gate = torch.rand(batch, tokens, heads, device="cuda", generator=generator)
    if name == "ssd":
        rate = torch.full((heads,), -5.0, device="cuda")
        return {"x": random(heads), "dt": gate + 1, "A": rate, "B": random(8), "C": random(8)}
    inputs = {"q": random(heads), "k": random(8), "v": random(8), "g": -5 * (gate + 1), "beta": gate}
    return {**inputs, "alpha": gate} if name == "gka" else inputs


@pytest.mark.parametrize("name", OPS)
def test_chunk_offsets_beyond_2_31(name):
    tokens, end = 2**31 // (32 * 128) + 1000, 640
    inputs = bf16_inputs(name, 1, tokens)
    with torch.no_grad():
        found = call(OPS[name].chunk, inputs)
        short = {n: x[:, -end:].contiguous() if x.ndim > 2 else x for n, x in inputs.items()}
        expected = call(OPS[name].chunk, short)
    # The chunks' borders lie elsewhere, so that only rounding differs.
    assert_close([found[0][:, -300:].cpu(), *(x.cpu() for x in found[1:])],
                 [expected[0][:, -300:].cpu(), *(x.cpu() for x in expected[1:])], 3e-2)  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_decode_offsets_beyond_2_31(name):
    rows = 2**31 // (32 * 128 * 128) + 5
    inputs = bf16_inputs(name, rows, 1)
    state = tuple(torch.zeros(rows, 32, 128, 128, device="cuda") for _ in range(2 if name == "gka" else 1))
    last = {n: x[-3:] if x.ndim > 1 else x for n, x in inputs.items()}
    expected = call(OPS[name].recurrent, last, tuple(torch.zeros_like(x[:3]) for x in state), inplace=True)
    found = call(OPS[name].recurrent, inputs, state, inplace=True)
    assert all(torch.equal(a[-3:], b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shift", [0, 1])  # of the state in memory, by which it is aligned or not
def test_decode_of_many_rows(dim, shift):
    """As many rows as make GKA begin in turns give what a few do; bit for bit where both are aligned alike."""
    rows, count = 48, 48 * 32 * dim * dim
    inputs = bf16_inputs("gka", rows, 1, dim=dim)
    keys = torch.randn(rows, 32, 2 * dim, dim, device="cuda")
    memory = [torch.zeros(count + shift, device="cuda") for _ in range(2)]
    state = tuple(x[shift:].view(rows, 32, dim, dim) for x in memory)
    state[0].copy_(keys.mT @ keys / dim)
    state[1].copy_(torch.randn_like(state[1]))
    some = slice(3, 7)
    few = {n: x[some] for n, x in inputs.items()}
    start = tuple(x[some].clone() for x in state)
    exact = call(OPS["gka"].naive, {n: x.double().cpu() for n, x in few.items()}, [x.double().cpu() for x in start])
    alone = call(OPS["gka"].recurrent, few, start, inplace=True)
    found = call(OPS["gka"].recurrent, inputs, state, inplace=True)
    if not shift:
        assert all(torch.equal(a[some], b) for a, b in zip(found, alone, strict=True))
    for outputs in (alone, [x[some] for x in found]):
        assert_close([x.float().cpu() for x in outputs], exact, 2e-2)
