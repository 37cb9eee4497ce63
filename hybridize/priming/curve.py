"""The loss curve of a run, drawn from its log or sent to TensorBoard as it comes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridize.errors import UsageError
from hybridize.plots import check_plot, new_figure, save
from hybridize.processes import rank

BOARD = "tensorboard"  # a folder of the run's


def check_curve(plot: Path | None, board: bool) -> None:
    """UsageError or WorkspaceError for what would keep the curve from being drawn or sent, said before the work."""
    if plot is not None:
        check_plot(plot)
    if board and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            '--tensorboard needs tensorboard, which is not installed: pip install "hybridize[tensorboard]"'
        )


@contextmanager
def sending(folder: Path, stage: str, step: int, board: bool) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """A function that sends a step's log line to TensorBoard where asked; what was sent from `step` on is dropped."""
    if not board or rank() > 0:
        yield lambda step, line: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / BOARD / stage), purge_step=step)

    def send(step: int, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name == "layers":
                for layer, error in value.items():
                    writer.add_scalar(f"layers/{layer}", error, step)
            else:
                writer.add_scalar(name, value, step)

    try:
        yield send
    finally:
        writer.close()


def draw_curve(log: Path, path: Path, title: str) -> None:
    """Draw a run's log: a panel per stage, its loss and where measured the held-out loss; replaces the file."""
    stages: dict[str, list[dict[str, Any]]] = {}
    for text in log.read_text("utf-8").splitlines() if log.exists() else []:
        line = json.loads(text)
        stages.setdefault(line["stage"], []).append(line)
    figure = new_figure(1.5 + 3.5 * max(1, len(stages)), 3.5)
    axes = figure.subplots(1, max(1, len(stages)), squeeze=False)[0]
    for axis, (stage, lines) in zip(axes, stages.items(), strict=False):
        axis.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=1, label="loss")
        if measured := [(line["step"], line["held_out"]) for line in lines if "held_out" in line]:
            axis.plot(*zip(*measured, strict=True), marker="o", label="held out")
        axis.set_title(stage, fontsize="small", loc="left")
        axis.set_xlabel("step")
        axis.set_ylabel("mean relative error" if stage == "align" else "nats per token")
        axis.legend(fontsize="x-small")
    figure.suptitle(title, fontsize="medium")
    save(figure, path)
