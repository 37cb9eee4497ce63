"""Sliding-window attention."""

import itertools

import pytest
import torch
from kernel_cases import assert_close, error

from hybridize.kernels.swa import SlidingState, chunk_swa, naive_swa

FORMS = (naive_swa, chunk_swa)


def make(batch, tokens, heads=(4, 2), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, heads[0], 8), (batch, tokens, heads[1], 8), (batch, tokens, heads[1], 5)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def brute_force(q, k, v, window, sinks):
    """Return the output of softmax over an explicit mask, query by query."""
    group, out = q.shape[2] // k.shape[2], torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = [j for j in range(i + 1) if i - j < window or j < sinks]
            for h in range(q.shape[2]):
                p = (k[b, seen, h // group] @ q[b, i, h] * q.shape[-1] ** -0.5).softmax(0)
                out[b, i, h] = p @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("window,sinks", [(1, 0), (8, 0), (8, 3), (3, 5), (100, 2)])
def test_against_brute_force(heads, window, sinks):
    x = make(2, 30, heads)
    expected = brute_force(*x, window, sinks)
    for form in FORMS:
        assert error(form(*x, window=window, sinks=sinks)[0], expected) < 1e-12
        single = [t.float() for t in x]
        assert error(form(*single, window=window, sinks=sinks)[0], expected) < 1e-5


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 100, 257, 600])
@pytest.mark.parametrize("window,sinks", [(16, 0), (64, 4), (300, 4)])
def test_chunk_equals_naive(tokens, window, sinks):
    x = make(2, tokens)
    expected, state = naive_swa(*x, window=window, sinks=sinks)
    o, final = chunk_swa(*x, window=window, sinks=sinks)
    assert error(o, expected) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(final, state, strict=True))
    half = [t.bfloat16() for t in x]
    assert error(chunk_swa(*half, window=window, sinks=sinks)[0], expected) < 2e-2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(40, 24), (63, 1), (1,) * 64, (2, 0, 5, 57)])
@pytest.mark.parametrize("window,sinks", [(1, 0), (10, 0), (10, 4), (50, 7)])
def test_continuing_equals_one_call(form, sizes, window, sinks):
    x = make(2, 64)
    whole, final = naive_swa(*x, window=window, sinks=sinks)
    state, outputs, at = None, [], 0
    for size in sizes:
        o, state = form(*(t[:, at : at + size] for t in x), window=window, sinks=sinks, initial_state=state)
        outputs.append(o)
        at += size
    assert error(torch.cat(outputs, 1), whole) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(state, final, strict=True))


def test_state_has_a_fixed_shape_and_dtype():
    for tokens in (1, 5, 40):
        x = make(3, tokens, dtype=torch.bfloat16)
        _, state = chunk_swa(*x, window=9, sinks=2)
        assert isinstance(state, SlidingState)
        assert [tuple(t.shape) for t in state] == [(3, 8, 2, 8), (3, 8, 2, 5), (3, 2, 2, 8), (3, 2, 2, 5), (3,)]
        assert state.seen.tolist() == [tokens] * 3 and state.seen.dtype == torch.int64
        assert torch.equal(state.keys[:, -1], x[1][:, -1]) and torch.equal(state.sink_keys[:, 0], x[1][:, 0])
        assert torch.equal(state.keys[:, : max(8 - tokens, 0)], torch.zeros_like(state.keys[:, : max(8 - tokens, 0)]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [False, True])
def test_lengths_hide_the_rest_of_a_row(form, given):
    x, lengths = make(4, 30), torch.tensor([30, 0, 7, 29])
    options = {"window": 6, "sinks": 3}
    start = naive_swa(*make(4, 2, seed=3), **options)[1] if given else None
    o, state = form(*x, **options, lengths=lengths, initial_state=start)
    for n, size in enumerate(lengths.tolist()):
        row = None if start is None else tuple(t[n : n + 1] for t in start)
        expected, final = naive_swa(*(t[n : n + 1, :size] for t in x), **options, initial_state=row)
        assert error(o[n : n + 1, :size], expected) < 1e-12
        assert all(torch.equal(a[n : n + 1], b) for a, b in zip(state, final, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("lengths", [[30, 0, 1, 290], [0, 2], [4], [1, 1, 1]])
def test_packed_equals_each_alone(form, given, lengths):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    x, options = make(1, bounds[-1]), {"window": 6, "sinks": 3}
    start = naive_swa(*make(len(lengths), 2, seed=3), **options)[1] if given else None
    o, state = form(*x, **options, cu_seqlens=torch.tensor(bounds), initial_state=start)
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        row = None if start is None else tuple(t[n : n + 1] for t in start)
        expected, final = naive_swa(*(t[:, a:b] for t in x), **options, initial_state=row)
        assert error(o[:, a:b], expected) < 1e-12
        assert all(torch.equal(s[n : n + 1], f) for s, f in zip(state, final, strict=True))


@pytest.mark.parametrize("given", [False, True])
def test_gradients(given):
    x = [t.requires_grad_() for t in make(2, 70)]
    start = naive_swa(*make(2, 4, seed=5), window=20, sinks=3)[1] if given else None
    kept = [] if start is None else [t.requires_grad_() for t in start[:4]]
    grads = []
    for form in FORMS:
        o, state = form(*x, window=20, sinks=3, initial_state=start)
        loss = (o * torch.arange(o.numel()).view_as(o).sin()).sum() + sum(t.square().sum() for t in state[:4])
        grads.append(list(torch.autograd.grad(loss, [*x, *kept])))
    assert_close(grads[1], grads[0], 1e-12)


def test_errors_name_the_problem():
    q, k, v = make(2, 5)
    state = naive_swa(q, k, v, window=4)[1]
    for form in FORMS:
        with pytest.raises(ValueError, match="window must be"):
            form(q, k, v, window=0)
        with pytest.raises(ValueError, match="initial_state has shapes"):
            form(q, k, v, window=5, initial_state=state)
        with pytest.raises(ValueError, match="not both"):
            form(q[:1], k[:1], v[:1], window=5, cu_seqlens=torch.tensor([0, 5]), lengths=torch.tensor([5]))
        with pytest.raises(ValueError, match="no multiple"):
            form(q[:, :, :3], k, v, window=5)
