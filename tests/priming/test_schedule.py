"""Schedules against their formulas."""

import itertools
import math

import pytest

from hybridize.priming.schedule import SCHEDULES, rate


def curve(schedule, steps=100, **options):
    return [rate(schedule, step, steps, **options) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear_and_no_step_is_idle_or_above_the_peak(schedule):
    rates = curve(schedule, warmup=0.1)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(0 < r <= 1 for r in rates)
    after = rates[9:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_formulas():
    assert curve("constant", warmup=0) == [1.0] * 100
    assert curve("linear", 10, warmup=0, floor=0.0) == pytest.approx([1 - (i + 1) / 10 for i in range(10)])
    wanted = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (i + 1) / 90)) for i in range(90)]
    assert curve("cosine", warmup=0.1, floor=0.2)[10:] == pytest.approx(wanted)
    wsd = curve("wsd", warmup=0.1, floor=0.0, decay=0.25)
    assert wsd[10:75] == [1.0] * 65
    assert wsd[75:] == pytest.approx([1 - (i + 1) / 25 for i in range(25)])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps_and_all_warmup(schedule, steps):
    for warmup in (0.0, 0.05, 1.0):
        assert all(0 < r <= 1 for r in curve(schedule, steps, warmup=warmup))


def test_an_unknown_schedule():
    with pytest.raises(ValueError, match="no schedule 'step'"):
        rate("step", 50, 100)
