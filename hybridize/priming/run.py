"""`prime`: a source model becomes a hybrid, stage by stage, in a run that can be stopped and resumed."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridize.builtin import BUILTIN, builtin_text, model_name, open_model
from hybridize.console import Console
from hybridize.devices import pick_device
from hybridize.errors import CheckpointError, Interrupted
from hybridize.hybrid.families import check_config
from hybridize.hybrid.model import convert, mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.priming.accounting import Accounting, account
from hybridize.priming.align import Aligner, AlignOptions, DivergedError
from hybridize.priming.options import (
    RUN_FILE,
    SPACED,
    STAGES,
    PrimeOptions,
    check_settings,
    choose_layers,
    describe,
    last_run,
    make_options,
    output_dtype,
    short_name,
)
from hybridize.priming.transfer import StartOptions, fit_start
from hybridize.sources import Source
from hybridize.tasks.perplexity import mean_loss
from hybridize.tasks.text import TextSplit, prepare, read_documents
from hybridize.workspace import Workspace, atomic_folder, check_disk_space, check_place, write_json, write_text

_CHECKPOINT, _LOG = "checkpoint.pt", "log.jsonl"
_WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth", ".h5", ".msgpack")


def prime(
    model: str | os.PathLike[str] | None = None,
    *,
    ratio: float | None = None,
    layers: Sequence[int] | None = None,
    pattern: str | None = None,
    layer: str | None = None,
    stages: Sequence[str] = STAGES,
    tokens: int = 1_000_000,
    data: str | os.PathLike[str] = BUILTIN,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    dry_run: bool = False,
    context: int = 1024,
    batch_size: int | None = None,
    init_tokens: int | None = None,
    held_out_tokens: int = 32_768,
    lr: float = AlignOptions.lr,
    start: StartOptions | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    workspace: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    revision: str | None = None,
    **mixer_settings: Any,
) -> dict[str, Any]:
    """Convert a source model, align its mixers, and write the hybrid; returns the report that is also written.

    Which layers: `ratio` of them, as the workspace's last probe of this model selects them, or else evenly spaced (0.5
    when nothing is said); or `layers`; or a whole `pattern`. `layer` is what they become: gka, unless the probe says.
    `tokens` is the budget of stage align, `context` the tokens per row. Other keywords are mixer settings such as
    num_iters. Raises HybridizeError children; an interrupted run continues with resume=True to the same numbers.
    """
    console = console or Console(quiet=True)
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
        report = Path(last["value"]) if last else None
        plan, chosen = choose_layers(source.config.num_hidden_layers, ratio, layers, pattern, layer, report)
        options = make_options(
            source,
            plan,
            chosen,
            stages,
            tokens,
            data,
            context,
            batch_size,
            init_tokens,
            held_out_tokens,
            seed,
            dtype,
            target,
        )
        origin = source.gguf or source.repository or source.path.name
        name = f"{Path(origin).name.removesuffix('.gguf')}-{short_name(plan)}"
        folder = place.run_folder(name)
        final = Path(output).expanduser() if output else folder / "model"
        options = replace(
            options,
            output=str(final.absolute()),
            start=start or StartOptions(),
            align=AlignOptions(lr=lr),
            settings=mixer_settings,
            revision=source.revision if source.repository else None,
        )
    if options.chosen == SPACED:
        console.note("No probe of this model was made here: the layers to convert are evenly spaced.")
    else:
        console.note(f"Layers to convert, {options.chosen}: {', '.join(map(str, plan.layers))}.")
    solves = "init" in options.stages and options.start.solve
    number = output_dtype(source, options.dtype)
    check_settings(plan, options.settings)
    accounting = account(source.config, plan, number, solves, options.settings)
    final = Path(options.output)
    check_place(final)
    if dry_run:
        return {"dry_run": True, **describe(options, source), **accounting.summary(), "output": str(final)}
    check_disk_space(final, accounting.checkpoint_bytes + 16 * accounting.trained_parameters)
    return _Run(options, source, plan, accounting, folder, target, number, console, place).work()


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
    ):
        self.options, self.source, self.plan, self.accounting = options, source, plan, accounting
        self.folder, self.device, self.dtype, self.console = folder, device, dtype, console
        self.workspace = workspace

    def work(self) -> dict[str, Any]:
        options, console = self.options, self.console
        saved = self._read_checkpoint()
        rows = self._rows()
        if saved and saved["fingerprint"] != rows.fingerprint:
            raise CheckpointError(
                f"The text of {options.data} has changed since {self.folder} was begun; start the run without --resume."
            )
        teacher: Any = self.source.load(torch.float32, self.device)
        torch.manual_seed(options.seed)
        hybrid = convert(teacher, self.plan, share=True, **options.settings)
        hybrid.config.hybrid["source"]["revision"] = self.source.revision
        steps = options.tokens // (options.batch_size * options.context) if "align" in options.stages else 0
        aligner = Aligner(teacher, hybrid, options.align, steps)
        losses: dict[str, Any] = {}
        if saved:
            losses = saved["losses"]
            if unknown := hybrid.load_state_dict(saved["mixers"], strict=False).unexpected_keys:
                raise CheckpointError(
                    f"{self.folder} holds a tensor {unknown[0]} that this hybrid has not; start it again."
                )
            aligner.optimiser.load_state_dict(saved["optimiser"])
            aligner.steps_done = saved["step"]
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / RUN_FILE, {"options": asdict(options)})
            self.workspace.record(
                "prime-run", self.folder, source=self.source.name, model=options.model, revision=options.revision
            )
            losses["source"] = self._measure(teacher, rows.held_out, "Held-out loss of the source")
            losses["converted"] = self._measure(hybrid, rows.held_out, "Held-out loss after conversion")
            if "init" in options.stages:
                errors = self._fit(teacher, hybrid, rows.train, options.start, "Init")
                console.note(f"Mean relative error of the converted layers: {_mean(errors):.3f}")
                losses["init"] = self._measure(hybrid, rows.held_out, "Held-out loss after init")
            self._write_checkpoint(aligner, hybrid, losses, rows)
        if steps:
            self._align(aligner, hybrid, rows, losses, steps)
            if "init" in options.stages and options.start.solve:
                # The mixers have moved on: solve their output projections again, to make good what earlier layers lost.
                again = StartOptions(calibrate=False, ridge=options.start.ridge, follow=True)
                self._fit(teacher, hybrid, rows.train, again, "Refit")
            losses["align"] = self._measure(hybrid, rows.held_out, "Held-out loss after align")
        return self._finish(hybrid, losses, rows, steps)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _rows(self) -> TextSplit:
        options = self.options
        # Rows for the fit and for training come from one stream; a run that needs more than there is starts over in it.
        wanted = max(options.init_tokens, options.tokens if "align" in options.stages else 0)
        self.console.note(f"Reading and tokenising text ({options.data}).")
        common: dict[str, Any] = {
            "context": options.context,
            "tokens": wanted,
            "held_out_tokens": options.held_out_tokens,
            "seed": options.seed,
        }
        if options.data == BUILTIN:
            train = [(document.name, document.text) for document in builtin_text("train")]
            held = [(document.name, document.text) for document in builtin_text("held-out")]
            rows = prepare(train, self.source.tokenizer, held_out=held, **common)
        else:
            rows = prepare(read_documents(Path(options.data).expanduser()), self.source.tokenizer, **common)
        if rows.train.numel() < wanted - options.context:
            self.console.warn(
                f"The text has {rows.train.numel():,} tokens for a budget of {wanted:,}: it is read more than once."
            )
        return rows

    def _fit(self, teacher: Any, hybrid: Any, rows: Tensor, start: StartOptions, title: str) -> dict[int, float]:
        count = max(1, self.options.init_tokens // self.options.context)
        batches = [ids.to(self.device) for ids in rows[:count].split(self.options.batch_size)]
        batches = [ids for ids in batches if ids.shape == batches[0].shape]
        last = max(self.plan.layers)
        total = sum(ids.numel() for ids in batches) * (last + 1)
        with self.console.progress(f"{title}: least squares, {last + 1} layers", total, "token") as tracker:
            return fit_start(teacher, hybrid, batches, start, tracker.advance)

    def _align(self, aligner: Aligner, hybrid: Any, rows: TextSplit, losses: dict[str, Any], steps: int) -> None:
        options = self.options
        batch_tokens = options.batch_size * options.context
        log = self.folder / _LOG
        _drop_lines_from(log, aligner.steps_done)
        saved_at = time.monotonic()
        with (
            self.console.progress("Align", steps * batch_tokens, "token") as tracker,
            _stop_gently() as stop,
            log.open("a", encoding="utf-8") as lines,
        ):
            tracker.advance(aligner.steps_done * batch_tokens)
            while aligner.steps_done < steps:
                step = aligner.steps_done
                try:
                    errors = aligner.step(self._batch(rows.train, step))
                except DivergedError as error:
                    raise DivergedError(
                        f"{error} The last good state is in {self.folder}; use a smaller --lr."
                    ) from None
                lines.write(json.dumps({"step": step, "loss": _mean(errors), "layers": errors}) + "\n")
                lines.flush()
                tracker.advance(batch_tokens, f"relative error {_mean(errors):.4f}")
                if stop.is_set() or time.monotonic() - saved_at > 60:
                    self._write_checkpoint(aligner, hybrid, losses, rows)
                    saved_at = time.monotonic()
                if stop.is_set() and aligner.steps_done < steps:
                    raise Interrupted(
                        f"Stopped after {aligner.steps_done} of {steps} steps; everything is kept in {self.folder}: "
                        "continue with hybridize prime --resume."
                    )
        self._write_checkpoint(aligner, hybrid, losses, rows)

    def _batch(self, rows: Tensor, step: int) -> Tensor:
        index = torch.arange(step * self.options.batch_size, (step + 1) * self.options.batch_size) % len(rows)
        return rows[index].to(self.device)

    def _measure(self, model: Any, rows: Tensor, title: str) -> float:
        with self.console.progress(title, rows.numel(), "token") as tracker:
            loss = mean_loss(model, rows, self.options.batch_size, tracker.advance)
        if not math.isfinite(loss):
            raise DivergedError(f"{title} is {loss}; no hybrid was written.")
        return loss

    # -- files -------------------------------------------------------------------------------------------------------

    def _read_checkpoint(self) -> dict[str, Any] | None:
        path = self.folder / _CHECKPOINT
        if not path.exists():
            return None
        try:
            saved: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read ({error}); start the run again without --resume.") from None
        return saved

    def _write_checkpoint(self, aligner: Aligner, hybrid: Any, losses: dict[str, Any], rows: TextSplit) -> None:
        names = {f"{hybrid.base_model_prefix}.layers.{i}.self_attn." for i in mixers(hybrid)}
        state = {n: x for n, x in hybrid.state_dict().items() if any(n.startswith(prefix) for prefix in names)}
        partial = self.folder / f".{_CHECKPOINT}.partial"
        checkpoint = {
            "step": aligner.steps_done,
            "mixers": state,
            "optimiser": aligner.optimiser.state_dict(),
            "losses": losses,
            "fingerprint": rows.fingerprint,
        }
        try:
            # Given a path, torch.save reports a full disk as an internal error.
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.folder / _CHECKPOINT)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _finish(self, hybrid: Any, losses: dict[str, Any], rows: TextSplit, steps: int) -> dict[str, Any]:
        options = self.options
        report: dict[str, Any] = {
            **describe(options, self.source),
            **self.accounting.summary(),
            "losses": {
                name: {"loss": value, "perplexity": math.exp(min(value, 700.0))} for name, value in losses.items()
            },
            "train_tokens": steps * options.batch_size * options.context,
            "held_out_tokens": rows.held_out.numel(),
            "text_fingerprint": rows.fingerprint,
            "device": str(self.device),
            "output": options.output,
            "run": str(self.folder),
        }
        with _explained_write(options.output), atomic_folder(options.output) as partial:
            hybrid.to(self.dtype).save_pretrained(partial)
            self._copy_companions(partial)
            write_json(partial / "prime.json", report)
        self.workspace.record("hybrid", Path(options.output), source=self.source.name, pattern=str(self.plan))
        (self.folder / _CHECKPOINT).unlink(missing_ok=True)  # the run is done; the folder keeps its options and curve
        return report

    def _copy_companions(self, folder: Path) -> None:
        """Tokenizer, chat template, generation config, licence: byte for byte, except from inside a GGUF."""
        if self.source.gguf:
            self.source.tokenizer.save_pretrained(folder)
            return
        for path in sorted(self.source.path.iterdir()):
            own = path.name in ("config.json", "README.md", "prime.json") or path.name.endswith(_WEIGHTS)
            if path.is_file() and not own and not path.name.startswith("."):
                shutil.copyfile(path, folder / path.name)


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / max(1, len(values))


def _drop_lines_from(log: Path, step: int) -> None:
    """Forget logged steps that will be done again, because they came after the last checkpoint."""
    if not log.exists():
        return
    lines = log.read_text("utf-8").split("\n")[:-1]  # what follows the last line break was cut short by a kill
    write_text(log, "".join(f"{line}\n" for line in lines if json.loads(line)["step"] < step))


@contextmanager
def _explained_write(output: str) -> Iterator[None]:
    """OSError in place of safetensors' own error, which means a damaged file to those who read."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), output) from None


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
