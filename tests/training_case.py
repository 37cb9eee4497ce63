"""Packed random batches and pico models, for the tests of training."""

import torch
from hybrid_cases import GKA, source

import hybridize
from hybridize.priming.batches import Batch


class RandomStream:
    """Rows of random tokens in documents of uneven length, drawn anew for every step from the seed and the step."""

    def __init__(self, vocabulary, rows=2, length=24, seed=0):
        self.vocabulary, self.shape, self.seed, self.step = vocabulary, (rows, length), seed, 0

    def batch(self):
        pick = torch.Generator().manual_seed(1000 * self.seed + self.step)
        self.step += 1
        ids = torch.randint(1, self.vocabulary, self.shape, generator=pick)
        opens = torch.rand(self.shape, generator=pick) < 0.1
        opens[:, 0] = True
        place = torch.arange(self.shape[1]).expand(self.shape)
        positions = place - torch.where(opens, place, 0).cummax(1).values
        return Batch(ids, positions, ~opens & (torch.rand(self.shape, generator=pick) < 0.8))

    def state(self):
        return {"step": self.step}

    def load_state(self, state):
        self.step = state["step"]


def pair(case="llama", pattern="*-GDN-*-GKA", **settings):
    """A pico source, and its hybrid that shares what it can."""
    teacher = source(case, pattern.count("-") + 1).eval()
    settings = settings or (GKA if "GKA" in pattern else {})
    hybrid = hybridize.convert(teacher, hybridize.LayerPlan.from_pattern(pattern), share=True, **settings)
    return teacher, hybrid
