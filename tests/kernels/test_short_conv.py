"""Short causal convolution."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import assert_close, error

from hybridize.kernels.short_conv import short_conv


def make(batch, tokens, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, 5), (5, width), (5,), (batch, width - 1, 5)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("given", [False, True])
def test_against_conv1d(width, tokens, activation, given):
    x, weight, bias, state = make(2, tokens, width)
    before = state if given else torch.zeros_like(state)
    extended = torch.cat([before, x], 1)
    for b in (None, bias):
        expected = F.conv1d(extended.mT, weight[:, None], b, groups=5).mT
        expected = F.silu(expected) if activation else expected
        y, final = short_conv(x, weight, b, activation=activation, initial_state=state if given else None)
        assert error(y, expected) < 1e-14
        assert torch.equal(final, extended[:, tokens:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(9, 7), (1,) * 16, (15, 0, 1)])
def test_continuing_equals_one_call(dtype, sizes):
    x, weight, bias, state = make(2, 16, dtype=dtype)
    whole, final = short_conv(x, weight, bias, activation="silu", initial_state=state)
    outputs, at = [], 0
    for size in sizes:
        y, state = short_conv(x[:, at : at + size], weight, bias, activation="silu", initial_state=state)
        outputs.append(y)
        at += size
    assert whole.dtype == final.dtype == dtype
    assert error(torch.cat(outputs, 1), whole) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(state, final) and torch.equal(final, x[:, -3:])


def test_lengths_take_the_tail_of_the_real_tokens():
    x, weight, bias, state = make(4, 9)
    lengths = torch.tensor([9, 0, 2, 8])
    y, final = short_conv(x, weight, bias, lengths=lengths, initial_state=state)
    for n, size in enumerate(lengths.tolist()):
        expected, tail = short_conv(x[n : n + 1, :size], weight, bias, initial_state=state[n : n + 1])
        assert error(y[n : n + 1, :size], expected) < 1e-14 and torch.equal(final[n : n + 1], tail)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("bounds", [[0, 5, 5, 6, 17], [0, 0, 17], [0, 17]])
def test_packed_equals_each_alone(given, bounds):
    x, weight, bias, _ = make(1, 17)
    state = torch.randn(len(bounds) - 1, 3, 5, dtype=torch.float64) if given else None
    y, final = short_conv(x, weight, bias, cu_seqlens=torch.tensor(bounds), initial_state=state)
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        before = None if state is None else state[n : n + 1]
        expected, tail = short_conv(x[:, a:b], weight, bias, initial_state=before)
        assert error(y[:, a:b], expected) < 1e-14 and torch.equal(final[n : n + 1], tail)


def test_state_is_a_copy():
    x, weight, _, state = make(2, 1)
    _, final = short_conv(x, weight, initial_state=state)
    final.zero_()
    assert x.abs().min() > 0 and state.abs().min() > 0


def test_gradients():
    leaves = [t.requires_grad_() for t in make(1, 7)]

    def run(x, weight, bias, state):
        return short_conv(x, weight, bias, activation="silu", initial_state=state)

    assert torch.autograd.gradcheck(run, leaves)
    packed = short_conv(leaves[0], leaves[1], leaves[2], cu_seqlens=torch.tensor([0, 7]), initial_state=leaves[3])[0]
    alone = short_conv(leaves[0], leaves[1], leaves[2], initial_state=leaves[3])[0]
    weights = torch.arange(35.0, dtype=torch.float64).view(1, 7, 5)
    grads = [list(torch.autograd.grad((y * weights).sum(), leaves)) for y in (packed, alone)]
    assert_close(grads[0], grads[1], 1e-13)


def test_errors_name_the_problem():
    x, weight, _, state = make(2, 5)
    with pytest.raises(ValueError, match="cannot convolve"):
        short_conv(x, weight[:3])
    with pytest.raises(ValueError, match="cannot convolve"):
        short_conv(x, weight, activation="relu")
    with pytest.raises(ValueError, match="initial_state"):
        short_conv(x, weight, initial_state=state[:, :2])
    with pytest.raises(ValueError, match="not both"):
        short_conv(x[:1], weight, cu_seqlens=torch.tensor([0, 5]), lengths=torch.tensor([5]))
