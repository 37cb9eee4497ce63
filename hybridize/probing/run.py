"""`probe`: every attention layer is scored, in a run that can be stopped and resumed, and layers are selected."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hybridize.builtin import open_model
from hybridize.console import Console
from hybridize.devices import pick_dtype
from hybridize.errors import CheckpointError, Interrupted, SourceError, UsageError
from hybridize.hybrid.families import check_attention, check_config, check_family
from hybridize.hybrid.memory import on_meta
from hybridize.hybrid.model import mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.hybrid.walk import entry_device
from hybridize.probing.estimate import Need, Placement, batch_tokens, need, target_of
from hybridize.probing.external import finish, from_scores
from hybridize.probing.finite import check_weights
from hybridize.probing.fitted import FIT_TOKENS, ONE_DEVICE, align_mixers, fitted_hybrid, in_place
from hybridize.probing.joint import JOINT_TOKENS, greedy
from hybridize.probing.measure import (
    Amount,
    Prepared,
    Record,
    measured_hankel,
    prepare,
    swept_layers,
    text_batches,
)
from hybridize.probing.named import parse_scores
from hybridize.probing.options import (
    LAYERS_FILE,
    MIXER,
    REPORT_FILE,
    RUN_FILE,
    ProbeOptions,
    make_options,
    name_of,
)
from hybridize.probing.report import ProbeReport
from hybridize.probing.select import how_many
from hybridize.probing.swa_proxy import Change, Sweep, windows
from hybridize.sources import Source
from hybridize.tasks.retrieval import TASKS, measure, summary
from hybridize.tasks.scored import Scored
from hybridize.workspace import Workspace, check_place, locked, named_errors, write_json, write_text


def probe(
    model: Any = None,
    tokenizer: Any = None,
    texts: Sequence[str] | None = None,
    *,
    scores: str | os.PathLike[str] | None = None,
    resume: bool = False,
    device: str | None = None,
    gpu_memory: float | None = None,
    workspace: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    revision: str | None = None,
    **options: Any,
) -> ProbeReport:
    """Score every attention layer by what is lost when it stops being attention, and select the layers to convert.

    model: a name as on the command line, or a loaded model, then with its tokenizer. texts: documents to measure on,
    else options' `data`. scores: a CSV of task scores measured elsewhere, which needs no model. Options are those of
    make_options; gpu_memory: GiB to use of each GPU, at most. A run on a named model, or in a workspace that is given,
    is kept there and recorded. Raises HybridizeError children.
    """
    console = console or Console(quiet=True)
    place = Workspace(Path(workspace) if workspace else None)
    if scores is not None:
        return from_scores(Path(scores).expanduser(), model, revision, place, console, **options)
    if model is not None and not isinstance(model, str | os.PathLike):
        check_family(model)
        chosen = make_options(model.config, model.name_or_path or type(model).__name__, **options)
        name = f"{Path(chosen.model).name}-probe" if workspace else None
        prepared = prepare(chosen, tokenizer, texts, batch_tokens(entry_device(model), chosen.context))
        return _Run(chosen, name, place, console, model.dtype).work(model, prepared)
    target = target_of(device, gpu_memory)
    run: Path | str
    if resume:
        run, chosen = _last_run(place, model)
        console.note(f"Resuming {run} ({chosen.model}).")
        source = open_model(chosen.model, chosen.revision, console.note)
    else:
        source = open_model(model, revision, console.note, place)
        chosen, run = _new_run(source, place, target, options)
    console.note(f"Reading and tokenising text ({'given' if texts is not None else chosen.data}).")
    prepared = prepare(chosen, source.tokenizer, texts, batch_tokens(target, chosen.context))
    _, where = _needed(source, chosen, prepared.amount, target, gpu_memory)
    if where.room is not None or where.lacking:
        (console.warn if where.lacking else console.note)(f"The model will be {where}.")
    loaded = source.load(pick_dtype(chosen.dtype, target), target, where.room)
    return _Run(chosen, run, place, console, source.stored_dtype).work(loaded, prepared)


def plan_probe(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    gpu_memory: float | None = None,
    workspace: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    revision: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `probe` with these arguments would do and take: memory, where the weights go, and time. Loads no weights.

    With gpu_memory, and on a machine without a GPU, the plan is for one of so many GiB, whose speed is not known.
    """
    console = console or Console(quiet=True)
    place = Workspace(Path(workspace) if workspace else None)
    target = target_of(device, gpu_memory, elsewhere=True)
    source = open_model(model, revision, console.note, place, weights=False)
    chosen, _ = _new_run(source, place, target, options)
    if not source.has_weights:
        console.note(f"{source.name} has no weights yet; the plan needs none.")
    try:
        tokenizer = source.tokenizer
    except SourceError as error:
        console.note(f"{error} So the text is not read.")
        amount = Amount.expected(chosen)
    else:
        amount = prepare(chosen, tokenizer, None, batch_tokens(target, chosen.context)).amount
    needed, where = _needed(source, chosen, amount, target, gpu_memory)
    return {"dry_run": True, **asdict(chosen), **needed.summary(where), "placement": str(where)}


def _new_run(
    source: Source, place: Workspace, target: torch.device, options: dict[str, Any]
) -> tuple[ProbeOptions, str]:
    """A new run's options, and a name for its folder, which can be made."""
    check_config(source.config)
    name, revision = name_of(source)
    chosen = make_options(source.config, name, revision=revision, **options)
    # Not what another device would choose when the run is resumed there.
    chosen = replace(chosen, dtype=str(pick_dtype(chosen.dtype, target)).removeprefix("torch."))
    origin = source.gguf or source.repository or source.path.name
    run = f"{Path(origin).name.removesuffix('.gguf')}-probe"
    check_place(place.run_folder(run).absolute(), "--workspace")
    return chosen, run


def _needed(
    source: Source, chosen: ProbeOptions, amount: Amount, target: torch.device, gpu_memory: float | None
) -> tuple[Need, Placement]:
    """What a probe takes and where its model goes; a model that cannot be converted is refused before it is loaded."""
    count = source.config.num_hidden_layers
    skeleton, _ = on_meta(source.config, LayerPlan.from_layers(count, range(count), chosen.layer), {})
    needed = need(skeleton, chosen, amount, pick_dtype(chosen.dtype, target), target)
    where = Placement.of(needed, target, gpu_memory)
    if MIXER in chosen.methods and where.room is not None:
        raise UsageError(ONE_DEVICE)
    return needed, where


def _last_run(place: Workspace, model: str | os.PathLike[str] | None) -> tuple[Path, ProbeOptions]:
    entry = place.last("probe-run")
    if entry is None:
        raise CheckpointError(f"There is no probe in {place.folder} to resume; start one without --resume.")
    folder = Path(entry["value"])
    options = ProbeOptions.read(folder / RUN_FILE)
    if model is not None and options.model not in (os.fspath(model), str(Path(model).expanduser().absolute())):
        raise UsageError(
            f"The last probe in {place.folder} is of {options.model}, not of {model}; leave MODEL out to resume it."
        )
    report = str(folder.absolute() / REPORT_FILE)
    # Not whether the file is there: a kill may have come between it and its entry, which is still to be made then.
    if any(entry["kind"] == "probe" and entry["value"] == report for entry in place.entries()):
        raise UsageError(f"The last probe is finished: its report is {folder / REPORT_FILE}.")
    with locked(folder, wait=False):  # said before the model is loaded; the run takes the lock again
        return folder, options


class _Run:
    """One probe of a loaded model. run: a name for the folder to keep finished layers in, or that of a run to resume.

    stored: the number format of the model's weights, and so of a hybrid's caches, whatever the probe computes in.
    """

    def __init__(
        self, options: ProbeOptions, run: Path | str | None, place: Workspace, console: Console, stored: torch.dtype
    ):
        self.options, self.run, self.place, self.console = options, run, place, console
        self.folder: Path | None = None
        self.stored = stored
        self.layers: dict[int, Record] = {}
        self.order: list[int] = []  # chosen so far, by --select greedy
        self.scores = parse_scores(options.by, options.windows, options.methods)

    def work(self, model: Any, prepared: Prepared) -> ProbeReport:
        options, rows, items, batches = self.options, prepared.rows, prepared.items, prepared.batches
        for number, layer in enumerate(model.base_model.layers):
            check_attention(layer.self_attn, number)
        check_weights(model)
        at_once = batch_tokens(entry_device(model), options.context)
        report = ProbeReport.of_options(options, model.config.num_hidden_layers)
        with (
            self._opened(prepared.fingerprint),
            self._interruptible(model.config.num_hidden_layers),
            torch.no_grad(),
        ):
            if "hankel" in options.methods:
                self._hankel(model, rows)
            if items:
                with self.console.progress("Retrieval of the model", len(items), "item") as tracker:
                    found = measure(model, items, at_once, tracker.advance)
                report.retrieval = summary(items, *found)
            if batches:
                changes = self._changes(model, prepared.fit, at_once)
                report.base = self._sweep(model, batches, changes)
                if options.select == "greedy":
                    report.order = self._greedy(model, text_batches(rows, at_once), changes)
        report.finish([self.layers[number] for number in sorted(self.layers)])
        report.weigh(model.config, self.stored)
        if self.folder is not None:
            finish(report, self.folder, self.place, self.console)
        return report

    def _changes(self, model: Any, fit: torch.Tensor | None, at_once: int) -> dict[str, Change]:
        """What is done to each layer in turn: the windows, and a mixer fitted and aligned on rows `fit`."""
        options = self.options
        changes: dict[str, Change] = {}
        if {"swa", "retrieval"} & set(options.methods):
            changes |= windows(model, options.windows, options.sinks)
        if fit is not None:
            changes[MIXER] = in_place(model, mixers(self._mixers(model, fit, at_once)))
        return changes

    def _mixers(self, model: Any, fit: torch.Tensor, at_once: int) -> Any:
        """A hybrid of mixers; a resumed probe trains them again, to the same weights, rather than keep them."""
        options = self.options
        first = fit[: max(1, FIT_TOKENS // options.context)]
        total = first.numel() * model.config.num_hidden_layers
        with self.console.progress(f"Fit {options.layer} mixers to all layers", total, "token") as tracker:
            hybrid = fitted_hybrid(model, options.layer, first, at_once, tracker.advance)
        if options.align:
            if fit.numel() <= options.align - options.context:
                self.console.note(
                    f"Mixers are aligned on {fit.numel():,} tokens, which is all the text apart from what is measured "
                    f"on: fewer than {options.align:,}."
                )
            some = fit[: max(1, options.align // options.context)]
            with self.console.progress("Align the mixers", some.numel(), "token") as tracker:
                align_mixers(model, hybrid, some, tracker.advance)
        return hybrid

    def _sweep(self, model: Any, batches: list[Scored], changes: dict[str, Change]) -> dict[str, dict[str, float]]:
        options, count = self.options, model.config.num_hidden_layers
        names = [name for name in ("swa", "retrieval", MIXER) if name in options.methods]
        done = {n for n, record in self.layers.items() if all(name in record for name in names)}
        ahead = sum(count - number for number in range(count) if number not in done)
        total = sum(batch.ids.numel() for batch in batches) * (2 * count + len(changes) * ahead)
        with self.console.progress(f"Sweep over {count} layers", total, "token") as tracker:
            sweep = Sweep(model, batches, tracker.advance)
            for record in swept_layers(sweep, changes, options.methods, TASKS, done):
                self._keep(record)
                tracker.advance(0, f"layer {record['layer']}")
        return sweep.base

    def _greedy(self, model: Any, batches: list[Scored], changes: dict[str, Change]) -> list[int]:
        """Layers in the order in which they are best changed together, on the first JOINT_TOKENS tokens or so."""
        options, score = self.options, self.scores[0]
        size = 0
        some: list[Scored] = []
        for batch in sorted(batches, key=lambda batch: batch.ids.numel()):
            if not some or size + batch.ids.numel() <= JOINT_TOKENS:
                some.append(batch)
                size += batch.ids.numel()
        left = how_many(model.config.num_hidden_layers, options.ratio, None, options.keep) - len(self.order)
        with self.console.progress(f"Choose {left} layers together", left, "layer") as tracker:
            sweep = Sweep(model, some)

            def keep(order: list[int]) -> None:
                self._write({"order": order})
                tracker.advance(1, f"layer {order[-1]}")

            change = changes[score.window or MIXER]
            count = left + len(self.order)
            return greedy(sweep, change, score.statistic, count, options.keep, self.order, keep)

    def _hankel(self, model: Any, rows: dict[str, torch.Tensor]) -> None:
        count = model.config.num_hidden_layers
        left = [n for n in range(count) if "hankel" not in self.layers.get(n, {})]
        if not left:
            return
        with self.console.progress(f"Hankel rank of {len(left)} layers", None, "token") as tracker:
            measured_hankel(model, rows, self.options, left, self._keep, tracker.advance)

    # -- files -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, text: str) -> Iterator[None]:
        """Within the block, the run's folder is this process's: begun, or with the layers read that are finished."""
        with ExitStack() as stack:
            if isinstance(self.run, Path):
                self.folder = self.run
                stack.enter_context(locked(self.folder, wait=False))
                self._read(self.folder, text)
            elif self.run is not None:
                self.folder = self.place.make_run_folder(self.run)
                stack.enter_context(locked(self.folder, wait=False))
                write_json(self.folder / RUN_FILE, {"options": asdict(self.options), "text": text})
                name = {"model": self.options.model, "revision": self.options.revision}
                self.place.record("probe-run", self.folder, **name)
            yield

    def _read(self, folder: Path, text: str) -> None:
        run, log = folder / RUN_FILE, folder / LAYERS_FILE
        if json.loads(run.read_text("utf-8")).get("text") != text:
            raise CheckpointError(
                f"The text of {self.options.data} has changed since {folder} was begun; start the probe without "
                "--resume."
            )
        if log.exists():
            lines = log.read_text("utf-8").split("\n")[:-1]  # what follows the last line break was cut by a kill
            write_text(log, "".join(f"{line}\n" for line in lines))
            for line in lines:
                record = json.loads(line)
                if "order" in record:
                    self.order = record["order"]
                else:
                    self._remember(record)

    def _keep(self, record: Record) -> None:
        """Write a layer's results at once."""
        self._remember(record)
        self._write(record)

    def _write(self, record: Record) -> None:
        if self.folder is not None:
            path = self.folder / LAYERS_FILE
            with named_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _remember(self, record: Record) -> None:
        self.layers.setdefault(record["layer"], {}).update(record)

    @contextmanager
    def _interruptible(self, count: int) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.folder is None:
                raise
            raise Interrupted(
                f"Stopped with {len(self.layers)} of {count} layers begun; they are kept in {self.folder}: continue "
                f"with hybridize probe --resume{self.place.option}."
            ) from None
