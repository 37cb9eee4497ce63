"""Draws a probe's scores: a panel per method, a bar per layer, the layers that are converted in another colour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridize.plots import new_figure, save
from hybridize.probing.report import ProbeReport

_WHAT = {
    "swa": "KL in nats per token",
    "hankel": "singular values above 0.05, without sinks",
    "retrieval": "loss of answers in nats per token",
    "mixer": "KL in nats per token, fitted mixer in place",
    "tasks": "mean score lost",
}


@dataclass(frozen=True)
class _Panel:
    """bars: a number per layer; lines: label -> a number per layer."""

    title: str
    bars: list[float]
    lines: dict[str, list[float]]


def draw(report: ProbeReport, path: Path) -> None:
    """Draw the scores into a file, in the format that its suffix names; replaces it in one step."""
    panels = _panels(report)
    figure = new_figure(max(7.0, 0.22 * report.num_layers), 1.0 + 2.2 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, report.select().layers)
    axes[-1].set_xlabel("layer")
    figure.suptitle(_title(report), fontsize="medium")
    save(figure, path)


def _panels(report: ProbeReport) -> list[_Panel]:
    """One per method, its other windows as lines; and before them the score that selects, if it is none of these."""
    panels = []
    for method in report.methods:
        windows = report.windows if method in ("swa", "retrieval") else []
        first = f", window {windows[0]}" if windows else ""
        lines = {f"window {window}": report.scores(f"{method}@{window}") for window in windows[1:]}
        panels.append(_Panel(f"{method}: {_WHAT[method]}{first}", report.scores(method), lines))
    scores = [layer["score"] for layer in report.layers]
    if all(scores != panel.bars for panel in panels):
        panels.insert(0, _Panel(f"score: {report.by}", scores, {}))
    return panels


def _draw_panel(axis: Any, panel: _Panel, converted: list[int]) -> None:
    stays = [layer for layer in range(len(panel.bars)) if layer not in converted]
    axis.bar(converted, [panel.bars[n] for n in converted], color="#d95f02", hatch="//", label="converted")
    axis.bar(stays, [panel.bars[n] for n in stays], color="#9aa5b1", label="stays attention")
    for label, values in panel.lines.items():
        axis.plot(values, marker=".", linewidth=1, label=label)
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set_title(panel.title, fontsize="small", loc="left")
    axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _title(report: ProbeReport) -> str:
    parts = [Path(report.model).name if report.model else "task scores"]
    if report.context is not None:
        parts += [f"context {report.context}", f"window {report.windows[0]}"]
    return ", ".join([*parts, f"selected by {report.by}"])
