"""The Triton kernels of the gated delta rule against the naive form in fp64: outputs, states and all gradients.

On a GPU, or in Triton's interpreter, which TRITON_INTERPRET=1 must have chosen before the start.
"""

import pytest
import torch
from kernel_cases import GATES, call, cast, error, make_inputs, make_state

from hybridize.kernels.engine import interpreted
from hybridize.kernels.gdn import chunk_gated_delta_rule, naive_gated_delta_rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if interpreted() else torch.bfloat16  # the interpreter gets bf16 wrong
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreted(), reason="needs a GPU, or TRITON_INTERPRET=1 set before the start"
)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "triton")


@pytest.fixture
def empty_is_nan():
    """Fill what torch.empty returns with NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run(form, inputs, state, **kwargs):
    """Return the output, the final state, and the gradients of a fixed weighting of both, by name."""
    leaves = {n: x.detach().to(DEVICE, copy=True).requires_grad_() for n, x in inputs.items()}
    states = None if state is None else tuple(s.detach().to(DEVICE, copy=True).requires_grad_() for s in state)
    outputs = call(form, leaves, states, **kwargs)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    torch.autograd.backward(outputs, weights)
    gradients = {f"d_{n}": x.grad for n, x in leaves.items()} | {f"d_S{i}": s.grad for i, s in enumerate(states or ())}
    return {"o": outputs[0].detach(), "S": outputs[1].detach(), **gradients}


def check(inputs, state=None, dtypes=(torch.float32,), vanishing=None, **kwargs):
    for dtype in dtypes:
        given = cast(inputs, dtype) | cast({n: inputs[n] for n in ("g", "beta")}, torch.float32)
        rounded = {n: x.double() for n, x in given.items()}
        expected = run(naive_gated_delta_rule, rounded, state, **kwargs)
        actual = run(chunk_gated_delta_rule, given, cast(state, torch.float32), **kwargs)
        largest = max(x.norm().item() for x in expected.values())
        for name, x in expected.items():
            # What is left of a gradient whose terms cancel is compared with the largest.
            floor = largest if name == vanishing else 1e-6 * largest
            off = error(actual[name], x) * min(1.0, x.norm().item() / floor)
            # d_g is the difference of large sums, so the rounding of 16-bit operands shows most in it.
            assert off <= BOUNDS[dtype] * (2 if name == "d_g" else 1), (name, dtype, off)
        assert actual["o"].dtype == actual["d_q"].dtype == actual["d_k"].dtype == actual["d_v"].dtype == dtype
        assert actual["S"].dtype == actual["d_g"].dtype == actual["d_beta"].dtype == torch.float32


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 100, 257])
def test_lengths(tokens, given, empty_is_nan):
    check(make_inputs("gdn", 2, tokens, (2, 1), dim=16), make_state("gdn", 2, 2, dim=16) if given else None)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 1), (4, 2)])
def test_heads(heads):
    check(make_inputs("gdn", 1, 17, heads, dim=12), make_state("gdn", 1, heads[0], dim=12), (torch.float32, HALF))


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, empty_is_nan):
    check(make_inputs("gdn", 1, 129, (2, 1), gate, dim=16), make_state("gdn", 1, 2, dim=16))


@pytest.mark.parametrize("dim", [5, 40, 64, 128])
def test_widths(dim):
    check(make_inputs("gdn", 1, 66, (1, 1), dim=dim), make_state("gdn", 1, 1, dim=dim), (torch.float32, HALF))


@pytest.mark.parametrize("lengths", [[5, 0, 1, 64, 65], [0, 3], [1, 1, 1]])
def test_packed(lengths, empty_is_nan):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make_inputs("gdn", 1, int(bounds[-1]), (2, 1), "mixed", dim=12)
    check(inputs, make_state("gdn", len(lengths), 2, dim=12), cu_seqlens=bounds.to(torch.int32))


@pytest.mark.parametrize("which", ["zero keys", "zero queries", "same keys", "beta 0", "beta 1", "all zero"])
def test_degenerate_inputs(which):
    inputs = make_inputs("gdn", 1, 70, (2, 1), "mixed", dim=12)
    for name, zero in (("k", ("zero keys", "all zero")), ("q", ("zero queries", "all zero"))):
        if which in zero:
            inputs[name] = torch.zeros_like(inputs[name])
    if which == "same keys":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone()
    if which.startswith("beta"):
        inputs["beta"] = torch.full_like(inputs["beta"], float(which[-1]))
    check(inputs)


def test_same_keys_that_are_never_forgotten():
    inputs = make_inputs("gdn", 1, 128, (1, 1), "zero", dim=16)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone()
    inputs["beta"] = torch.ones_like(inputs["beta"])
    check(inputs, vanishing="d_g")


def test_scale_strides_and_a_state_nobody_asks_for():
    inputs = cast(make_inputs("gdn", 1, 20, (2, 1), dim=16), torch.float32)
    turned = {n: x.to(DEVICE).mT.contiguous().mT for n, x in inputs.items()}
    o, final = chunk_gated_delta_rule(**turned, scale=0.3, output_final_state=False)
    expected, _ = naive_gated_delta_rule(**cast(inputs, torch.float64), scale=0.3)
    assert final is None
    assert error(o.cpu(), expected) < 1e-5


def test_gradient_of_the_state_alone():
    given = {n: x.to(DEVICE).float() for n, x in make_inputs("gdn", 1, 70, (2, 1), dim=16).items()}
    grads = []
    for form, dtype in ((naive_gated_delta_rule, torch.float64), (chunk_gated_delta_rule, torch.float32)):
        v = given["v"].to(dtype).requires_grad_()
        form(**{**cast(given, dtype), "v": v})[1].square().sum().backward()
        grads.append(v.grad)
    assert error(grads[1], grads[0]) < 1e-5
