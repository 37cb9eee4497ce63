"""One layer's state of many chunks of text, from its states after each chunk alone.

All chunks were read from one start, the prefix's state S_p. A chunk that multiplies an older state by A_i and adds H_i
then ends in S_i = A_i S_p + H_i, and takes any other state X to A_i X + H_i = S_i + A_i (X - S_p). So in terms of what
a state has beyond S_p, the chunks are a recurrence that starts from zero with increments S_i - S_p, in which the prefix
enters exactly once; PICASO (arXiv 2502.17605) averages it over orders of the chunks.

n is the number of chunks; a state of H heads is [H, D, D'], without a batch dimension. Every method holds the chunks'
states (or reads them one by one from where they lie) and writes one more; times are in passes over one state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridize.errors import UsageError
from hybridize.mixers.tokens import State

METHODS = {
    "picaso": "average over all orders of the chunks where a state decays by a scalar, over rotations for a matrix",
    "picaso-r": "average over all rotations of the chunks",
    "ordered": "as if the chunks were read one after the other",
    "soup": "mean of the chunks' states",
    "sum": "the prefix's state and what every chunk adds to it, undecayed",
    "none": "the prefix's state alone",
}


def check_method(method: str) -> None:
    """UsageError for a method that is none of METHODS."""
    if method not in METHODS:
        raise UsageError(f"There is no composition method {method!r}; choose from {', '.join(METHODS)}.")


def compose_states(
    prefix: State | None, states: Sequence[State], transitions: Sequence[State], recurrent: Sequence[str], method: str
) -> State:
    """One layer's composed state; `recurrent` names the tensors that the transitions multiply.

    The other tensors (convolution tails) are the last chunk's. A layer without recurrent tensors appends keys.
    """
    check_method(method)
    if not recurrent:
        return append_keys(prefix, states) if method != "none" else _start(prefix, states)
    start = _start(prefix, states)
    composed = dict(states[-1])
    for name in recurrent:
        composed[name] = _compose(start[name], [state[name] for state in states], transitions, method)
    return composed


def _start(prefix: State | None, states: Sequence[State]) -> State:
    return {name: torch.zeros_like(x) for name, x in states[0].items()} if prefix is None else prefix


def _compose(start: Tensor, states: Sequence[Tensor], transitions: Sequence[State], method: str) -> Tensor:
    if method == "none":
        return start.clone()
    if method == "soup":
        return _combine(start, states, start.new_full((len(states), len(start)), 1 / len(states)))
    if "P" in transitions[0]:
        matrices = [transition["P"] for transition in transitions]
        if method == "sum":
            return start + sum(state - P @ start for state, P in zip(states, matrices, strict=True))
        return ordered(start, states, matrices) if method == "ordered" else rotated(start, states, matrices)
    log_decay = torch.stack([transition["log_decay"].double() for transition in transitions])
    if method == "sum":
        ones = torch.ones_like(log_decay)
        return _combine(start, states, ones, 1.0 - log_decay.exp().sum(0))
    weights = {"ordered": ordered_weights, "picaso": order_weights, "picaso-r": rotation_weights}[method](log_decay)
    return _combine(start, states, weights)


def _combine(start: Tensor, states: Sequence[Tensor], weights: Tensor, own: Tensor | None = None) -> Tensor:
    """own S_p + sum_k w_k S_k for weights [n, H] and own [H], by default what makes all weights add up to one."""
    own = 1.0 - weights.double().sum(0) if own is None else own
    total = start * own.to(start)[:, None, None]
    for state, weight in zip(states, weights.to(start), strict=True):
        total.addcmul_(state, weight[:, None, None])
    return total


# -- scalar decays: a weight per chunk and head, in fp64 ---------------------------------------------------------------


def ordered_weights(log_decay: Tensor) -> Tensor:
    """How much of each chunk is left behind the chunks after it: [n, H] -> [n, H]. n passes."""
    return (log_decay.sum(0) - log_decay.cumsum(0)).exp()


def order_weights(log_decay: Tensor) -> Tensor:
    """The mean of `ordered_weights` over all n! orders: [n, H] -> [n, H]. n passes, and n^2 H scalars of work.

    Put the chunks in order by a uniform number drawn for each: given chunk k's is 1 - t, every other comes after it
    with probability t, so that W_k = integral over t in [0, 1] of prod_{j != k} (1 - t + t a_j): a polynomial of degree
    n - 1, for which Gauss-Legendre quadrature with n/2 nodes is exact, and whose terms neither overflow nor cancel.
    """
    count = len(log_decay)
    nodes, shares = np.polynomial.legendre.leggauss((count + 1) // 2)
    weights = torch.zeros_like(log_decay)
    missing = torch.expm1(log_decay)  # a - 1
    for t, share in zip((nodes + 1) / 2, shares / 2, strict=True):
        factors = torch.log1p(t * missing)
        weights += share * (factors.sum(0) - factors).exp()
    return weights


def rotation_weights(log_decay: Tensor) -> Tensor:
    """The mean of `ordered_weights` over the n rotations: [n, H] -> [n, H]. n passes, and n^2 H scalars of work."""
    count, decay = len(log_decay), log_decay.exp()
    weights, left = torch.zeros_like(decay), torch.ones_like(decay)
    for behind in range(count):
        weights += left
        left = left * decay.roll(-behind - 1, dims=0)
    return weights / count


# -- matrix transitions -----------------------------------------------------------------------------------------------


def ordered(start: Tensor, states: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """The state behind all chunks in their order. n matrix products, nothing held."""
    beyond = torch.zeros_like(start)
    for state, P in zip(states, matrices, strict=True):
        beyond = state - start + P @ beyond
    return start + beyond


def rotated(start: Tensor, states: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """The mean over the n rotations of `ordered`. 5n matrix products; holds n + 4 more states.

    Rotation r runs chunks r to n - 1 and then chunks 0 to r - 1: tails[r] is where the first part ends, `head` where
    the second would end if it began from the prefix, and `through` what it multiplies what it begins from by.
    """
    count = len(states)
    identity = torch.eye(start.shape[-2], device=start.device, dtype=start.dtype).expand(*start.shape[:-1], -1)
    tails, through = [torch.zeros_like(start)], identity
    for r in reversed(range(count)):
        tails.append(through @ (states[r] - start) + tails[-1])
        through = through @ matrices[r]
    tails.reverse()
    head, through, total = torch.zeros_like(start), identity, torch.zeros_like(start)
    for r in range(count):
        total += through @ tails[r] + head
        head = states[r] - start + matrices[r] @ head
        through = matrices[r] @ through
    return start + total / count


# -- windows of keys ---------------------------------------------------------------------------------------------------


def append_keys(prefix: State | None, states: Sequence[State]) -> State:
    """The sliding window behind all chunks in their order: exact, in as much as fits the window.

    Each state is keys, values [window - 1, Hk, D] (newest last), sink_keys, sink_values [sinks, Hk, D], and seen.
    """
    window, sinks = states[0]["keys"].shape[0], states[0]["sink_keys"].shape[0]
    before = 0 if prefix is None else int(prefix["seen"])
    parts = [] if prefix is None else [(prefix, 0)]
    parts += [(state, before) for state in states]
    joined = dict(states[0])
    for name in ("keys", "values"):
        tails = [state[name][window - min(window, int(state["seen"]) - old) :] for state, old in parts]
        tail = torch.cat(tails)[-window:] if window else tails[0]
        joined[name] = torch.cat([tail.new_zeros(window - len(tail), *tail.shape[1:]), tail])
    for name in ("sink_keys", "sink_values"):
        heads = [state[name][min(sinks, old) : min(sinks, int(state["seen"]))] for state, old in parts]
        head = torch.cat(heads)[:sinks]
        joined[name] = torch.cat([head, head.new_zeros(sinks - len(head), *head.shape[1:])])
    joined["seen"] = states[0]["seen"].new_tensor(sum(int(state["seen"]) - old for state, old in parts))
    return joined
