"""`hybridize push`: verify a hybrid, write its model card, and upload it to the Hub."""

import sys
from typing import Annotated

import typer

from hybridize.commands import options


def command(
    folder: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR", callback=options.not_empty, help="A hybrid's folder. Default: the last one made."
        ),
    ] = None,
    repository: Annotated[
        str | None,
        typer.Argument(
            metavar="REPO",
            callback=options.not_empty,
            help="OWNER/NAME on the Hub. Default: USER/SOURCE-MIXER-PERCENT, after a question or with --yes.",
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", callback=options.not_empty, help="The branch to push to, made if need be."),
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of a commit.")] = False,
    commit_message: Annotated[
        str | None,
        typer.Option("--commit-message", "-m", callback=options.not_empty, help="The commit's message."),
    ] = None,
    card: Annotated[
        str,
        typer.Option(
            "--card",
            callback=options.one_of("keep", "overwrite"),
            help="A README.md of your own in the folder: keep it, or overwrite it.",
        ),
    ] = "keep",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list all that is wrong, and send nothing.")
    ] = False,
    device: options.Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            callback=options.one_of(*options.DTYPES),
            help="Number format to try the model in. Default: the folder's own.",
        ),
    ] = None,
    seed: options.Seed = 0,
    workspace: options.Workspace = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Verify a finished hybrid, write its model card, and upload it to the Hugging Face Hub in one commit.

    Checksums, tensors, values, config, tokenizer and a short generation are checked first, and all that is wrong is
    listed. Of one argument, what is no existing folder is REPO. A push that broke off goes on when it is run again.
    The token is that of `hf auth login` or HF_TOKEN.

    \b
    Examples:
      hybridize push --dry-run
      hybridize push ./hybrid me/Qwen3-0.6B-gka-50 --private
      hybridize push ./hybrid some-org/model --create-pr -m "Add the hybrid"
    """
    from hybridize.console import Console
    from hybridize.hub.report import show_dry_run, show_push
    from hybridize.hub.run import push

    console = Console(json=json, quiet=quiet)
    asks = sys.stdin.isatty() and sys.stderr.isatty()
    report = push(
        folder,
        repository,
        private=private,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        card=card,
        yes=yes,
        dry_run=dry_run,
        device=device,
        dtype=dtype,
        seed=seed,
        workspace=workspace,
        console=console,
        confirm=(lambda question: typer.confirm(question, default=True, err=True)) if asks else None,
    )
    console.result(report, lambda: (show_dry_run if dry_run else show_push)(console, report))
    if report["findings"]:
        raise typer.Exit(1)
