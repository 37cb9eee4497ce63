"""The Triton decode kernels against the naive forms in fp64: on a GPU, or in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch
from kernel_cases import OPS, assert_close, call, cast, error, make_inputs, make_state, slice_tokens

from hybridize.kernels.engine import interpreted

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or interpreted()), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "triton")


def put(tensors: Any, dtype=torch.float32):
    """Move a dict or tuple of tensors to the device in one dtype."""
    if isinstance(tensors, dict):
        return {n: x.to(DEVICE) for n, x in cast(tensors, dtype).items()}
    return None if tensors is None else tuple(x.to(DEVICE) for x in cast(tensors, dtype))


def back(tensors):
    return [x.cpu() for x in tensors]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (4, 1), (8, 1)])
@pytest.mark.parametrize("dim", [24, 128] if torch.cuda.is_available() else [24])
def test_one_token(name, heads, dim):
    inputs, state = make_inputs(name, 2, 1, heads=heads, dim=dim), make_state(name, 2, heads[0], dim=dim)
    expected = call(OPS[name].naive, inputs, state)
    found = call(OPS[name].recurrent, put(inputs), put(state))
    assert_close(back(found), expected, OPS[name].fp32)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("gate", ["zero", "fast", "infinite", "mixed"])
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 4, 9]])
def test_several_tokens(name, gate, bounds):
    rows = 1 if bounds is None else len(bounds) - 1
    inputs, state = make_inputs(name, 1, 9, gate=gate, dim=19), make_state(name, rows, dim=19)
    packed = None if bounds is None else torch.tensor(bounds)
    for given in (state, None):
        expected = call(OPS[name].naive, inputs, given, cu_seqlens=packed)
        given = put(given)
        found = call(OPS[name].recurrent, put(inputs), given, cu_seqlens=packed)
        assert_close(back(found), expected, OPS[name].fp32)


@pytest.mark.parametrize("name", OPS)
def test_in_place(name):
    inputs, state = make_inputs(name, 3, 2, dim=16), put(make_state(name, 3, dim=16))
    kept = [s.clone() for s in state]
    found = call(OPS[name].recurrent, put(inputs), state)
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))
    written = call(OPS[name].recurrent, put(inputs), state, inplace=True)
    assert all(a is b for a, b in zip(written[1:], state, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(written, found, strict=True))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("engine", ["torch", "triton"])
@pytest.mark.parametrize("inplace", [False, True])
def test_slots(name, engine, inplace, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_ENGINE", engine)
    inputs, pool = make_inputs(name, 3, 1, dim=16), make_state(name, 5, dim=16)
    slots = torch.tensor([4, -1, 2])
    expected = call(OPS[name].naive, {n: x[[0, 2]] if x.ndim > 1 else x for n, x in inputs.items()},
                    tuple(s[[4, 2]] for s in pool))  # fmt: skip
    found = back(call(OPS[name].recurrent, put(inputs), put(pool), state_indices=slots.to(DEVICE), inplace=inplace))
    assert_close([found[0][[0, 2]], *(s[[4, 2]] for s in found[1:])], expected, OPS[name].fp32)
    for new, old in zip(found[1:], pool, strict=True):
        assert torch.equal(new[[0, 1, 3]], old[[0, 1, 3]].float())


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("engine", ["torch", "triton"])
def test_logits(name, engine, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_ENGINE", engine)
    inputs, state = make_inputs(name, 2, 1, dim=16), make_state(name, 2, dim=16)
    raw = dict(inputs)
    bias, a_log = torch.linspace(-3, 30, 4).double(), torch.linspace(-2, 1, 4).double()
    if name == "ssd":
        inputs["dt"] = torch.nn.functional.softplus(raw["dt"] + bias)
        gate: dict[str, Any] = {"dt_bias": bias.float().to(DEVICE)}
    else:
        inputs["g"] = -a_log.exp() * torch.nn.functional.softplus(raw["g"] + bias)
        gate = {"decay_gate": (a_log.float().to(DEVICE), bias.float().to(DEVICE))}
    for n in ("beta", "alpha"):
        if n in inputs:
            inputs[n] = raw[n].sigmoid()
    expected = call(OPS[name].naive, inputs, state)
    assert_close(back(call(OPS[name].recurrent, put(raw), put(state), **gate)), expected, OPS[name].fp32)


@pytest.mark.parametrize("name", OPS)
def test_views(name):
    """Heads cut out of one projection are read where they lie."""
    inputs, state = make_inputs(name, 2, 2, heads=(4, 2), dim=16), make_state(name, 2, dim=16)
    expected = call(OPS[name].naive, inputs, state)
    views = {}
    for n, x in put(inputs).items():
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), device=DEVICE)
        wide[..., : x.shape[-1]] = x
        views[n] = wide[..., : x.shape[-1]] if x.ndim == 4 else x
    assert_close(back(call(OPS[name].recurrent, views, put(state))), expected, OPS[name].fp32)


@pytest.mark.parametrize("name", OPS)
def test_zeros_give_zeros(name):
    inputs = {n: torch.zeros_like(x) for n, x in make_inputs(name, 1, 2, dim=16).items()}
    found = back(call(OPS[name].recurrent, put(inputs), None))
    assert all(bool((x == 0).all()) for x in found)


@pytest.mark.parametrize("name", OPS)
def test_half_precision(name):
    dtype = torch.float16 if interpreted() else torch.bfloat16
    inputs, state = make_inputs(name, 2, 3, dim=32), make_state(name, 2, dim=32)
    gates = {n: x for n, x in inputs.items() if n in ("g", "beta", "alpha", "dt", "A", "D")}
    rounded = {n: x.to(dtype).double() for n, x in inputs.items() if n not in gates}
    expected = call(OPS[name].naive, {**inputs, **rounded}, state)
    found = back(call(OPS[name].recurrent, {**put(gates), **put(rounded, dtype)}, put(state)))
    assert found[0].dtype == dtype
    assert error(found[0], expected[0]) < 5e-3
    assert_close(found[1:], expected[1:], OPS[name].fp32)


@pytest.mark.parametrize("name", OPS)
def test_gradients_use_torch(name):
    inputs, state = put(make_inputs(name, 1, 1, dim=16)), put(make_state(name, 1, dim=16))
    leaf = next(iter(inputs.values())).requires_grad_()
    call(OPS[name].recurrent, inputs, state)[0].sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("num_iters", [0, 1, 5, 30])
def test_iterations(num_iters):
    inputs, state = make_inputs("gka", 1, 2, dim=16), make_state("gka", 1, dim=16)
    expected = call(OPS["gka"].naive, inputs, state, num_iters=num_iters)
    found = call(OPS["gka"].recurrent, put(inputs), put(state), num_iters=num_iters)
    assert_close(back(found), expected, 1e-4)


def test_tiny_gram():
    """A state that has faded to 1e-25 still solves: no square underflows."""
    inputs = slice_tokens(make_inputs("gka", 1, 1, dim=16), 0, 1)
    inputs["k"] = torch.zeros_like(inputs["k"])
    state = tuple(s * 1e-25 for s in make_state("gka", 1, dim=16))
    expected = call(OPS["gka"].naive, inputs, state)
    assert_close(back(call(OPS["gka"].recurrent, put(inputs), put(state))), expected, 1e-3)


def test_wide_heads_need_torch():
    inputs = put(make_inputs("gdn", 1, 1, dim=200))
    with pytest.raises(ValueError, match="up to 128 channels"):
        call(OPS["gdn"].recurrent, inputs, None)
    os.environ["HYBRIDIZE_ENGINE"] = ""
    assert call(OPS["gdn"].recurrent, inputs, None)[0].isfinite().all()
