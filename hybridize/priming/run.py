"""`prime`: a source model becomes a hybrid, stage by stage, in a run that can be stopped and resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridize.builtin import BUILTIN, model_name, open_model
from hybridize.console import Console
from hybridize.devices import pick_device, tensor_cores
from hybridize.errors import CheckpointError
from hybridize.hybrid.families import check_config
from hybridize.hybrid.model import convert, mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.priming.accounting import Accounting, account
from hybridize.priming.align import Aligner, AlignOptions
from hybridize.priming.batches import check_shares
from hybridize.priming.checkpoints import read_checkpoint, write_checkpoint
from hybridize.priming.curve import check_curve, draw_curve
from hybridize.priming.finish import stated, write_hybrid
from hybridize.priming.loop import Steps, run_steps
from hybridize.priming.mixture import absolute
from hybridize.priming.options import (
    DEFAULT_STAGES,
    PrimeOptions,
    begin_run,
    check_budget,
    check_settings,
    choose_layers,
    chosen_layers,
    describe,
    last_run,
    make_options,
    output_dtype,
    run_name,
)
from hybridize.priming.quality import make_quality, shared_loss
from hybridize.priming.report import STEPS
from hybridize.priming.roles import by_role, own_copies
from hybridize.priming.stages import ADAPT, BEST, DISTILL, Stage, StageOptions
from hybridize.priming.text import RunText, open_text
from hybridize.priming.trainer import Trainer
from hybridize.priming.transfer import StartOptions, fit_start
from hybridize.processes import alike, from_first, joined, rank, share
from hybridize.sources import Source
from hybridize.workspace import Workspace, check_disk_space, check_place, locked

_CHECKPOINT, _LOG = "checkpoint.pt", "log.jsonl"
_TRAINING = ("align", "distill", "adapt", "baseline")


def prime(
    model: str | os.PathLike[str] | None = None,
    *,
    ratio: float | None = None,
    layers: Sequence[int] | None = None,
    pattern: str | None = None,
    layer: str | None = None,
    stages: Sequence[str] = DEFAULT_STAGES,
    tokens: int = 1_000_000,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = BUILTIN,
    held_out: str | os.PathLike[str] | None = None,
    text_field: str | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    dry_run: bool = False,
    context: int = 1024,
    batch_size: int | None = None,
    init_tokens: int | None = None,
    held_out_tokens: int = 32_768,
    lr: float = AlignOptions.lr,
    start: StartOptions | None = None,
    distill: StageOptions = DISTILL,
    adapt: StageOptions = ADAPT,
    compute: str | None = None,
    evaluate_every: int = 0,
    baseline: bool = False,
    items: int | None = None,
    prompts: int | None = None,
    plot: str | os.PathLike[str] | None = None,
    tensorboard: bool = False,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    workspace: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    revision: str | None = None,
    **mixer_settings: Any,
) -> dict[str, Any]:
    """Convert a source model, train its mixers, and write the hybrid; returns the report that is also written.

    Which layers: `ratio` of them, as the workspace's last probe of this model selects them, or else evenly spaced (0.5
    when nothing is said); or `layers`; or a whole `pattern`. `layer` is what they become: gka, unless the probe says.
    `stages` are init (closed form), align (each mixer by itself), distill (end to end, towards the source) and adapt
    (on the text); `tokens` is the budget of those that train, `context` the tokens per row. `data` are text, JSONL,
    Parquet or pre-tokenised files, folders of them, Hub datasets, or `builtin`, each with `=` and a weight behind it if
    need be; `held_out` is what losses are measured on, without it a part of the data. Distill and adapt compute
    in `compute` (bfloat16 on CUDA) with fp32 masters; with `evaluate_every` tokens, the best weights on the way are
    kept; `baseline` trains the source too, on adapt's tokens. Retrieval is measured on `items` for each task and depth,
    and generation on `prompts`, before and after; 0 leaves it out. The loss curve is drawn into `plot`, and goes to
    `tensorboard` in the run's folder. Other keywords are mixer settings such as num_iters.
    Raises HybridizeError children; an interrupted run continues with resume=True to the same numbers.
    """
    console = console or Console(quiet=True)
    check_curve(drawn := Path(plot).expanduser() if plot else None, tensorboard)
    place = Workspace(Path(workspace) if workspace else None)
    target = pick_device(device)
    if resume:
        folder, options = last_run(place, model)
        console.note(f"Resuming {folder} ({options.model}, {options.pattern}).")
        source = open_model(options.model, options.revision, console.note)
        plan = LayerPlan.from_pattern(options.pattern)
    else:
        source = open_model(model, revision, console.note, place)
        check_config(source.config)
        last = place.last("probe", model=model_name(source))
        probed = Path(last["value"]) if last else None
        plan, chosen = choose_layers(source.config.num_hidden_layers, ratio, layers, pattern, layer, probed)
        given = (chosen, stages, tokens, data, context, batch_size, init_tokens, held_out_tokens, seed, dtype)
        options = make_options(source, plan, *given, target)
        folder = place.run_folder(run_name(source, plan))
        options = replace(
            options,
            output=str((Path(output).expanduser() if output else folder / "model").absolute()),
            start=start or StartOptions(),
            align=AlignOptions(lr=lr),
            distill=distill,
            adapt=adapt,
            compute=compute or ("bfloat16" if target.type == "cuda" else "float32"),
            evaluate_every=evaluate_every,
            baseline=baseline,
            items=(2 if target.type == "cpu" else 10) if items is None else items,
            prompts=(4 if target.type == "cpu" else 20) if prompts is None else prompts,
            held_out=None if held_out is None else absolute([os.fspath(held_out)])[0],
            text_field=text_field,
            settings=mixer_settings,
            revision=source.revision if source.repository else None,
        )
        check_budget(options)
    console.note(chosen_layers(options, plan))
    solves = "init" in options.stages and options.start.solve
    number = output_dtype(source, options.dtype)
    check_settings(plan, options.settings)
    accounting = account(source.config, plan, number, solves, options.settings, options.role())
    final = Path(options.output)
    check_place(final)
    text = open_text(options, source, console)
    if dry_run:
        return {"dry_run": True, **describe(options, source), **accounting.summary(), "output": str(final)}
    # Weights and two moments, twice while a checkpoint is replaced; and where they are kept, the best weights.
    check_disk_space(final, accounting.checkpoint_bytes + 28 * accounting.trained_parameters)
    check_shares(options.batch_size)
    with joined(target), tensor_cores(target, options.compute != "float32"), ExitStack() as stack:
        folder, options = from_first((folder, options))
        if rank() == 0:
            if not resume:
                begin_run(folder, options, source, place)
            stack.enter_context(locked(folder, wait=False))
        run = _Run(options, source, plan, accounting, folder, target, number, console, place, text, tensorboard)
        report = run.work()
    if drawn is not None and rank() == 0:
        draw_curve(folder / _LOG, drawn, f"{source.name}, {options.pattern}")
    return report


class _Run:
    """One run: its folder, its models, and where it stands."""

    def __init__(
        self,
        options: PrimeOptions,
        source: Source,
        plan: LayerPlan,
        accounting: Accounting,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        console: Console,
        workspace: Workspace,
        text: RunText,
        board: bool,
    ):
        self.options, self.source, self.plan, self.accounting = options, source, plan, accounting
        self.folder, self.device, self.dtype, self.console = folder, device, dtype, console
        self.workspace, self.text, self.board = workspace, text, board
        self.load_source: Callable[[], Any] = lambda: source.load(torch.float32, device)
        self.quality = make_quality(options, source, text.held_out.ids, console)
        self.measured: dict[str, Any] = {}  # what `quality` found, by model

    def work(self) -> dict[str, Any]:
        options, console = self.options, self.console
        saved = read_checkpoint(self.folder / _CHECKPOINT, self.device)
        if saved:
            self.text.load_state(saved)
        teacher: Any = self.load_source()
        torch.manual_seed(options.seed)
        hybrid = convert(teacher, self.plan, share=True, **options.settings)
        hybrid.config.hybrid["source"]["revision"] = self.source.revision
        pending = [stage for stage in _TRAINING if options.steps(stage)]
        losses: dict[str, Any] = {}
        if saved:
            losses, self.measured = saved["losses"], saved["measured"]
            pending = pending[pending.index(saved["stage"]) :] if saved["stage"] in pending else []
            self._load(hybrid, saved["weights"], options.role(saved["stage"]))
        else:
            losses["source"] = self._measure(teacher, "Held-out loss of the source")
            self._judge(teacher, "source")
            losses["converted"] = self._measure(hybrid, "Held-out loss after conversion")
            if "init" in options.stages:
                errors = self._fit(teacher, hybrid, options.start, "Init")
                console.note(f"Mean relative error of the converted layers: {_mean(errors):.3f}")
                losses["init"] = self._measure(hybrid, "Held-out loss after init")
            self._judge(hybrid, list(losses)[-1])
            self._save(pending[0] if pending else "", hybrid, losses)
        for place, stage in enumerate(pending):
            training = saved["training"] if saved and place == 0 else None
            if training is None:
                self.text.enter(stage)
            if stage == "align":
                self._align(teacher, hybrid, losses, training)
            else:
                if stage == "adapt" and not options.adapt.loss.needs_teacher:
                    teacher = None  # only its converted layers' attention is freed: the rest is the hybrid's as well
                self._train(stage, teacher, hybrid, losses, training)
            if stage != "baseline" and pending[place + 1 :] in ([], ["baseline"]):
                self._judge(hybrid, stage)
            self._save("".join(pending[place + 1 : place + 2]), hybrid, losses)
        return self._finish(hybrid, losses)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _fit(self, teacher: Any, hybrid: Any, start: StartOptions, title: str) -> dict[int, float]:
        """Least squares on the first batches of the text."""
        count = max(1, self.options.init_tokens // self.options.step_tokens("align"))
        batches = [batch.to(self.device) for batch in self.text.first(count)]
        last = max(self.plan.layers)
        total = sum(batch.ids.numel() for batch in batches) * (last + 1)
        with self.console.progress(f"{title}: least squares, {last + 1} layers", total, "token") as tracker:
            errors = fit_start(teacher, hybrid, batches, start, tracker.advance)
        alike(p for mixer in mixers(hybrid).values() for p in mixer.parameters())
        return errors

    def _align(self, teacher: Any, hybrid: Any, losses: dict[str, Any], training: Any) -> None:
        options = self.options
        aligner = Aligner(teacher, hybrid, options.align, options.steps("align"))
        if training:
            aligner.optimiser.load_state_dict(training["optimiser"])
            aligner.steps_done = training["step"]

        def take(step: int) -> dict[str, Any]:
            errors = aligner.step(self.text.stream.batch().part(share()).to(self.device))
            return {"loss": _mean(errors), "layers": errors}

        def save() -> None:
            state = {"step": aligner.steps_done, "optimiser": aligner.optimiser.state_dict()}
            self._save("align", hybrid, losses, state)

        self._run_steps("align", aligner.steps_done, take, save, shows="relative error")
        if "init" in options.stages and options.start.solve:
            # The mixers have moved on: solve their output projections again, to make good what earlier layers lost.
            again = StartOptions(calibrate=False, ridge=options.start.ridge, follow=True)
            self._fit(teacher, hybrid, again, "Refit")
        losses["align"] = self._measure(hybrid, "Held-out loss after align")

    def _train(self, name: str, teacher: Any, hybrid: Any, losses: dict[str, Any], training: Any) -> None:
        """Distill or adapt; or baseline, which trains the source itself."""
        options, chosen = self.options, self.options.options_of(name)
        model = self.load_source() if name == "baseline" else hybrid
        stage = Stage(
            model,
            teacher,
            self.plan.layers,
            chosen,
            self.text.stream,
            options.steps(name),
            getattr(torch, options.compute),
            self.folder,
            lambda trainer: trainer.held_out(self.text.choosing, options.batch_size),
            max(1, options.evaluate_every // options.step_tokens(name)) if options.evaluate_every else 0,
        )
        if training:
            stage.load_state(training)

        def save() -> None:
            # While the hybrid trains, its weights are the masters.
            self._save(name, hybrid, losses, stage.state(), None if name == "baseline" else stage.trainer)

        self._run_steps(name, stage.trainer.steps_done, lambda step: stage.step(), save)
        if (step := stage.finish()) != options.steps(name):
            self.console.note(f"The best held-out loss was that of step {step}: these weights are kept.")
        losses[name] = self._measure(model, f"Held-out loss after {name}")
        if name == "baseline":
            self._judge(model, name)

    def _run_steps(self, stage: str, done: int, take: Any, save: Any, shows: str = "loss") -> None:
        options = self.options
        rate = {"align": "--lr", "distill": "--distill-lr"}.get(stage, "--adapt-lr")
        work = Steps(stage, done, options.steps(stage), options.step_tokens(stage), take, save, rate, shows)
        earlier = list(_TRAINING[: _TRAINING.index(stage)])
        run_steps(work, self.folder, self.folder / _LOG, earlier, self.console, self.board)

    def _measure(self, model: Any, title: str) -> float:
        rows = self.text.held_out
        with self.console.progress(title, rows.ids.numel(), "token") as tracker:
            return shared_loss(model, rows, self.options.batch_size, title, tracker.advance)

    def _judge(self, model: Any, name: str) -> None:
        self.measured[name] = self.quality.measure(model, STEPS[name], self.console)

    # -- files -------------------------------------------------------------------------------------------------------

    def _save(
        self,
        stage: str,
        hybrid: Any,
        losses: dict[str, Any],
        training: dict[str, Any] | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        """Write the checkpoint: in `stage` (at its start without `training`, at the run's end without a name)."""
        trained = by_role(hybrid, self.options.role(stage), self.plan.layers)
        weights = {name: p.detach() for name, p in trained.items()}
        if trainer is not None:
            weights.update({name: x.detach() for name, x in trainer.masters.masters.items()})
        content = {"stage": stage, "training": training, "weights": weights}
        content |= {"losses": losses, "measured": self.measured, **self.text.state()}
        write_checkpoint(self.folder / _CHECKPOINT, content)

    def _load(self, hybrid: Any, weights: dict[str, Tensor], role: str) -> None:
        if role != "mixers":
            own_copies(hybrid, by_role(hybrid, role, self.plan.layers))  # the source keeps its own
        if unknown := hybrid.load_state_dict(weights, strict=False).unexpected_keys:
            raise CheckpointError(
                f"{self.folder} holds a tensor {unknown[0]} that this hybrid has not; start it again."
            )

    def _finish(self, hybrid: Any, losses: dict[str, Any]) -> dict[str, Any]:
        options = self.options
        report = {
            **describe(options, self.source),
            **self.accounting.summary(),
            **stated(losses),
            **self.quality.report(self.measured, losses["source"], self.load_source),
            "train_tokens": sum(options.steps(name) * options.step_tokens(name) for name in _TRAINING[:-1]),
            "held_out_tokens": int(self.text.held_out.targets.sum()),
            "text": self.text.stream.counts,
            "text_fingerprint": self.text.stream.fingerprint,
            "device": str(self.device),
            "output": options.output,
            "run": str(self.folder),
        }
        if rank() > 0:
            return report
        write_hybrid(hybrid, self.source, options.output, self.dtype, report)
        self.workspace.record("hybrid", Path(options.output), source=self.source.name, pattern=str(self.plan))
        for name in (_CHECKPOINT, BEST):
            (self.folder / name).unlink(missing_ok=True)  # the run is done; the folder keeps its options and curve
        return report


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / max(1, len(values))
