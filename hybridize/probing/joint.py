"""Selection that looks at layers together: one after another, with those chosen before already changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

from hybridize.probing.swa_proxy import Change, Effects, Sweep

JOINT_TOKENS = 8192  # of text: every step measures every layer that is left, so a long text would take hours


def greedy(
    sweep: Sweep,
    change: Change,
    statistic: str,
    count: int,
    keep: Collection[int],
    order: Sequence[int] = (),
    chosen: Callable[[list[int]], None] | None = None,
) -> list[int]:
    """The `count` layers in the order in which they were chosen: each adds the least loss to those before it.

    change: what is done to a layer; statistic: loss or kl, of an effect. order: layers already chosen, from which it
    goes on; chosen(order) is called after each step. A step costs about half a forward pass for each layer left.
    """
    found = list(order)
    while len(found) < count:
        with ExitStack() as stack:
            for layer in found:
                stack.enter_context(change(layer))
            losses = {
                layer: _mean(effects[""], statistic) for layer, effects in sweep.run({"": change}, skip={*found, *keep})
            }
        found.append(min(losses, key=losses.__getitem__))
        if chosen is not None:
            chosen(found.copy())
    return found


def _mean(effects: Effects, statistic: str) -> float:
    return sum(effect[statistic] for effect in effects.values()) / len(effects)
