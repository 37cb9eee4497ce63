"""A probe's report: every layer's results and score, and the layers that a score selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import Any

import torch

from hybridize.errors import UsageError
from hybridize.hybrid.memory import CacheBytes, on_meta
from hybridize.hybrid.plan import LayerPlan
from hybridize.probing.named import layer_scores, parse_scores
from hybridize.probing.options import ProbeOptions
from hybridize.probing.scores import TaskScores
from hybridize.probing.select import evenly_spaced, how_many, lowest
from hybridize.workspace import write_json

FORMAT = 1
CONTEXTS = tuple(1024 * thousands for thousands in (32, 128, 256))  # tokens at which caches are compared
Layers = list[dict[str, Any]]


@dataclass
class ProbeReport:
    """What was measured, and what is selected. layers[l] holds "layer", a part per method, and "score".

    A higher score means that more is lost when this layer stops being attention. base: the unchanged model's loss and
    accuracy by group; retrieval: its accuracy by task, length and depth; buys: see `weigh`. order: the layers that
    were chosen together, best first; without it the lowest scores are selected.
    """

    model: str | None
    num_layers: int
    ratio: float
    by: str
    kind: str
    keep: tuple[int, ...] = ()
    context: int | None = None
    windows: list[int] = field(default_factory=list)
    sinks: int | None = None
    methods: list[str] = field(default_factory=list)
    data: str | None = None
    seed: int | None = None
    layers: Layers = field(default_factory=list)
    base: dict[str, dict[str, float]] = field(default_factory=dict)
    retrieval: dict[str, Any] | None = None
    order: list[int] | None = None
    buys: dict[str, Any] | None = None
    path: str | None = None

    @staticmethod
    def of_options(options: ProbeOptions, num_layers: int) -> ProbeReport:
        """An empty report of a probe that is to be made."""
        return ProbeReport(
            options.model,
            num_layers,
            options.ratio,
            options.by,
            options.layer,
            options.keep,
            options.context,
            list(options.windows),
            options.sinks,
            list(options.methods),
            options.data,
            options.seed,
        )

    @staticmethod
    def of_tasks(
        model: str | None, given: TaskScores, ratio: float, by: str | None, kind: str, keep: tuple[int, ...]
    ) -> ProbeReport:
        """A report of task scores measured elsewhere."""
        report = ProbeReport(
            model, len(given.layers), ratio, "tasks" if by is None else by, kind, keep, methods=["tasks"]
        )
        rows = zip(given.layers, given.losses, strict=True)
        report.finish(
            [
                {"layer": n, "tasks": {**dict(zip(given.tasks, row, strict=True)), "loss": loss}}
                for n, (row, loss) in enumerate(rows)
            ]
        )
        return report

    def finish(self, layers: Layers) -> None:
        """Take all layers' results, and give each its score."""
        self.layers = layers
        for layer, score in zip(layers, self.scores(self.by), strict=True):
            layer["score"] = score

    def scores(self, by: str) -> list[float]:
        """One number per layer, from 0, of the score of that name (see NamedScore); of 'swa+hankel' the mean ranks."""
        return layer_scores(parse_scores(by, self.windows, self.methods), self.layers)

    def select(
        self,
        ratio: float | None = None,
        count: int | None = None,
        by: str | None = None,
        kind: str | None = None,
        keep: Sequence[int] | None = None,
    ) -> LayerPlan:
        """The plan that converts `count` layers, or round(ratio * layers) and at least one: the lowest scores.

        Layers in `keep` stay attention. What is not given is as the probe was told. UsageError for what cannot be.
        """
        ratio = self.ratio if ratio is None and count is None else ratio
        keep = self.keep if keep is None else keep
        count = how_many(self.num_layers, ratio, count, keep)
        if self.order is None or by is not None or set(keep) - set(self.keep):
            layers = lowest(self.scores(by or self.by), count, keep)
        elif count <= len(self.order):
            layers = sorted(self.order[:count])
        else:
            raise UsageError(
                f"{len(self.order)} layers were chosen together, fewer than the {count} asked for; probe with a larger "
                "--ratio."
            )
        return LayerPlan.from_layers(self.num_layers, layers, kind or self.kind)

    def weigh(self, config: Any, dtype: torch.dtype) -> None:
        """Work out what the selection buys: a hybrid's states and caches, in `dtype`, beside those of its source."""
        _, hybrid = on_meta(config, self.select(), {})
        cache = CacheBytes.of(hybrid, dtype)
        contexts = [cache.at(tokens) for tokens in CONTEXTS]
        self.buys = {"dtype": str(dtype).removeprefix("torch."), **cache.summary(), "contexts": contexts}

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        plan, scores = self.select(), [layer["score"] for layer in self.layers]
        uniform = evenly_spaced(self.num_layers, len(plan.layers), self.keep)
        return {
            "format": FORMAT,
            "model": self.model,
            "context": self.context,
            "window": self.windows[0] if self.windows else None,
            "windows": self.windows,
            "sinks": self.sinks,
            "methods": self.methods,
            "data": self.data,
            "seed": self.seed,
            "base": self.base,
            "retrieval": self.retrieval,
            "layers": self.layers,
            "selected": {
                "ratio": self.ratio,
                "by": self.by,
                "order": self.order,
                "kind": self.kind,
                "keep": list(self.keep),
                "layers": plan.layers,
                "pattern": str(plan),
                "score": fsum(scores[layer] for layer in plan.layers),
                "uniform": {"layers": uniform, "score": fsum(scores[layer] for layer in uniform)},
            },
            "buys": self.buys,
            "report": self.path,
        }

    def write(self, path: Path) -> None:
        """Write probe.json in one step: the report, and the layers selected for every count, for a later ratio."""
        self.path = str(path)
        most = self.num_layers - len(self.keep) if self.order is None else len(self.order)
        counts = range(1, most + 1)
        selections = [self.select(count=count).layers for count in counts]
        write_json(path, {**self.to_dict(), "selections": selections})
