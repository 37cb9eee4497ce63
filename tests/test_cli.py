"""The command line: fast, lazy, and every failure is one sentence with the right exit code."""

import errno
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

import hybridize
from hybridize import cli
from hybridize.commands import COMMANDS, Command, options
from hybridize.console import Console
from hybridize.errors import Interrupted, SourceError, UsageError

Python = Callable[..., subprocess.CompletedProcess[str]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Adds a command `try` whose body is the given function."""

    def add(body: Callable[[], Any]) -> None:
        def command(
            number: Annotated[int, typer.Option(help="A number.")] = 1,
            device: options.Device = None,
            dtype: options.Dtype = None,
            as_json: options.Json = False,
            workspace: options.Workspace = None,
        ) -> None:
            """Try something."""
            body()

        module = types.ModuleType("hybridize_test_command")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(COMMANDS, "try", Command(module.__name__, "Try something."))

    yield add


def fail(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def processor_time() -> float:
    """Seconds of processor time of all processes that have ended: other work on the machine does not count."""
    used = os.times()
    return used.children_user + used.children_system


def test_help_is_fast_and_needs_neither_torch_nor_transformers(python: Python) -> None:
    code = (
        "import sys; from hybridize.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    times = []
    for _ in range(5):
        start = processor_time()
        done = python("-c", code)
        times.append(processor_time() - start)
        assert done.returncode == 0, done.stderr
        assert "Usage: hybridize" in done.stdout
    assert min(times) < 0.3, f"--help took {min(times):.2f} s"


def test_every_command_has_a_full_help_without_torch(python: Python) -> None:
    shown = python("-m", "hybridize", "--help").stdout
    for name, command in COMMANDS.items():
        assert f"{name} " in shown and command.summary.split()[0] in shown
        code = (
            f"import sys; from hybridize.cli import main; main([{name!r}, '--help']); sys.exit('torch' in sys.modules)"
        )
        done = python("-c", code)
        assert done.returncode == 0 and not done.stderr, done.stderr
        for option in ("--json", "--quiet", "--device", "--dtype", "--seed", "--help"):
            assert option in done.stdout, f"{name} lacks {option}"
        assert f"hybridize {name}" in done.stdout.split("Usage:")[1].split("\n", 1)[1], f"{name} --help has no example"


def test_every_command_module_is_listed() -> None:
    folder = Path(cli.__file__).parent / "commands"
    modules = {f"hybridize.commands.{path.stem}" for path in folder.glob("*.py")}
    assert modules - {"hybridize.commands.__init__", "hybridize.commands.options"} == {
        command.module for command in COMMANDS.values()
    }


def test_version(capsys: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hybridize {hybridize.__version__}\n"


def test_success(does: Any, capsys: Capture) -> None:
    does(lambda: Console(json=True).result({"a": 1}))
    assert cli.main(["try"]) == 0
    assert json.loads(capsys.readouterr().out) == {"a": 1}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["frobnicate"], "No such command"),
        (["try", "--frob"], "No such option"),
        (["try", "--number", "x"], "--number"),
        (["try", "--dtype", "int4"], "none of float32, bfloat16, float16"),
        (["try", "--device", "gpu"], "none of cpu, cuda"),
        (["try", "surplus"], "surplus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_line(does: Any, capsys: Capture, arguments: list[str], part: str) -> None:
    does(lambda: pytest.fail("the command must not run"))
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and part in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (SourceError("No such model; try another."), 1, "Error: No such model; try another."),
        (UsageError("--ratio 2 is above 1; give a part of 1."), 2, "Error: --ratio 2 is above 1"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, "The disk is full at /x"),
        (MemoryError(), 1, "not enough memory"),
        (ValueError("odd\nsecond line"), 1, "ValueError: odd. Set HYBRIDIZE_DEBUG=1"),
        (KeyboardInterrupt(), 130, "Interrupted; nothing half-written"),
        (Interrupted("Interrupted at step 3; continue with --resume."), 130, "at step 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failures(
    does: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, part: str
) -> None:
    monkeypatch.delenv("HYBRIDIZE_DEBUG", raising=False)
    does(fail(error))
    assert cli.main(["try"]) == code
    out, err = capsys.readouterr()
    assert out == "" and part in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == (2 if code == 2 else 1)


def test_debug_shows_where(does: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDIZE_DEBUG", "1")
    does(fail(ValueError("odd")))
    assert cli.main(["try"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "raise error" in err and err.endswith("ValueError: odd.\n")


def test_exit_requests_keep_their_code(does: Any) -> None:
    does(fail(typer.Exit(3)))
    assert cli.main(["try"]) == 3
    does(fail(SystemExit(4)))
    assert cli.main(["try"]) == 4


def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    import signal

    code = (
        "import sys, time, types\n"
        "from hybridize import cli, commands\n"
        "module = types.ModuleType('sleeper')\n"
        "def command() -> None:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "module.command = command\n"
        "sys.modules['sleeper'] = module\n"
        "commands.COMMANDS['sleep'] = commands.Command('sleeper', 'Sleep.')\n"
        "sys.exit(cli.main(['sleep']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(hybridize.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "Interrupted; nothing half-written was left under a final name.\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(hybridize.__file__).parent.parent)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "hybridize", "--help"], stdout=writer, stderr=subprocess.PIPE, env=environment
    )
    os.close(writer)
    assert done.stderr == b""


def test_workspace_from_the_environment(does: Any, capsys: Capture) -> None:
    does(lambda: None)
    assert cli.main(["try", "--help"]) == 0
    assert "HYBRIDIZE_WORKSPACE" in capsys.readouterr().out


def test_bars_of_other_libraries_follow_quiet(does: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE")
    does(lambda: None)
    cli.main(["try"])  # stderr is captured here, so it is no terminal
    assert os.environ.pop("TQDM_DISABLE") == "1"
