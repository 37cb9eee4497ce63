"""Learning rates as pure functions of the step: what share of the peak holds at step s of S."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def rate(schedule: str, step: int, steps: int, warmup: float = 0.05, floor: float = 0.1, decay: float = 0.2) -> float:
    """The share of the peak learning rate at `step` (from 0) of `steps`, above 0 to 1.

    All rise linearly over the first `warmup` of the steps. Then `constant` stays; `linear` and `cosine` fall to `floor`
    at the last step; `wsd` (warmup, stable, decay) stays, and falls linearly to `floor` over the last `decay` of them.
    """
    warm = round(warmup * steps)
    if step < warm:
        return (step + 1) / warm
    fall = steps - warm
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        fall = min(fall, round(decay * steps))
    elif schedule not in SCHEDULES:
        raise ValueError(f"no schedule {schedule!r}")
    done = (step - (steps - fall) + 1) / max(1, fall)  # 1 at the last step
    share = min(1.0, max(0.0, done))
    if schedule == "cosine":
        share = 0.5 * (1 - math.cos(math.pi * share))
    return 1.0 - (1.0 - floor) * share
