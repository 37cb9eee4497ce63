"""Per-layer task scores that were measured elsewhere, from a CSV file.

The file has a column `layer_num` and one column per task: row -1, if there is one, holds the unchanged model, every
other row the model with this one layer weakened. There a higher score is better.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from hybridize.errors import DataError

LAYER = "layer_num"
_BASELINE = -1


@dataclass(frozen=True)
class TaskScores:
    """Task scores [layers][tasks] of a model with one layer weakened, and [tasks] of the unchanged model if known."""

    tasks: tuple[str, ...]
    layers: tuple[tuple[float, ...], ...]
    baseline: tuple[float, ...] | None

    @property
    def losses(self) -> list[float]:
        """What each layer is worth: the unchanged model's mean task score (or else 0) minus that without the layer."""
        base = _mean(self.baseline) if self.baseline is not None else 0.0
        return [base - _mean(row) for row in self.layers]


def read_scores(path: Path) -> TaskScores:
    """Read the CSV; DataError names the row (as a spreadsheet counts them) that is wrong."""
    try:
        # A byte order mark, which spreadsheets write, is no part of the first column's name.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as CSV in UTF-8.") from None
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"There is no file {path}; give --scores a CSV file of task scores per layer.") from None
    reader = csv.reader(lines, strict=True)
    rows: dict[int, tuple[float, ...]] = {}
    header: list[str] = []
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            where = f"Row {reader.line_num} of {path}"
            if not header:
                header = _header(cells, where)
                continue
            layer, scores = _row(cells, header, where)
            if layer in rows:
                raise DataError(f"{where} gives layer {layer} a second time; keep one row per layer.")
            rows[layer] = scores
    except csv.Error as error:
        raise DataError(f"Row {reader.line_num} of {path} is not CSV ({error}); correct it.") from None
    if not header:
        raise DataError(f"{path} is empty; it needs a first row such as {LAYER},task and one row per layer.")
    baseline = rows.pop(_BASELINE, None)
    if not rows:
        raise DataError(f"{path} has no row for a layer, only its first row; add one row per layer, from 0.")
    missing = next(layer for layer in range(len(rows) + 1) if layer not in rows)
    if missing < len(rows):
        raise DataError(
            f"{path} has no row for layer {missing}, but one for layer {max(rows)}; give every layer from 0 a row."
        )
    tasks = tuple(name for name in header if name != LAYER)
    return TaskScores(tasks, tuple(rows[layer] for layer in sorted(rows)), baseline)


def _header(cells: list[str], where: str) -> list[str]:
    """The column names; they may stand in any order."""
    if LAYER not in cells:
        if len(cells) == 1 and (found := next((mark for mark in (";", "\t") if mark in cells[0]), None)):
            name = "semicolons" if found == ";" else "tabs"
            raise DataError(f"{where} is separated by {name}; save the file with commas (and decimal points).")
        raise DataError(f"{where} does not name a column {LAYER}; begin the file with {LAYER} and the tasks' names.")
    for position, name in enumerate(cells, 1):
        if not name:
            raise DataError(f"{where} has no name for column {position}; name it, or remove the column.")
        if cells.count(name) > 1:
            raise DataError(f"{where} names the column {name} twice; keep one of them.")
    if len(cells) == 1:
        raise DataError(f"{where} names no task beside {LAYER}; add one column per task.")
    return cells


def _row(cells: list[str], header: list[str], where: str) -> tuple[int, tuple[float, ...]]:
    """The layer's number and its scores in the header's order."""
    if len(cells) != len(header):
        raise DataError(f"{where} has {len(cells)} columns but the first row names {len(header)}; make them equal.")
    values = dict(zip(header, cells, strict=True))
    text = values.pop(LAYER)
    try:
        layer = int(text)
    except ValueError:
        raise DataError(f"{where} has {text!r} as its {LAYER}, which is no whole number; correct it.") from None
    if layer < _BASELINE:
        raise DataError(f"{where} is for layer {layer}; layers count from 0, and -1 is the unchanged model.")
    return layer, tuple(_number(cell, task, where) for task, cell in values.items())


def _number(text: str, task: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where} has {text!r} as the score of {task}, which is no number; measure or correct it.")
    return value


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)
