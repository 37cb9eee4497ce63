"""A probe's report: every layer's results and score, and the layers that a score selects."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridize.hybrid.plan import LayerPlan
from hybridize.probing.named import NamedScore
from hybridize.probing.options import ProbeOptions
from hybridize.probing.scores import TaskScores
from hybridize.workspace import write_json

FORMAT = 1
Layers = list[dict[str, Any]]


@dataclass
class ProbeReport:
    """What was measured, and what is selected. layers[l] holds "layer", a part per method, and "score".

    A higher score means that more is lost when this layer stops being attention. base: the unchanged model's loss and
    accuracy by group; retrieval: its accuracy by task, length and depth.
    """

    model: str | None
    num_layers: int
    ratio: float
    by: str
    kind: str
    context: int | None = None
    windows: list[int] = field(default_factory=list)
    sinks: int | None = None
    methods: list[str] = field(default_factory=list)
    data: str | None = None
    seed: int | None = None
    layers: Layers = field(default_factory=list)
    base: dict[str, dict[str, float]] = field(default_factory=dict)
    retrieval: dict[str, Any] | None = None
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
            options.context,
            list(options.windows),
            options.sinks,
            list(options.methods),
            options.data,
            options.seed,
        )

    @staticmethod
    def of_tasks(model: str | None, given: TaskScores, ratio: float, kind: str, by: str | None = None) -> ProbeReport:
        """A report of task scores measured elsewhere."""
        report = ProbeReport(model, len(given.layers), ratio, by or "tasks", kind, methods=["tasks"])
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
        """One number per layer, from 0, of the score of that name (see NamedScore). UsageError for an unknown one."""
        score = NamedScore.parse(by, self.windows, self.methods)
        return [score.read(layer) for layer in self.layers]

    def select(self, ratio: float, by: str | None = None, kind: str | None = None) -> LayerPlan:
        """The plan that converts round(ratio * layers) layers, at least one: those with the lowest scores."""
        kind = kind or self.kind
        count = len(LayerPlan.evenly_spaced(self.num_layers, ratio, kind).layers)
        return LayerPlan.from_layers(self.num_layers, self._choose(by or self.by, count), kind)

    def _choose(self, by: str, count: int) -> list[int]:
        scores = self.scores(by)
        return sorted(sorted(range(len(scores)), key=scores.__getitem__)[:count])

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        plan = self.select(self.ratio)
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
                "kind": self.kind,
                "layers": plan.layers,
                "pattern": str(plan),
            },
            "report": self.path,
        }

    def write(self, path: Path) -> None:
        """Write probe.json in one step: the report, and the layers selected for every count, for a later ratio."""
        self.path = str(path)
        selections = [self._choose(self.by, count + 1) for count in range(self.num_layers)]
        write_json(path, {**self.to_dict(), "selections": selections})
