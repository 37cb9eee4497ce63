"""gka, gdn and ssd: gradients of the chunk form against autograd through the naive one."""

import pytest
import torch
from kernel_cases import OPS, assert_close, call, cast, error, gradients, make_inputs, make_state

from hybridize.kernels.gka import chunk_gka, naive_gka


def gradient_errors(form, reference, inputs, state, dtype=torch.float64, chunk_size=None, **kwargs):
    """Return the relative error of each gradient; one that nearly vanishes is compared with the largest."""
    expected = gradients(reference, inputs, state, **kwargs)
    if chunk_size is not None:
        kwargs["chunk_size"] = chunk_size
    actual = gradients(form, cast(inputs, dtype), cast(state, dtype), **kwargs)
    floor = 1e-6 * max(x.norm().item() for x in expected.values())
    return {n: ((actual[n] - x).norm() / x.norm().clamp_min(floor)).item() for n, x in expected.items()}


def check(form, reference, inputs, state, bound, *, size=None, dtype=torch.float64, **kwargs):
    errors = gradient_errors(form, reference, inputs, state, dtype, size, **kwargs)
    assert all(e <= bound for e in errors.values()), errors


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("tokens", [1, 3, 67])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_naive(name, tokens, dtype):
    # The implicit gradient of gka is exact once the solve has converged, hence more iterations.
    kwargs = {"num_iters": 90} if name == "gka" else {}
    inputs, state = make_inputs(name, 1, tokens), make_state(name, 1)
    bound = 1e-8 if dtype == torch.float64 else 3e-4 if name == "gka" else 2e-5
    check(OPS[name].chunk, OPS[name].naive, inputs, state, bound, dtype=dtype, **kwargs)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("gate", ["zero", "fast", "mixed"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_extreme_gates_and_heads(name, gate, heads):
    kwargs = {"num_iters": 90} if name == "gka" else {}
    inputs, state = make_inputs(name, 1, 21, heads, gate), make_state(name, 1)
    if name == "ssd":
        inputs["dt"] = inputs["dt"].clamp_max(20.0)
    check(OPS[name].chunk, OPS[name].naive, inputs, state, 1e-8, size=8, **kwargs)


@pytest.mark.parametrize("name", OPS)
def test_packed(name):
    kwargs = {"num_iters": 90} if name == "gka" else {}
    inputs, state = make_inputs(name, 1, 40), make_state(name, 3)
    packed = {**kwargs, "cu_seqlens": torch.tensor([0, 27, 27, 40])}
    check(OPS[name].chunk, OPS[name].naive, inputs, state, 1e-8, size=8, **packed)


@pytest.mark.parametrize("name", OPS)
def test_recurrent_form_is_differentiable_too(name):
    kwargs = {"num_iters": 20} if name == "gka" else {}
    check(OPS[name].recurrent, OPS[name].naive, make_inputs(name, 1, 4), make_state(name, 1), 1e-9, **kwargs)


@pytest.mark.parametrize("name", OPS)
def test_gradcheck(name):
    inputs, state = make_inputs(name, 1, 5, (2, 1), dim=5), make_state(name, 1, 2, dim=5)
    leaves = [x.requires_grad_() for x in (*inputs.values(), *state)]

    def run(*tensors):
        given = dict(zip(inputs, tensors, strict=False))
        kwargs = {"num_iters": 90} if name == "gka" else {}
        return tuple(call(OPS[name].chunk, given, tensors[len(inputs) :], chunk_size=2, **kwargs))

    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, fast_mode=True)


def test_gka_gradient_at_the_default_iterations():
    inputs, state = make_inputs("gka", 1, 67), make_state("gka", 1)
    expected, actual = gradients(naive_gka, inputs, state), gradients(chunk_gka, inputs, state)
    assert error(actual["q"], expected["q"]) < 1e-10  # the polynomial is symmetric: exact at any number of steps
    # The others are those of the exact solution; here the solve stops at a relative error of 3e-4 and less.
    assert max(error(actual[n], expected[n]) for n in expected) < 5e-3


@pytest.mark.parametrize("zero", ["k", "q", "v"])
def test_gka_gradients_of_zero_vectors_are_finite(zero):
    inputs = make_inputs("gka", 1, 9)
    inputs[zero][:, :4] = 0
    inputs["g"][:, 6] = -float("inf")
    expected = gradients(naive_gka, inputs, None, num_iters=90)
    actual = gradients(chunk_gka, inputs, None, num_iters=90)
    assert all(x.isfinite().all() for x in (*actual.values(), *expected.values()))
    assert_close(list(actual.values()), list(expected.values()), 1e-8)


@pytest.mark.parametrize("name", OPS)
def test_autocast_does_not_lower_the_precision_of_gradients(name):
    inputs = cast(make_inputs(name, 1, 20), torch.float32)
    grads = []
    for enabled in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o = call(OPS[name].chunk, leaves)[0]
        o.sin().sum().backward()
        grads.append([x.grad for x in leaves.values()])
    assert_close(grads[1], grads[0], 1e-6)
