"""What decides a prime run: checked, completed with defaults, and kept so that a resumed run is the same run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hybridize.builtin import model_name
from hybridize.errors import CheckpointError, UsageError, WorkspaceError
from hybridize.hybrid.plan import LayerPlan, check_kind
from hybridize.mixers import MIXERS
from hybridize.mixers.base import geometry
from hybridize.priming.align import AlignOptions
from hybridize.priming.mixture import absolute
from hybridize.priming.objective import LossWeights
from hybridize.priming.roles import ROLES
from hybridize.priming.stages import ADAPT, DISTILL, StageOptions
from hybridize.priming.transfer import StartOptions
from hybridize.processes import world
from hybridize.sources import Source
from hybridize.workspace import Workspace, write_json

STAGES = ("init", "align", "distill", "adapt")
DEFAULT_STAGES = ("init", "align")
# How --tokens is split over the stages that train: a short layer-wise one, since errors of many layers add up in it.
_SHARES = {"align": 1, "distill": 2, "adapt": 2}
RUN_FILE = "run.json"
SPACED = "evenly spaced"
_MAY_BE_ZERO = {"num_iters", "sinks"}


@dataclass(frozen=True)
class PrimeOptions:
    """Everything that decides a run's result; kept in its run.json, so that a resumed run is the same run."""

    model: str
    pattern: str
    chosen: str
    stages: tuple[str, ...]
    tokens: int
    init_tokens: int
    held_out_tokens: int
    context: int
    batch_size: int
    data: tuple[str, ...]
    seed: int
    output: str
    dtype: str | None
    start: StartOptions = field(default_factory=StartOptions)
    align: AlignOptions = field(default_factory=AlignOptions)
    settings: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    distill: StageOptions = DISTILL
    adapt: StageOptions = ADAPT
    compute: str = "float32"  # what distill and adapt compute in; masters are fp32
    evaluate_every: int = 0  # tokens; 0: not on the way
    baseline: bool = False
    items: int = 0  # of retrieval, for each task and depth
    prompts: int = 0  # of generation
    held_out: str | None = None
    text_field: str | None = None

    def steps(self, stage: str) -> int:
        """Steps of a stage that trains, from its share of the tokens; of `baseline` as many as of adapt."""
        if stage == "baseline":
            return self.steps("adapt") if self.baseline else 0
        if stage not in self.stages:
            return 0
        asked = sum(share for name, share in _SHARES.items() if name in self.stages)
        return self.tokens * _SHARES[stage] // asked // self.step_tokens(stage)

    def step_tokens(self, stage: str) -> int:
        """Tokens of one step of a stage."""
        return self.batch_size * self.context * (1 if stage == "align" else self.options_of(stage).train.accumulate)

    def options_of(self, stage: str) -> StageOptions:
        """Of an end-to-end stage; `baseline`, the source itself, has adapt's, without the KL to itself."""
        if stage == "distill":
            return self.distill
        return replace(self.adapt, loss=LossWeights(cross_entropy=1.0)) if stage == "baseline" else self.adapt

    def role(self, stage: str = "") -> str:
        """The most that has trained when `stage` is done; at the end of the run without one."""
        ends = STAGES.index(stage) if stage in STAGES else len(STAGES)
        done = [name for name in ("distill", "adapt") if name in self.stages and STAGES.index(name) <= ends]
        return max((self.options_of(name).train.role for name in done), key=ROLES.index, default="mixers")

    @staticmethod
    def read(path: Path) -> PrimeOptions:
        """Options from a run.json; CheckpointError when the file is damaged."""
        try:
            raw = json.loads(path.read_text("utf-8"))["options"]
            raw["start"], raw["align"] = StartOptions(**raw["start"]), AlignOptions(**raw["align"])
            if isinstance(raw["data"], str):
                raise ValueError("the run was begun by an earlier version")
            raw["stages"], raw["data"] = tuple(raw["stages"]), tuple(raw["data"])
            raw.update({name: StageOptions.read(raw[name]) for name in ("distill", "adapt") if name in raw})
            return PrimeOptions(**raw)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); start the run again without --resume.") from None


def choose_layers(
    count: int,
    ratio: float | None,
    layers: Sequence[int] | None,
    pattern: str | None,
    layer: str | None,
    probe: Path | None = None,
) -> tuple[LayerPlan, str]:
    """The plan, and in words where it is from; `probe` is the report of a probe of this model, if there is one.

    Without layers or a pattern, the probe's selection is taken, for its own ratio and kind unless others are given.
    """
    given = [name for name, value in (("ratio", ratio), ("layers", layers), ("pattern", pattern)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} both say which layers to convert; give one of them.")
    check_kind(layer or "gka")
    if pattern is not None:
        plan = LayerPlan.from_pattern(pattern)
        plan.check_length(count)
    elif layers is not None:
        plan = LayerPlan.from_layers(count, layers, layer or "gka")
    elif probe is not None:
        return _selected(probe, count, ratio, layer)
    else:
        return LayerPlan.evenly_spaced(count, 0.5 if ratio is None else ratio, layer or "gka"), SPACED
    if not plan.layers:
        raise UsageError("The plan converts no layer; name at least one.")
    return plan, "as given"


def _selected(probe: Path, count: int, ratio: float | None, layer: str | None) -> tuple[LayerPlan, str]:
    if ratio is not None:
        LayerPlan.evenly_spaced(count, ratio, "gka")  # a wrong ratio is no fault of the report's
    try:
        report = json.loads(probe.read_text("utf-8"))
        chosen, selections = report["selected"], report["selections"]
        ratio = chosen["ratio"] if ratio is None else ratio
        size = len(LayerPlan.evenly_spaced(count, ratio, "gka").layers)
        if size > len(selections):
            kept = f"was told to keep {', '.join(map(str, chosen['keep']))}"
            why = kept if chosen["order"] is None else f"chose {len(selections)} of them one after another"
            raise UsageError(
                f"--ratio {ratio} converts {size} of {count} layers, but the probe {probe} {why}; give a smaller "
                "--ratio, or --layers."
            )
        plan = LayerPlan.from_layers(count, selections[size - 1], layer or chosen["kind"])
        return plan, f"selected by {chosen['by']} in {probe}"
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"The probe's report {probe} cannot be used ({error}); run hybridize probe again, or give --layers."
        ) from None


def make_options(
    source: Source,
    plan: LayerPlan,
    chosen: str,
    stages: Sequence[str],
    tokens: int,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    context: int,
    batch_size: int | None,
    init_tokens: int | None,
    held_out_tokens: int,
    seed: int,
    dtype: str | None,
    device: torch.device,
) -> PrimeOptions:
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise UsageError(f"There is no stage {unknown[0]!r}; the stages are {', '.join(STAGES)}.")
    for name, value, least in (("tokens", tokens, 1), ("context", context, 2), ("held-out-tokens", held_out_tokens, 1)):
        if value < least:
            raise UsageError(f"--{name} is {value}; it must be at least {least}.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed is {seed}; it must be at least 0 and below 2**63.")
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest and context > longest:
        raise UsageError(f"--context {context} is more than the {longest} positions that the model was made for.")
    if init_tokens is None:
        # Eight tokens for every unknown of a row of the projection, and never so few that they are one kind of text.
        heads, _, head_dim = geometry(source.config)
        init_tokens = max(16_384, 8 * heads * head_dim)
    if batch_size is None:
        batch_size = max(1, (2048 if device.type == "cpu" else 8192) // context)
        batch_size += -batch_size % world()
    return PrimeOptions(
        model=model_name(source),
        pattern=str(plan),
        chosen=chosen,
        stages=tuple(stage for stage in STAGES if stage in stages),
        tokens=tokens,
        init_tokens=max(init_tokens, context),
        held_out_tokens=held_out_tokens,
        context=context,
        batch_size=batch_size,
        data=absolute([os.fspath(name) for name in ([data] if isinstance(data, str | os.PathLike) else data)]),
        seed=seed,
        output="",
        dtype=dtype,
    )


def check_budget(options: PrimeOptions) -> None:
    """UsageError where a stage's share of the tokens is less than one step, or an option's stage is left out."""
    for stage in (stage for stage in _SHARES if stage in options.stages):
        if options.steps(stage) < 1:
            share = "" if set(options.stages) & set(_SHARES) == {stage} else f", of which {stage} gets its share,"
            raise UsageError(
                f"--tokens {options.tokens}{share} is less than one step of {options.step_tokens(stage)} tokens: "
                f"{options.batch_size} rows of {options.context} tokens a batch."
            )
    if options.role("adapt") != options.adapt.train.role and "adapt" in options.stages:
        raise UsageError("Stage adapt would train less than stage distill; let it train as much.")
    for name, value in (("items", options.items), ("prompts", options.prompts)):
        if value < 0:
            raise UsageError(f"--{name} is {value}; give 0 to leave them out, or more.")
    if options.evaluate_every < 0:
        raise UsageError(f"--evaluate-every is {options.evaluate_every}; give a number of tokens.")
    if options.evaluate_every and not {"distill", "adapt"} & set(options.stages):
        raise UsageError("--evaluate-every is for the stages distill and adapt; name one in --stages.")
    if options.baseline and "adapt" not in options.stages:
        raise UsageError("--baseline trains the source on the tokens of stage adapt; name adapt in --stages.")


def _absolute(path: str | os.PathLike[str]) -> str:
    """The path as a run keeps it: a run may be resumed from another folder."""
    return str(Path(path).expanduser().absolute())


def check_settings(plan: LayerPlan, settings: dict[str, Any]) -> None:
    """UsageError when a mixer setting's value is not of its default's kind, or out of range; names are for convert."""
    if settings.get("conv_activation") not in (None, "silu"):
        raise UsageError(f"The setting conv_activation is {settings['conv_activation']!r}; it can be silu or null.")
    if "memory" in settings and not _is_memory(settings["memory"]):
        raise UsageError(f"The setting memory is {settings['memory']!r}; give two numbers of tokens, such as [1, 64].")
    for kind in filter(None, plan.kinds):
        for name, value in settings.items():
            default = MIXERS[kind].defaults.get(name)
            numeric = isinstance(default, int | float) and not isinstance(default, bool)
            fits: Any = (int, float) if isinstance(default, float) else type(default)
            if default is None or (isinstance(default, tuple) and isinstance(value, list | tuple)):
                continue
            if not isinstance(value, fits) or (numeric and isinstance(value, bool)):
                raise UsageError(f"The setting {name} is {value!r}; give a value like {default!r}.")
            number: Any = value
            if numeric and not (0 <= number < math.inf and (number > 0 or name in _MAY_BE_ZERO)):
                raise UsageError(f"The setting {name} is {value}, which is too small or too large.")


def _is_memory(value: Any) -> bool:
    """Whether it is the time constants of the first and the last head: numbers above 0, the shorter one first."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in value)
    return numbers and 0 < value[0] <= value[1] < math.inf


def begin_run(folder: Path, options: PrimeOptions, source: Source, place: Workspace) -> None:
    """Make the run's folder, which no other run has, and note what it is a run of."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise WorkspaceError(f"Another run has just begun in {folder}; run the same command once more.") from None
    write_json(folder / RUN_FILE, {"options": asdict(options)})
    place.record("prime-run", folder, source=source.name, model=options.model, revision=options.revision)


def last_run(place: Workspace, model: str | os.PathLike[str] | None) -> tuple[Path, PrimeOptions]:
    entry = place.last("prime-run")
    if entry is None:
        raise CheckpointError(f"There is no run in {place.folder} to resume; start one without --resume.")
    folder = Path(entry["value"])
    options = PrimeOptions.read(folder / RUN_FILE)
    if model is not None and options.model not in (os.fspath(model), _absolute(model)):
        raise UsageError(
            f"The last run in {place.folder} is of {options.model}, not of {model}; leave MODEL out to resume it."
        )
    if Path(options.output).exists():
        raise UsageError(f"The last run is finished: its hybrid is in {options.output}.")
    return folder, options


def output_dtype(source: Source, name: str | None) -> torch.dtype:
    if name is not None:
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return source.stored_dtype


def describe(options: PrimeOptions, source: Source) -> dict[str, Any]:
    plan = LayerPlan.from_pattern(options.pattern)
    return {
        "source": source.name,
        "pattern": options.pattern,
        "converted": plan.layers,
        "evenly_spaced": options.chosen == SPACED,
        "chosen": options.chosen,
        "stages": list(options.stages),
        "data": list(options.data),
        "held_out": options.held_out,
        "tokens": options.tokens,
        "init_tokens": options.init_tokens,
        "context": options.context,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "start": asdict(options.start),
        "align": asdict(options.align),
        **{stage: asdict(options.options_of(stage)) for stage in ("distill", "adapt") if stage in options.stages},
        "mixer_settings": options.settings,
    }


def chosen_layers(options: PrimeOptions, plan: LayerPlan) -> str:
    """Which layers are converted and why, for a person."""
    if options.chosen == SPACED:
        return "No probe of this model was made here: the layers to convert are evenly spaced."
    return f"Layers to convert, {options.chosen}: {', '.join(map(str, plan.layers))}."


def run_name(source: Source, plan: LayerPlan) -> str:
    """Source, mixers and ratio, such as Qwen3-0.6B-gka-50."""
    origin = Path(source.gguf or source.repository or source.path.name).name.removesuffix(".gguf")
    return f"{origin}-{plan.label}"
