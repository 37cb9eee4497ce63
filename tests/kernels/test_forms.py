"""gka, gdn and ssd: the chunk and recurrent forms against the naive one."""

import itertools

import pytest
import torch
from kernel_cases import GATES, OPS, assert_close, call, cast, make_inputs, make_state, slice_tokens

LENGTHS = (1, 3, 63, 64, 65, 100, 257)
HEADS = ((4, 4), (4, 2), (4, 1), (6, 2))
DTYPES = (torch.float64, torch.float32)
names = pytest.mark.parametrize("name", OPS)


def bound(name, dtype):
    return 1e-11 if dtype == torch.float64 else OPS[name].fp32


@names
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("given", [False, True])
def test_lengths_from_zero_and_given_states(name, tokens, given):
    inputs, state = make_inputs(name, 2, tokens), make_state(name, 2) if given else None
    expected = call(OPS[name].naive, inputs, state)
    for dtype in DTYPES:
        for form in (OPS[name].chunk, OPS[name].recurrent):
            actual = call(form, cast(inputs, dtype), cast(state, dtype))
            assert actual[0].dtype == dtype
            assert_close(actual, expected, bound(name, dtype))


@names
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("gate", GATES)
def test_heads_and_extreme_gates(name, heads, gate):
    inputs, state = make_inputs(name, 1, 70, heads, gate), make_state(name, 1, heads[0])
    expected = call(OPS[name].naive, inputs, state)
    for dtype in DTYPES:
        for form in (OPS[name].chunk, OPS[name].recurrent):
            assert_close(call(form, cast(inputs, dtype), cast(state, dtype)), expected, bound(name, dtype))


@names
@pytest.mark.parametrize("which", ["zero keys", "zero queries", "same keys", "beta 0", "beta 1", "all zero"])
def test_degenerate_inputs(name, which):
    inputs = make_inputs(name, 2, 70, gate="mixed")
    key, query, write = ("B", "C", "dt") if name == "ssd" else ("k", "q", "beta")
    if which in ("zero keys", "all zero"):
        inputs[key] = torch.zeros_like(inputs[key])
    if which in ("zero queries", "all zero"):
        inputs[query] = torch.zeros_like(inputs[query])
    if which == "same keys":
        inputs[key] = inputs[key][:, :1].expand_as(inputs[key]).clone()
    if which.startswith("beta"):
        inputs[write] = torch.full_like(inputs[write], float(which[-1]))
    expected = call(OPS[name].naive, inputs)
    if which == "zero queries" and name != "ssd":
        assert expected[0].abs().max() == 0
    for dtype in DTYPES:
        for form in (OPS[name].chunk, OPS[name].recurrent):
            assert_close(call(form, cast(inputs, dtype)), expected, bound(name, dtype))


@names
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("lengths", [[70, 0, 1, 64, 129], [0, 3], [5], [1, 1, 1, 1]])
def test_packed_equals_each_alone(name, given, lengths):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    inputs = make_inputs(name, 1, bounds[-1], gate="mixed")
    states = make_state(name, len(lengths)) if given else None
    for form in (OPS[name].naive, OPS[name].chunk, OPS[name].recurrent):
        packed = call(form, inputs, states, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        alone = [
            call(
                OPS[name].naive,
                slice_tokens(inputs, a, b),
                None if states is None else tuple(s[n : n + 1] for s in states),
            )
            for n, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        outputs = torch.cat([parts[0] for parts in alone], 1)
        finals = [torch.cat(parts) for parts in list(zip(*alone, strict=True))[1:]]
        assert_close(packed, [outputs, *finals], 1e-11)


@names
@pytest.mark.parametrize("sizes", [(40, 24), (63, 1), (1,) * 64])
def test_splitting_a_sequence_changes_nothing(name, sizes):
    inputs, state = make_inputs(name, 2, 64), make_state(name, 2)
    whole = call(OPS[name].chunk, inputs, state)
    for form in (OPS[name].chunk, OPS[name].recurrent):
        outputs, at, carried = [], 0, state
        for size in sizes:
            o, *carried = call(form, slice_tokens(inputs, at, at + size), tuple(carried))
            outputs.append(o)
            at += size
        assert_close([torch.cat(outputs, 1), *carried], whole, 1e-11)


def inert(name, inputs, start):
    """Make the tokens from start on inert, as a mixer does with padding."""
    inputs = {n: x.clone() for n, x in inputs.items()}
    for n in ("dt",) if name == "ssd" else ("k", "g", "beta"):
        inputs[n][:, start:] = 0
    return inputs


@names
@pytest.mark.parametrize("form", ["chunk", "recurrent", "naive"])
def test_inert_steps_leave_the_state_bit_unchanged(name, form):
    run = getattr(OPS[name], form)
    state = cast(make_state(name, 2), torch.float32)
    inputs = cast(make_inputs(name, 2, 80, gate="mixed"), torch.float32)
    for before, after in zip(state, call(run, inert(name, inputs, 0), state)[1:], strict=True):
        assert torch.equal(before, after)
    short = call(run, slice_tokens(inputs, 0, 50), state)
    padded = call(run, inert(name, inputs, 50), state)
    assert torch.equal(short[0], padded[0][:, :50])
    for a, b in zip(short[1:], padded[1:], strict=True):
        assert torch.equal(a, b)


@names
def test_in_place_writes_the_given_tensors(name):
    inputs, state = make_inputs(name, 2, 3), make_state(name, 2)
    expected = call(OPS[name].naive, inputs, state)
    given = tuple(s.float() for s in state)
    o, *final = call(OPS[name].recurrent, cast(inputs, torch.float32), given, inplace=True)
    assert all(a is b for a, b in zip(final, given, strict=True))
    assert_close([o, *given], expected, OPS[name].fp32)
    with pytest.raises(ValueError, match="inplace"):
        call(OPS[name].recurrent, inputs, None, inplace=True)


@names
def test_state_is_left_alone_and_optional(name):
    inputs, state = make_inputs(name, 2, 70), make_state(name, 2)
    kept = [s.clone() for s in state]
    for form in OPS[name][:3]:
        call(form, inputs, state)
        assert all(torch.equal(a, b) for a, b in zip(kept, state, strict=True))
        assert form(**inputs, output_final_state=False)[1] is None


@names
def test_half_precision_inputs(name):
    inputs = cast(make_inputs(name, 2, 70), torch.bfloat16)
    for form in OPS[name][:3]:
        o, *final = call(form, inputs)
        assert o.dtype == torch.bfloat16 and all(s.dtype == torch.float32 for s in final)
        assert_close([o, *final], call(OPS[name].naive, cast(inputs, torch.float64)), 5e-3)


@names
def test_autocast_does_not_lower_the_precision(name):
    inputs, state = cast(make_inputs(name, 1, 70), torch.float32), cast(make_state(name, 1), torch.float32)
    for form in OPS[name][:3]:
        expected = call(form, inputs, state)
        with torch.autocast("cpu", torch.bfloat16):
            found = call(form, inputs, state)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@names
def test_no_tokens_pass_the_state_through(name):
    inputs, state = make_inputs(name, 2, 0), make_state(name, 2)
    for form in OPS[name][:3]:
        o, *final = call(form, inputs, state)
        assert o.shape[:2] == (2, 0)
        assert all(torch.equal(a, b) for a, b in zip(final, state, strict=True))


@names
def test_shapes_that_do_not_fit_are_named(name):
    inputs, key = make_inputs(name, 2, 5), "B" if name == "ssd" else "k"
    for form in OPS[name][:3]:
        with pytest.raises(ValueError, match="expected"):
            call(form, inputs, make_state(name, 3))
        with pytest.raises(ValueError, match=f"{key} has shape"):
            call(form, {**inputs, key: inputs[key][:, :4]})
        with pytest.raises(ValueError, match="batch of 1"):
            call(form, inputs, cu_seqlens=torch.tensor([0, 5]))
        with pytest.raises(ValueError, match="rise from 0"):
            call(form, make_inputs(name, 1, 5), cu_seqlens=torch.tensor([0, 3]))
