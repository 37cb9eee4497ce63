"""The loop around any stage's steps: progress, the loss curve as JSON lines, checkpoints, Ctrl-C, divergence."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridize.console import Console
from hybridize.errors import Interrupted
from hybridize.priming.align import DivergedError
from hybridize.workspace import write_text

SAVE_AFTER = 60.0  # seconds of work that a killed run loses at most


@dataclass(frozen=True)
class Steps:
    """One stage's work: `take(step)` does a step and returns its log line, with a `loss`; `save` keeps where it is."""

    stage: str
    done: int
    total: int
    tokens: int  # of one step
    take: Callable[[int], dict[str, Any]]
    save: Callable[[], None]
    rate_option: str = "--lr"
    shows: str = "loss"


def run_steps(steps: Steps, folder: Path, log: Path, earlier: list[str], console: Console) -> None:
    """Take the steps that are left, and save; lines of the log beyond the checkpoint are dropped first.

    `earlier` are the stages before this one, whose lines stay. Raises Interrupted after Ctrl-C, when all is saved, and
    DivergedError with where the last good checkpoint is.
    """
    _drop_lines_from(log, steps.stage, steps.done, earlier)
    saved_at, saved_step = time.monotonic(), steps.done
    with (
        console.progress(steps.stage.capitalize(), steps.total * steps.tokens, "token") as tracker,
        _stop_gently() as stop,
        log.open("a", encoding="utf-8") as lines,
    ):
        tracker.advance(steps.done * steps.tokens)
        for step in range(steps.done, steps.total):
            try:
                line = steps.take(step)
            except DivergedError as error:
                raise DivergedError(
                    f"{error} The last good checkpoint, of step {saved_step}, is in {folder}; use a smaller "
                    f"{steps.rate_option}."
                ) from None
            lines.write(json.dumps({"stage": steps.stage, "step": step, **line}) + "\n")
            lines.flush()
            tracker.advance(steps.tokens, f"{steps.shows} {line['loss']:.4f}")
            if stop.is_set() or time.monotonic() - saved_at > SAVE_AFTER:
                steps.save()
                saved_at, saved_step = time.monotonic(), step + 1
            if stop.is_set() and step + 1 < steps.total:
                raise Interrupted(
                    f"Stopped after {step + 1} of {steps.total} steps; everything is kept in {folder}: "
                    "continue with hybridize prime --resume."
                )
    steps.save()


def _drop_lines_from(log: Path, stage: str, step: int, earlier: list[str]) -> None:
    """Forget logged steps that will be done again, because they came after the last checkpoint."""
    if not log.exists():
        return
    lines = log.read_text("utf-8").split("\n")[:-1]  # what follows the last line break was cut short by a kill

    def stays(line: str) -> bool:
        entry = json.loads(line)
        return entry["stage"] in earlier or (entry["stage"] == stage and entry["step"] < step)

    write_text(log, "".join(f"{line}\n" for line in lines if stays(line)))


@contextmanager
def _stop_gently() -> Iterator[threading.Event]:
    """Set an event at the first Ctrl-C, so that the step in progress ends; a second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handler(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
