"""`hybridize prime`: convert a model's layers, align them, and write a hybrid."""

from inspect import signature
from typing import Annotated, Any

import typer

from hybridize.commands import options


def command(
    ctx: typer.Context,
    model: options.Model = None,
    ratio: Annotated[float | None, typer.Option("--ratio", help="Share of layers to convert, above 0 to 1.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Layers to convert, from 0: 1,3,5.")] = None,
    pattern: Annotated[
        str | None, typer.Option("--pattern", help="All layers, such as '*-GKA-*-GDN': *, GKA, GDN, M2, SWA.")
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer",
            callback=options.one_of(*options.TOKENS),
            help="What a layer becomes: gka, gdn, mamba2 or swa. Default: the probe's, or gka.",
        ),
    ] = None,
    stages: Annotated[
        str, typer.Option("--stages", help="Which stages to run: init, align, distill, adapt.")
    ] = "init,align",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to train on, over all stages.")] = 1_000_000,
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="NAME[=WEIGHT]",
            help="Text, JSONL, Parquet or token files, a folder, a Hub dataset owner/name:config:split, or builtin. "
            "Several: a mixture, with weights by tokens.",
        ),
    ] = ["builtin"],  # noqa: B006
    held_out: Annotated[
        str | None, typer.Option("--held-out", help="Data to measure on. Default: a twentieth of --data.")
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option("--text-field", help="Field of records to read. Default: text or messages."),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens per row of text.")] = 1024,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Rows per step. Default: 8192 tokens, on a CPU 2048.")
    ] = None,
    init_tokens: Annotated[int | None, typer.Option("--init-tokens", min=1, help="Tokens that init solves on.")] = None,
    held_out_tokens: Annotated[int, typer.Option("--held-out-tokens", min=1, help="Tokens to measure on.")] = 32_768,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="Peak learning rate of align.")] = 4e-3,
    distill_lr: Annotated[float, typer.Option("--distill-lr", help="Peak learning rate of distill.")] = 1e-3,
    adapt_lr: Annotated[float, typer.Option("--adapt-lr", help="Peak learning rate of adapt.")] = 3e-4,
    train: Annotated[
        str,
        typer.Option(
            "--train",
            callback=options.one_of("mixers", "mixers+norms+attention", "all"),
            help="What adapt trains: mixers, mixers+norms+attention, or all.",
        ),
    ] = "all",
    kl: Annotated[float, typer.Option("--kl", min=0.0, help="Weight of the KL to the source in adapt.")] = 0.0,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Batches a step, in distill and adapt.")] = 1,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Save memory in distill and adapt by a second forward.")
    ] = False,
    compute: Annotated[
        str | None,
        typer.Option(
            "--compute",
            callback=options.one_of("float32", "bfloat16"),
            help="What distill and adapt compute in; with bfloat16 the rest may use TF32. Default: bfloat16 on CUDA.",
        ),
    ] = None,
    evaluate_every: Annotated[
        int, typer.Option("--evaluate-every", min=0, help="Measure after so many tokens, and keep the best weights.")
    ] = 0,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Train the source too, on the tokens of adapt, and measure it.")
    ] = False,
    items: Annotated[
        int | None,
        typer.Option("--items", min=0, help="Retrieval items for each task and depth. Default: 10, on a CPU 2."),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", min=0, help="Texts to write from held-out beginnings. Default: 20, on a CPU 4."),
    ] = None,
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            callback=options.one_of("one", "blend"),
            help="How output gates start: one, or the reference's blend.",
        ),
    ] = "one",
    solve: Annotated[bool, typer.Option("--solve/--no-solve", help="Solve output projections in init.")] = True,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A mixer setting, such as num_iters=10.")
    ] = None,
    plot: options.Plot = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Send the loss curve to TensorBoard, in the run's folder.")
    ] = False,
    revision: options.Revision = None,
    output: options.Output = None,
    resume: options.Resume = False,
    dry_run: options.DryRun = False,
    device: options.Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            callback=options.one_of(*options.DTYPES),
            help="Number format of the written hybrid. Default: the source's.",
        ),
    ] = None,
    seed: options.Seed = 0,
    workspace: options.Workspace = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Turn a model into a hybrid: copy its weights, fit the new layers (init), and align them with the old (align).

    Then, where asked for, they learn the source's outputs end to end (distill), and the hybrid learns text (adapt).
    Without MODEL it is the one that the last run used, or else the built-in one; without --layers and --pattern, the
    last probe of the model chooses the layers. Beside the held-out loss, retrieval and generated text are measured of
    the source and of the hybrid before and after training. An interrupted run continues with --resume.

    \b
    Examples:
      hybridize prime Qwen/Qwen3-0.6B --ratio 0.5 --layer gka --tokens 5000000 --data texts/
      hybridize prime ./model --data books/=3 --data owner/chats=1 --stages init,align,adapt
      hybridize prime ./model --layers 1,3,5 --layer gdn --stages init --output ./hybrid
      hybridize prime ./model --ratio 0.25 --dry-run
    """
    from hybridize.console import Console
    from hybridize.priming.objective import LossWeights
    from hybridize.priming.report import read_setting, show_dry_run, show_report
    from hybridize.priming.run import prime
    from hybridize.priming.stages import StageOptions
    from hybridize.priming.trainer import TrainOptions
    from hybridize.priming.transfer import StartOptions

    if resume and dry_run:
        raise typer.BadParameter("--dry-run plans a new run and --resume goes on with the last; leave one out.")
    console = Console(json=json, quiet=quiet)
    if resume and (given := options.given(ctx)):
        console.note(f"A resumed run keeps the settings it began with; not read again: {', '.join(given)}.")
    settings: dict[str, Any] = dict(read_setting(text) for text in set_ or [])
    if taken := sorted(settings.keys() & signature(prime).parameters.keys()):
        raise typer.BadParameter(f"--set {taken[0]} is no mixer setting.")
    report = prime(
        model,
        ratio=ratio,
        layers=options.integers("--layers", layers, "1,3,5"),
        pattern=pattern,
        layer=layer,
        stages=[stage.strip() for stage in stages.split(",")],
        tokens=tokens,
        data=data,
        held_out=held_out,
        text_field=text_field,
        output=output,
        resume=resume,
        dry_run=dry_run,
        context=context,
        batch_size=batch_size,
        init_tokens=init_tokens,
        held_out_tokens=held_out_tokens,
        lr=lr,
        start=StartOptions(gate=gate, solve=solve),
        distill=StageOptions(
            LossWeights(kl=1.0), TrainOptions("mixers", lr=distill_lr, accumulate=accumulate, recompute=recompute)
        ),
        adapt=StageOptions(
            LossWeights(cross_entropy=1.0, kl=kl),
            TrainOptions(train, lr=adapt_lr, accumulate=accumulate, recompute=recompute),
        ),
        compute=compute,
        evaluate_every=evaluate_every,
        baseline=baseline,
        items=items,
        prompts=prompts,
        plot=plot,
        tensorboard=tensorboard,
        seed=seed,
        device=device,
        dtype=dtype,
        workspace=workspace,
        console=console,
        revision=revision,
        **settings,
    )
    console.result(report, lambda: (show_dry_run if dry_run else show_report)(console, report))
