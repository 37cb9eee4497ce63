"""A probe's report: from task scores that were measured elsewhere, and how any report is left for `prime` to find."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hybridize.builtin import open_model
from hybridize.console import Console
from hybridize.errors import DataError, UsageError
from hybridize.hybrid.families import check_config
from hybridize.hybrid.plan import check_kind
from hybridize.probing.options import REPORT_FILE, name_of
from hybridize.probing.report import ProbeReport
from hybridize.probing.scores import read_scores
from hybridize.probing.select import share_of
from hybridize.workspace import Workspace, check_place


def from_scores(
    path: Path,
    model: str | os.PathLike[str] | None,
    revision: str | None,
    place: Workspace,
    console: Console,
    *,
    ratio: float | None = None,
    count: int | None = None,
    keep: Sequence[int] = (),
    by: str | None = None,
    layer: str = "gka",
    select: str = "lowest",
) -> ProbeReport:
    """A report from task scores measured elsewhere; with a model, for `prime` of that model."""
    if select != "lowest":
        raise UsageError(
            f"--select {select} changes a model's layers, and --scores has their scores only; leave it out."
        )
    given = read_scores(path)
    name = source = None
    if model is not None:
        source = open_model(model, revision, console.note, weights=False)
        check_config(source.config)
        name, _ = name_of(source)
        if source.config.num_hidden_layers != len(given.layers):
            raise DataError(
                f"{path} scores {len(given.layers)} layers, but {name} has {source.config.num_hidden_layers}: give the "
                "scores of this model."
            )
    check_kind(layer)
    share = share_of(len(given.layers), ratio, count, keep)
    report = ProbeReport.of_tasks(name, given, share, by, layer, tuple(sorted(keep)))
    if source is not None:
        report.weigh(source.config, source.stored_dtype)
    check_place(place.run_folder(f"{path.stem}-probe").absolute(), "--workspace")
    finish(report, place.make_run_folder(f"{path.stem}-probe"), place, console)
    return report


def finish(report: ProbeReport, folder: Path, place: Workspace, console: Console) -> None:
    """Write the report into its run's folder, and record it in the workspace."""
    path = folder / REPORT_FILE
    report.write(path)
    place.record("probe", path, model=report.model)
    note = f"The report is {path}."
    if report.model is not None:
        note += f" hybridize prime {shlex.quote(report.model)}{place.option} takes its selection."
    console.note(note)
