"""`hybridize probe`: score every attention layer, and select the layers that can fade."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridize.commands import options

_READ_WITH_SCORES = {
    *("model", "scores", "ratio", "count", "keep", "by", "select", "layer", "revision"),
    *("plot", "workspace", "json", "quiet"),
}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def command(
    ctx: typer.Context,
    model: options.Model = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="What to measure, of hankel, swa, retrieval and mixer: hankel,swa. Default: hankel, which takes one "
            "pass of the model and selects best of all scores of single layers; mixer, with --select greedy.",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            help="Tokens that a windowed layer still sees; several: 64,512, the first gives the scores. Default: as "
            "many as take the bytes of a GKA state (384 for SmolLM2-135M, 1024 for Qwen3-8B), at most context / 4.",
        ),
    ] = None,
    sinks: Annotated[
        bool, typer.Option("--sinks/--no-sinks", help="Keep the first 4 tokens visible behind the window.")
    ] = True,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            help="Tokens per row of text. Default: 2048; 1024 for the Hankel rank alone, which is slow on a CPU.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", help="Rows of text.")] = 8,
    items: Annotated[int, typer.Option("--items", help="Retrieval items for each task, length and depth.")] = 20,
    align: Annotated[
        int | None,
        typer.Option(
            "--align",
            help="Tokens that mixers are trained on once they are fitted; 0: none. Default: 200000, if there are.",
        ),
    ] = None,
    data: options.Data = "builtin",
    ratio: Annotated[
        float | None, typer.Option("--ratio", help="Share of layers to select, above 0 to 1. Default: 0.5.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", help="Layers to select, instead of --ratio.")] = None,
    keep: Annotated[str | None, typer.Option("--keep", help="Layers that stay attention, from 0: 0,1,29.")] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            help="The score that selects: a method, or more of it, such as swa.loss@64; of several, such as "
            "swa+hankel, the mean of a layer's ranks. Default: the first method.",
        ),
    ] = None,
    select: Annotated[
        str,
        typer.Option(
            "--select",
            help="lowest scores; or greedy: one layer after another, with those before it changed (by swa or mixer).",
        ),
    ] = "lowest",
    scores: Annotated[
        Path | None,
        typer.Option("--scores", help="A CSV of task scores per layer, measured elsewhere; no model is needed."),
    ] = None,
    layer: options.Layer = "gka",
    plot: options.Plot = None,
    revision: options.Revision = None,
    resume: options.Resume = False,
    dry_run: options.DryRun = False,
    device: options.Device = None,
    gpu_memory: options.GpuMemory = None,
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    workspace: options.Workspace = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Score each attention layer by how much of the past it carries into the future, and select the layers to convert.

    A higher score means more is lost; the lowest are selected. hybridize prime takes the selection.

    \b
    Examples:
      hybridize probe Qwen/Qwen3-8B --ratio 0.5
      hybridize probe ./model --method swa,hankel --window 64,512 --context 4096 --data texts/ --plot scores.png
      hybridize probe ./model --method mixer --layer gdn --select greedy
      hybridize probe Qwen/Qwen3-8B --dry-run --gpu-memory 24
      hybridize probe --scores importance.csv --count 18 --keep 0,35
    """
    from hybridize.console import Console
    from hybridize.plots import check_plot
    from hybridize.probing.estimate import show_plan
    from hybridize.probing.plot import draw
    from hybridize.probing.run import plan_probe, probe
    from hybridize.probing.show import show_report
    from hybridize.probing.windowed import SINKS

    read_with_scores = _READ_WITH_SCORES - ({"revision"} if model is None else set())
    if scores is not None and (unread := options.typed(ctx, read_with_scores)):
        raise typer.BadParameter(f"--scores measures nothing, so that it needs no more; leave {', '.join(unread)} out.")
    if resume and dry_run:
        raise typer.BadParameter("--dry-run plans a new probe and --resume goes on with the last; leave one out.")
    console = Console(json=json, quiet=quiet)
    if resume and (given := options.given(ctx)):
        console.note(f"A resumed probe keeps the settings it began with; not read again: {', '.join(given)}.")
    selection: dict[str, Any] = {
        "ratio": ratio,
        "count": count,
        "keep": options.integers("--keep", keep, "0,1,29") or [],
        "by": by,
        "select": select,
        "layer": layer,
    }
    settings: dict[str, Any] = {
        **selection,
        "methods": None if method is None else _words(method),
        "windows": options.integers("--window", window, "64,512"),
        "sinks": SINKS if sinks else 0,
        "context": context,
        "sequences": sequences,
        "items": items,
        "align": align,
        "data": data,
        "seed": seed,
        "dtype": dtype,
    }
    common: dict[str, Any] = {
        "device": device,
        "gpu_memory": gpu_memory,
        "workspace": workspace,
        "console": console,
        "revision": revision,
    }
    if plot is not None:
        check_plot(plot)
    if dry_run:
        plan = plan_probe(model, **common, **settings)
        console.result(plan, lambda: show_plan(console, plan))
        return
    read = settings if scores is None else selection
    report = probe(model, scores=scores, resume=resume, **common, **read)
    console.result(report.to_dict(), lambda: show_report(console, report))
    if plot is not None:  # last, so that nothing that keeps it from being written hides the result
        draw(report, plot)
        console.note(f"The scores are drawn in {plot}.")
