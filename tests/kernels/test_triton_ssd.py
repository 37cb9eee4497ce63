"""ssd and its decay attention on Triton, against the recurrence in fp64; on a GPU or in Triton's interpreter."""

import pytest
import torch
from kernel_cases import assert_close, call, cast, make_inputs, make_state

from hybridize.kernels.engine import interpreted
from hybridize.kernels.ssd import chunk_ssd, naive_ssd
from hybridize.kernels.varlen import chunk_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreted(), reason="Triton needs a GPU, or TRITON_INTERPRET=1 set before the start"
)
BOUND = 1e-5


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "triton")


@pytest.fixture(params=[False, True], ids=["scan", "fused"])
def _path(request, monkeypatch):
    """Take the kernels that write the states between chunks, or the fused ones with segments of one chunk or two."""
    from hybridize.kernels.decay import fused_triton

    # A GPU has too few registers for the states of fp32 and fp16; the interpreter computes wrong in bf16.
    dtypes = [torch.float32, torch.float16] if interpreted() else fused_triton.DTYPES
    monkeypatch.setattr(fused_triton, "DTYPES", dtypes * request.param)
    monkeypatch.setattr(fused_triton, "SHORTEST", 1)


both_paths = pytest.mark.usefixtures("_path")


def move(tensors, dtype=torch.float32):
    """Bring a dict or tuple of tensors to the device."""
    tensors = cast(tensors, dtype)
    if isinstance(tensors, dict):
        return {n: x.to(DEVICE) for n, x in tensors.items()}
    return None if tensors is None else tuple(x.to(DEVICE) for x in tensors)


def check(inputs, state=None, bound=BOUND, dtype=torch.float32, **kwargs):
    expected = call(naive_ssd, cast(cast(inputs, dtype), torch.float64), state, **kwargs)
    actual = call(chunk_ssd, move(inputs, dtype), move(state), **kwargs)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert_close([x.cpu() for x in actual], expected, bound)


def gradients(form, inputs, state, weigh=(True, True), **kwargs):
    """Return gradients of a fixed weighting of the outputs, with respect to all inputs and the state."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    states = None if state is None else tuple(s.detach().clone().requires_grad_() for s in state)
    outputs = call(form, leaves, states, **kwargs)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    loss = sum((x * w).sum() for x, w, used in zip(outputs, weights, weigh, strict=True) if used)
    used = [*leaves.values(), *(states or ())]
    found = torch.autograd.grad(loss, used, allow_unused=True)
    return [torch.zeros_like(x).cpu() if d is None else d.cpu() for x, d in zip(used, found, strict=True)]


def check_gradients(inputs, state=None, bound=BOUND, dtype=torch.float32, **kwargs):
    expected = gradients(naive_ssd, cast(cast(inputs, dtype), torch.float64), state, **kwargs)
    actual = gradients(chunk_ssd, move(inputs, dtype), move(state), **kwargs)
    assert all(x.dtype == dtype for x in actual[: len(inputs)])
    assert_close(actual, expected, bound)


@both_paths
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 100, 257])
def test_lengths(tokens):
    inputs = make_inputs("ssd", 2, tokens, (2, 1))
    check(inputs)
    check(inputs, make_state("ssd", 2, 2))


@both_paths
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (8, 1)])
def test_heads(heads):
    check(make_inputs("ssd", 1, 70, heads), make_state("ssd", 1, heads[0]))


@both_paths
@pytest.mark.parametrize("gate", ["zero", "slow", "fast", "infinite", "mixed"])
def test_extreme_gates(gate):
    check(make_inputs("ssd", 1, 100, (2, 1), gate), make_state("ssd", 1, 2))
    check_gradients(make_inputs("ssd", 1, 100, (2, 1), gate), make_state("ssd", 1, 2))


@both_paths
@pytest.mark.parametrize("dim", [3 + 1, 40, 128])
def test_widths(dim):
    check(make_inputs("ssd", 1, 65, (1, 1), dim=dim), make_state("ssd", 1, 1, dim=dim))
    check_gradients(make_inputs("ssd", 1, 65, (1, 1), dim=dim), make_state("ssd", 1, 1, dim=dim))


@both_paths
@pytest.mark.parametrize("lengths", [[70, 0, 1, 64, 129], [0, 3], [1, 1, 0]])
def test_packed_sequences(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    inputs, state = make_inputs("ssd", 1, int(bounds[-1]), (2, 1)), make_state("ssd", len(lengths), 2)
    check(inputs, state, cu_seqlens=bounds)
    check(inputs, cu_seqlens=bounds)
    check_gradients(inputs, state, cu_seqlens=bounds)


@pytest.mark.parametrize("tokens", [1, 64, 130])
@pytest.mark.parametrize("given", [False, True])
def test_gradients(tokens, given):
    check_gradients(make_inputs("ssd", 2, tokens, (4, 2)), make_state("ssd", 2) if given else None)


@pytest.mark.parametrize("weigh", [(True, False), (False, True)])
def test_gradients_of_one_result(weigh):
    check_gradients(make_inputs("ssd", 1, 70, (2, 1)), make_state("ssd", 1, 2), weigh=weigh)


def test_writes_of_no_weight_have_gradients():
    inputs = make_inputs("ssd", 1, 70, (2, 1))
    inputs["dt"] = inputs["dt"] * (torch.arange(70) % 3 > 0)[:, None]
    check_gradients(inputs)


@both_paths
def test_without_skip():
    inputs = make_inputs("ssd", 1, 70, (2, 1))
    del inputs["D"]
    check(inputs)
    check_gradients(inputs)


# The interpreter computes wrong in bf16.
@both_paths
@pytest.mark.parametrize("dtype", [torch.float16] if interpreted() else [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    bound = 4e-3 if dtype == torch.float16 else 2e-2
    inputs, state = make_inputs("ssd", 1, 130, (4, 2), dim=19), make_state("ssd", 1, dim=19)
    check(inputs, state, bound, dtype)
    check_gradients(inputs, state, bound, dtype)


def test_inert_steps_leave_the_state_bit_unchanged():
    inputs, state = move(make_inputs("ssd", 1, 80, (2, 1), "mixed")), move(make_state("ssd", 1, 2))
    still = {**inputs, "dt": torch.zeros_like(inputs["dt"])}
    assert torch.equal(call(chunk_ssd, still, state)[1], state[0])
    short = {n: x[:, :50] if x.ndim > 1 else x for n, x in inputs.items()}
    inert = {**inputs, "dt": inputs["dt"].masked_fill(torch.arange(80, device=DEVICE)[:, None] >= 50, 0.0)}
    a, b = call(chunk_ssd, short, state), call(chunk_ssd, inert, state)
    assert torch.equal(a[0], b[0][:, :50]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("lengths", [[300], [40, 0, 650, 64], [200, 200, 200]])
def test_segments_of_any_number(lengths, monkeypatch):
    from hybridize.kernels.decay import fused_triton

    dtype, dim, bound = (torch.float32, 8, BOUND) if interpreted() else (torch.bfloat16, 128, 2e-2)
    monkeypatch.setattr(fused_triton, "DTYPES", [dtype])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    inputs, state = make_inputs("ssd", 1, int(bounds[-1]), (1, 1), dim=dim), make_state("ssd", len(lengths), 1, dim=dim)
    for shortest in (1, 2, 3, 100):
        monkeypatch.setattr(fused_triton, "SHORTEST", shortest)
        check(inputs, state, bound, dtype, cu_seqlens=bounds)


def recurrence(q, k, v, g, w, state, scale):
    """Return o, the states before each chunk of 64 and the last state of one sequence in fp64."""
    heads = g.shape[2]
    q, k, v, g, w = (x[0].cpu().double() for x in (q, k, v, g, w))
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    s, outputs, starts = state[0].cpu().double(), [], []
    for t in range(len(q)):
        if t % 64 == 0:
            starts.append(s)
        written = (w[t, :, None] * k[t])[..., None] * v[t, :, None]
        s = g[t].exp()[:, None, None] * s + written
        outputs.append(scale * (q[t, :, None] @ s)[:, 0])
    return torch.stack(outputs)[None], torch.stack(starts), s[None]


@both_paths
@pytest.mark.parametrize("heads", [(4, 4, 1, 1), (6, 6, 3, 2), (4, 1, 4, 2)])
def test_every_sharing_of_heads(heads):
    from hybridize.kernels.decay.scan_triton import chunk_states, decay_attention

    h, hq, hk, hv = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 100, hq, 16), (1, 100, hk, 16), (1, 100, hv, 20), (1, 100, h), (1, 100, h), (1, h, 16, 20)]
    q, k, v, g, w, state = (torch.randn(s, generator=generator) for s in shapes)
    # Channels of a wider tensor, as projections give them: read where they lie.
    wide = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    q, k, v = (
        x.unflatten(-1, (-1, y.shape[3]))
        for x, y in zip(wide.split([hq * 16, hk * 16, hv * 20], -1), (q, k, v), strict=True)
    )
    inputs = [x.to(DEVICE).requires_grad_() for x in (q, k, v, -g.abs(), w.abs(), state)]
    table = chunk_table(inputs[0], 64, None)
    o, final = decay_attention(*inputs, table, 0.3)
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    expected = recurrence(*exact, 0.3)
    assert_close([o.cpu(), final.cpu()], [expected[0], expected[2]], BOUND)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, final)]
    loss = sum((x.cpu().double() * y).sum() for x, y in zip((o, final), weights, strict=True))
    exact_loss = (expected[0] * weights[0]).sum() + (expected[2] * weights[1]).sum()
    assert_close(
        [x.cpu() for x in torch.autograd.grad(loss, inputs)], list(torch.autograd.grad(exact_loss, exact)), BOUND
    )
    with torch.no_grad():
        starts, final = chunk_states(*inputs[1:], table, torch.float32)
    assert_close([starts.cpu(), final.cpu()], [x.detach() for x in expected[1:]], BOUND)
