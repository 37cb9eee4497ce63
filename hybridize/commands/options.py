"""Options and arguments that several commands share, so that each reads the same everywhere."""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from hybridize.hybrid.plan import TOKENS

DTYPES = ("float32", "bfloat16", "float16")


def one_of(*names: str) -> Callable[[str | None], str | None]:
    """A callback that refuses a value that is not one of these names."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(names)}.")
        return value

    return check


def not_empty(value: str | None) -> str | None:
    """A callback that refuses '', as of a shell variable that is not set: as a path it is the working folder."""
    if value is not None and not value.strip():
        raise typer.BadParameter("nothing was given; give a name, or leave it out.")
    return value


def integers(option: str, text: str | None, example: str) -> list[int] | None:
    """The numbers of '1,3,5'; None for an option that was not given."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("-?[0-9]+", word) for word in words):  # int would read 1_0 as 10
        raise typer.BadParameter(f"{option} {text!r} is no list of numbers such as {example}.")
    return [int(word) for word in words]


def _device(value: str | None) -> str | None:
    kind, colon, index = (value or "cpu").partition(":")
    if kind not in ("cpu", "cuda", "mps") or (colon and not index.isdigit()):
        raise typer.BadParameter(f"{value!r} is none of cpu, cuda, cuda:0, cuda:1, ..., mps.")
    return value


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        callback=not_empty,
        help="A model folder, a GGUF file, or a repository on the Hugging Face Hub.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Leave out progress and notes.")]
Device = Annotated[
    str | None,
    typer.Option("--device", callback=_device, help="cpu, cuda, cuda:1 or mps. Default: the fastest there is."),
]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory",
        help="GiB to use of each GPU, at most. Default: what is free. Layers that do not fit stay in main memory.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        callback=one_of(*DTYPES),
        help="float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on an accelerator.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Workspace = Annotated[
    Path | None,
    typer.Option(
        "--workspace",
        envvar="HYBRIDIZE_WORKSPACE",
        file_okay=False,
        help="Where runs are kept. Default: ./hybridize-runs.",
        show_envvar=True,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The folder to write, which must not exist. Default: in the workspace."),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a repository on the Hub.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the last run of this kind where it stopped.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, and write nothing.")]
Data = Annotated[
    str,
    typer.Option("--data", callback=not_empty, help="A text file, a JSONL file, a folder of them, or builtin."),
]
Layer = Annotated[
    str,
    typer.Option("--layer", callback=one_of(*TOKENS), help="What a layer becomes: gka, gdn, mamba2 or swa."),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, help="Draw the result into this .png, .svg or .pdf file.")
]


def typed(ctx: typer.Context, leave_out: Collection[str] = ()) -> list[str]:
    """Options of the command line, apart from some parameters."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params if name not in leave_out}
    names = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return ["--" + name.strip("_").replace("_", "-") for name in names]


def given(ctx: typer.Context) -> list[str]:
    """Options of the command line that only a new run reads."""
    own = {"model", "resume", "dry_run", "device", "gpu_memory", "workspace", "json", "quiet", "plot", "tensorboard"}
    return typed(ctx, own)
