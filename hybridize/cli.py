"""The command line: assembles the commands, and turns errors into one sentence and an exit code.

Only the command that was asked for is imported, so `hybridize --help` needs neither torch nor transformers.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Annotated, Any

import typer

from hybridize import __version__
from hybridize.commands import COMMANDS, Command
from hybridize.console import Console
from hybridize.errors import DEBUG_VARIABLE, HybridizeError, Interrupted, UsageError, explain
from hybridize.processes import rank

EPILOG = "A command's own --help shows its options and examples."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if rank() > 0 or not sys.stderr.isatty() or {"--quiet", "-q"} & set(arguments):
        os.environ.setdefault("TQDM_DISABLE", "1")  # other libraries' bars; tqdm reads it when it is imported
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BaseException as error:
        return _report(error)


def build(chosen: str | None = None) -> typer.Typer:
    """The Typer application, with the real function of the chosen command and a stand-in for each of the others."""
    app = typer.Typer(
        name="hybridize",
        help="Turn a pre-trained Transformer into a hybrid of attention and state-space layers.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # plain help is printed without importing rich
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_global_options)
    for name, command in COMMANDS.items():
        function = _load(command) if name == chosen else _stand_in
        app.command(name, short_help=command.summary, help=None if name == chosen else command.summary)(function)
    return app


def _run(arguments: list[str]) -> int:
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    group = typer.main.get_command(build(chosen))
    try:
        group.main(args=arguments, prog_name="hybridize")
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    return 0


def _load(command: Command) -> Callable[..., Any]:
    """The command's function, with Ctrl-C turned into an error of ours before Typer turns it into a silent exit."""
    function = import_module(command.module).command

    @wraps(function)
    def guarded(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except KeyboardInterrupt:
            raise _interrupted() from None

    return guarded


def _stand_in() -> None:
    """Holds a command's place in the help."""


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().text(f"hybridize {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Nothing to do: each option of the group has its own callback."""


def _interrupted() -> Interrupted:
    return Interrupted("Interrupted; nothing half-written was left under a final name.")


def _report(error: BaseException) -> int:
    """Print why the command failed, in one sentence, and return the exit code."""
    if isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.errno == errno.EPIPE):
        _silence_stdout()
        return 1
    if isinstance(error, KeyboardInterrupt):
        error = _interrupted()
    if not isinstance(error, Exception):
        raise error
    if os.environ.get(DEBUG_VARIABLE) == "1":
        import traceback

        traceback.print_exception(error)
    sentence = explain(error)
    if rank() > 0 and isinstance(error, HybridizeError):
        return error.exit_code  # the first process says it
    if sentence is None:
        sentence = f"hybridize failed unexpectedly: {type(error).__name__}: {_first_line(error)}"
        if os.environ.get(DEBUG_VARIABLE) != "1":
            sentence += f" Set {DEBUG_VARIABLE}=1 to see where, and please report it."
    console = Console()
    if isinstance(error, Interrupted):
        console.note(sentence)
    else:
        console.error(sentence)
    if isinstance(error, UsageError):
        console.note("Try --help after the command.")
    return error.exit_code if isinstance(error, HybridizeError) else 1


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    line = line if len(line) <= 300 else f"{line[:297]}..."
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader of the pipe has left."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
