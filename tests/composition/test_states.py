"""Composed states against the recurrences they stand for, written out."""

from itertools import permutations

import pytest
import torch
from hybrid_cases import GKA, make, tokens

from hybridize.composition.states import METHODS, compose_states
from hybridize.errors import UsageError
from hybridize.hybrid.model import mixers
from hybridize.mixers.tokens import PaddedRows

KINDS = ("scalar", "matrix")
HEADS, DIM = 3, 5


def chunks(kind, count, seed=0):
    """A start and, for each chunk, what it multiplies by, what it adds, and where it ends from the start."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    start = 3 * normal(HEADS, DIM, DIM)
    transitions, added = [], [normal(HEADS, DIM, DIM) for _ in range(count)]
    for _ in range(count):
        if kind == "scalar":
            transitions.append({"log_decay": -normal(HEADS).abs()})
        else:
            transitions.append({"P": torch.linalg.qr(normal(HEADS, DIM, DIM)).Q * torch.rand(1, generator=generator)})
    states = [{"S": multiply(t, start) + h, "conv": h[0]} for t, h in zip(transitions, added, strict=True)]
    return start, transitions, added, states


def multiply(transition, x):
    return transition["P"] @ x if "P" in transition else transition["log_decay"].exp()[:, None, None] * x


def in_order(start, transitions, added, order):
    for i in order:
        start = multiply(transitions[i], start) + added[i]
    return start


def composed(kind, method, count=4, order=None, seed=0):
    start, transitions, _, states = chunks(kind, count, seed)
    order = range(count) if order is None else order
    return compose_states({"S": start}, [states[i] for i in order], [transitions[i] for i in order], ["S"], method)["S"]


def mean(orders, start, transitions, added):
    return torch.stack([in_order(start, transitions, added, order) for order in orders]).mean(0)


def rotations(count):
    return [[*range(r, count), *range(r)] for r in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_method_is_what_it_says(kind, count):
    start, transitions, added, states = chunks(kind, count)
    every = mean(permutations(range(count)), start, transitions, added)
    cyclic = mean(rotations(count), start, transitions, added)
    want = {
        "ordered": in_order(start, transitions, added, range(count)),
        "picaso": every if kind == "scalar" else cyclic,
        "picaso-r": cyclic,
        "soup": torch.stack([state["S"] for state in states]).mean(0),
        "sum": start + torch.stack(added).sum(0),
        "none": start,
    }
    assert want.keys() == METHODS.keys()
    for method, x in want.items():
        got = compose_states({"S": start}, states, transitions, ["S"], method)
        assert (got["S"] - x).abs().max() < 1e-12, f"{kind} {method} of {count}"
        assert torch.equal(got["conv"], states[-1]["conv"])
    if count > 2:
        assert (every - cyclic).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_prefix_is_a_state_of_zeros(kind):
    start, transitions, added, _ = chunks(kind, 4)
    states = [{"S": h, "conv": h[0]} for h in added]
    for method in METHODS:
        got = compose_states(None, states, transitions, ["S"], method)["S"]
        want = compose_states({"S": torch.zeros_like(start)}, states, transitions, ["S"], method)["S"]
        assert torch.equal(got, want)
    assert not compose_states(None, states, transitions, ["S"], "none")["S"].any()


def test_the_order_of_chunks_does_not_matter_where_that_is_promised():
    for kind, method in (("scalar", "picaso"), ("scalar", "soup"), ("scalar", "sum"), ("matrix", "soup")):
        for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
            assert (composed(kind, method, order=order) - composed(kind, method)).abs().max() < 1e-12
    for kind, method in (("scalar", "picaso-r"), ("matrix", "picaso"), ("matrix", "picaso-r")):
        want = composed(kind, method)
        for order in rotations(4):
            assert (composed(kind, method, order=order) - want).abs().max() < 1e-12
        assert (composed(kind, method, order=[1, 0, 2, 3]) - want).abs().max() > 1e-3
    assert (composed("scalar", "ordered", order=[1, 0, 2, 3]) - composed("scalar", "ordered")).abs().max() > 1e-3


@pytest.mark.parametrize("log_decay", [-1e-9, -0.01, -3.0, -900.0])
def test_many_chunks_neither_overflow_nor_vanish(log_decay):
    """200 chunks in fp32 of one decay a, with increments of one: the order no longer matters, and the sum is known."""
    count, start = 200, torch.full((HEADS, DIM, DIM), 2.0)
    a = torch.tensor(log_decay, dtype=torch.float64).exp()
    transitions = [{"log_decay": torch.full((HEADS,), log_decay)} for _ in range(count)]
    states = [{"S": (a * start + 1).float()} for _ in range(count)]
    powers = a ** torch.arange(count)
    for method in ("picaso", "picaso-r", "ordered"):
        got = compose_states({"S": start}, states, transitions, ["S"], method)["S"]
        want = a**count * 2 + powers.sum()
        assert got.isfinite().all() and (got - want).abs().max() < 1e-4 * want, f"{method} {log_decay}"


def test_an_unknown_method_is_refused():
    start, transitions, _, states = chunks("scalar", 2)
    with pytest.raises(UsageError, match="picaso"):
        compose_states({"S": start}, states, transitions, ["S"], "stew")


MIXERS = {
    "gka": ("GKA-*", GKA),
    "gdn": ("GDN-*", {}),
    "mamba2": ("M2-*", {}),
    "swa": ("SWA-*", {"window": 8, "sinks": 0}),
    "swa-sinks": ("SWA-*", {"window": 8, "sinks": 5}),
}
UNEVEN = (9, 1, 30, 3, 2, 80)


@pytest.mark.parametrize("prefix", [0, 3, 70])
@pytest.mark.parametrize("kind", MIXERS)
def test_chunks_of_one_recurrence_in_order_are_one_pass(kind, prefix):
    """Every chunk starts from the prefix's recurrent state, and from the convolution tails of the tokens before it."""
    mixer = mixers(make("qwen3", *MIXERS[kind]))[0]
    total = prefix + sum(UNEVEN)
    x = torch.randn(2, total, mixer.config.hidden_size, generator=torch.Generator().manual_seed(2))
    angles = torch.arange(total)[:, None] * torch.tensor([0.7, 0.1, 0.03, 0.005, 0.7, 0.1, 0.03, 0.005] * 2)
    with torch.no_grad():
        inputs = mixer.project(x, (angles.cos()[None], angles.sin()[None]))
        part = lambda begin, end: {name: y[:, begin:end] for name, y in inputs.items()}
        _, want = mixer.scan(inputs, None, None)
        start = mixer.scan(part(0, prefix), None, None)[1] if prefix else None
        before, begin, states, transitions = start, prefix, [], []
        for length in UNEVEN:
            given = None if before is None else dict(before)
            if given is not None:
                zero = {name: torch.zeros_like(given[name]) for name in mixer.recurrent}
                given |= {name: zero[name] if start is None else start[name] for name in mixer.recurrent}
                if not mixer.recurrent:
                    given = start
            piece = part(begin, begin + length)
            state = mixer.scan(piece, given, None)[1]
            states.append(state)
            transitions.append(mixer.transition(piece, given, None))
            before, begin = state, begin + length
    for row in range(2):
        of = lambda every, row=row: [{name: y[row] for name, y in tensors.items()} for tensors in every]
        before = of([start])[0] if start else None
        got = compose_states(before, of(states), of(transitions), mixer.recurrent, "ordered")
        for name, y in got.items():
            error = (y - want[name][row]).abs().max() if y.numel() else 0.0
            assert error < 1e-5, f"{kind} {name} is off by {error:.1e}"


def test_transitions_leave_padding_out():
    for kind in ("gka", "gdn", "mamba2"):
        model = make("qwen3", *MIXERS[kind])
        mixer = mixers(model)[0]
        x = model.get_input_embeddings()(tokens(2, 12)).detach()
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[1, 7:] = False
        with torch.no_grad():
            inputs = mixer.project(x, None)
            got = mixer.transition(inputs, None, PaddedRows.from_mask(mask))
            for row, length in ((0, 12), (1, 7)):
                alone = mixer.transition({n: y[row : row + 1, :length] for n, y in inputs.items()}, None, None)
                for name, y in alone.items():
                    assert (got[name][row] - y[0]).abs().max() < 1e-6, f"{kind} {name}"
                    assert (y - torch.eye(16) if name == "P" else y).abs().max() > 1e-3
