"""gka's chunk form on Triton against the naive one in fp64: in Triton's interpreter or on a GPU."""

from pathlib import Path

import pytest
import torch
from kernel_cases import GATES, call, cast, error, gradients, layer, make_inputs, make_state
from safetensors.torch import load_file

from hybridize.kernels.engine import interpreted
from hybridize.kernels.gka import chunk_gka, naive_gka

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
pytestmark = [
    pytest.mark.skipif(not interpreted() and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy
]
HALF = torch.float16 if interpreted() else torch.bfloat16  # the interpreter rounds bf16 wrongly


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "triton")


def prepare(inputs, dtype):
    """Return inputs on the device, with q, k and v in dtype, and what these hold, in fp64."""
    low = {n: x.to(DEVICE, dtype if n in "qkv" else torch.float32) for n, x in inputs.items()}
    return low, {n: x.double().cpu() for n, x in low.items()}


def on_device(state):
    return None if state is None else tuple(x.to(DEVICE) for x in cast(state, torch.float32))


def check(inputs, state=None, dtype=torch.float32, bound=None, **kwargs):
    low, exact = prepare(inputs, dtype)
    kwargs = {"num_iters": 9, **kwargs}
    expected = call(naive_gka, exact, state, **kwargs)
    actual = call(chunk_gka, low, on_device(state), **kwargs)
    assert actual[0].dtype == dtype and actual[1].dtype == actual[2].dtype == torch.float32
    errors = [error(a.cpu(), e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) <= (bound or BOUND[dtype]), errors


def check_gradients(inputs, state=None, dtype=torch.float32, bound=None, **kwargs):
    low, exact = prepare(inputs, dtype)
    # The implicit gradient is exact once the solve has converged, hence the large ridge.
    kwargs = {"ridge": 1.0, "num_iters": 14, **kwargs}
    expected = gradients(naive_gka, exact, state, **kwargs)
    actual = gradients(chunk_gka, low, on_device(state), **kwargs)
    actual = {n: torch.zeros_like(expected[n]) if x is None else x for n, x in actual.items()}
    floor = 1e-6 * max(x.norm().item() for x in expected.values())
    distance = {n: (actual[n].cpu().double() - x).norm() for n, x in expected.items()}
    errors = {n: (distance[n] / x.norm().clamp_min(floor)).item() for n, x in expected.items()}
    assert all(actual[n].dtype == x.dtype for n, x in low.items() if n != "alpha")
    assert all(e <= (bound or BOUND[dtype]) for e in errors.values()), errors


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 130])
def test_lengths_with_and_without_states(tokens):
    inputs = make_inputs("gka", 2, tokens, (1, 1), dim=16)
    check(inputs, make_state("gka", 2, 1, dim=16) if tokens % 2 else None)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gates(gate, dtype):
    inputs, state = make_inputs("gka", 1, 70, (1, 1), gate, dim=16), make_state("gka", 1, 1, dim=16)
    # Where H is little more than k k^T, o = U^T x is a small difference of large parts of x.
    check(inputs, state, dtype, None if dtype == torch.float32 or gate in ("zero", "slow", "usual") else 0.2)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (8, 1)])
def test_heads_and_widths(heads):
    dim = 8 if heads == (8, 1) else 24
    check(make_inputs("gka", 1, 5, heads, dim=dim), make_state("gka", 1, heads[0], dim=dim))


def test_packed_sequences():
    inputs, state = make_inputs("gka", 1, 100, (2, 1), dim=16), make_state("gka", 5, 2, dim=16)
    check(inputs, state, cu_seqlens=torch.tensor([0, 0, 67, 67, 68, 100]))


@pytest.mark.parametrize("num_iters", [0, 1, 7])
def test_any_number_of_iterations(num_iters):
    inputs, state = make_inputs("gka", 1, 20, (2, 1), dim=16), make_state("gka", 1, 2, dim=16)
    check(inputs, state, num_iters=num_iters, scale=0.7)
    if not num_iters:
        check_gradients(inputs, state, num_iters=0)


@pytest.mark.parametrize("which", ["zero keys", "zero queries", "short keys", "same keys", "beta 0", "all zero"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_degenerate_inputs(which, dtype):
    inputs = make_inputs("gka", 1, 70, (1, 1), dim=16)
    if which in ("zero keys", "all zero"):
        inputs["k"] *= 0
    if which in ("zero queries", "all zero"):
        inputs["q"] *= 0
    if which == "short keys":
        inputs["k"][:, ::2] *= 1e-3
    if which == "same keys":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone()
    if which == "beta 0":
        inputs["beta"] *= 0
    check(inputs, None, dtype, None if dtype == torch.float32 else 0.1)


def test_output_does_not_depend_on_the_scale_of_the_states():
    inputs, state = make_inputs("gka", 1, 70, (2, 1), dim=16), make_state("gka", 1, 2, dim=16)
    inputs["k"], inputs["v"] = 0 * inputs["k"], 0 * inputs["v"]
    inputs["alpha"] = torch.ones_like(inputs["alpha"])
    inputs["g"] = torch.full_like(inputs["g"], -0.5)  # from 1 to 1e-15
    expected = call(naive_gka, inputs, state)[0]
    small = tuple(1e-12 * x for x in state)
    low, _ = prepare(inputs, torch.float32)
    assert error(call(chunk_gka, low, on_device(small))[0].cpu(), expected) < 1e-4


@pytest.mark.parametrize("gate", ["zero", "fast", "mixed", "usual"])
def test_gradients(gate):
    check_gradients(make_inputs("gka", 1, 70, (2, 1), gate, dim=16), make_state("gka", 1, 2, dim=16))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("heads", [(3, 1), (2, 2)])
def test_gradients_of_packed_sequences(heads, dtype):
    inputs, state = make_inputs("gka", 1, 70, heads, dim=12), make_state("gka", 3, heads[0], dim=12)
    bound = None if dtype == torch.float32 else 3e-2
    check_gradients(inputs, state, dtype, bound, cu_seqlens=torch.tensor([0, 66, 66, 70]))


def test_gradients_of_a_batch_without_states():
    check_gradients(make_inputs("gka", 2, 65, (2, 2), dim=16))


@pytest.mark.parametrize("zero", ["k", "q", "v"])
def test_gradients_of_zero_vectors(zero):
    inputs = make_inputs("gka", 1, 9, (2, 1), dim=16)
    inputs[zero][:, :4] = 0
    inputs["g"][:, 6] = -float("inf")
    check_gradients(inputs)


def test_gradient_of_q_is_that_of_the_polynomial():
    inputs = make_inputs("gka", 1, 9, (1, 1), dim=16)
    low, exact = prepare(inputs, torch.float32)
    expected, actual = gradients(naive_gka, exact, None), gradients(chunk_gka, low, None)
    assert error(actual["q"].cpu(), expected["q"]) < 1e-4


def test_final_states_alone_have_gradients():
    low, exact = prepare(make_inputs("gka", 1, 70, (2, 1), dim=16), torch.float32)
    grads = []
    for form, inputs in ((naive_gka, exact), (chunk_gka, low)):
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        _, (h, _) = form(**leaves)
        h.sin().sum().backward()
        grads.append({n: leaves[n].grad.cpu() for n in ("k", "g", "beta")})
    assert max(error(grads[1][n], x) for n, x in grads[0].items()) < 1e-4


def test_recorded_layer(record_property):
    stored = load_file(Path(__file__).parents[1] / "data" / "layer_gka.safetensors")
    weights = {n[2:]: t.to(DEVICE) for n, t in stored.items() if n.startswith("w.")}

    def form(q, k, v, **gates):
        o, state = chunk_gka(q.to(HALF), k.to(HALF), v.to(HALF), **gates)
        return o.float(), state

    measured = error(layer("gka", form, weights, stored["x"].to(DEVICE)).cpu(), stored["y_fp64"])
    record_property("error", measured)
    print(f"gka layer in {HALF}, against fp64: {measured:.2e}")
    assert measured <= 2e-2
