"""What goes to stdout and what to stderr, in every mode."""

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from hybridize import console as module
from hybridize.console import Console, duration, plain, rate, show, size

Capture = pytest.CaptureFixture[str]


def test_json_is_the_only_thing_on_stdout(capsys: Capture) -> None:
    console = Console(json=True)
    console.note("a note")
    console.warn("a warning")
    with console.progress("work", total=2) as tracker:
        tracker.advance(2)
    console.result({"loss": 1.5, "where": Path("/x"), "bad": math.nan, "name": "naïve"}, human=lambda: 1 / 0)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"loss": 1.5, "where": "/x", "bad": None, "name": "naïve"}
    assert "a note" in err and "Warning: a warning" in err and "work: 2/2 steps" in err


def test_human_result(capsys: Capture) -> None:
    console = Console()
    console.result({"loss": 1.5}, human=lambda: console.text("the loss is 1.5"))
    console.result({"loss": 1.5, "tokens": 12345})
    out, err = capsys.readouterr()
    assert out.splitlines() == ["the loss is 1.5", "  loss    1.5", "  tokens  12,345"]
    assert err == ""


def test_quiet_keeps_results_and_warnings(capsys: Capture) -> None:
    console = Console(quiet=True)
    console.note("a note")
    console.warn("a warning")
    with console.progress("work", total=1) as tracker:
        tracker.advance()
    console.result({"loss": 1})
    out, err = capsys.readouterr()
    assert "loss" in out
    assert err == "Warning: a warning\n"


def test_table_is_not_folded_in_a_pipe(capsys: Capture) -> None:
    long = "x" * 150
    Console().table(["name", "loss"], [[long, 1.25], ["[b]not markup[/b]", None]], title="Losses")
    out, _ = capsys.readouterr()
    assert long in out and "1.25" in out and "[b]not markup[/b]" in out and "Losses" in out


def test_progress_lines_say_rate_and_time_left(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 5.0, 20.0, 40.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with Console().progress("align", total=400, unit="token") as tracker:
        tracker.advance(50)
        tracker.advance(150, status="loss 0.5")
    assert capsys.readouterr().err.splitlines() == [
        "align: 200/400 tokens, 10.0 tokens/s, 20 s left, loss 0.5",
        "align: 200/400 tokens, 5.0 tokens/s, took 40 s, loss 0.5",
    ]


def test_progress_without_a_total(capsys: Capture) -> None:
    with Console().progress("read", unit="file") as tracker:
        tracker.advance(3)
    assert "read: 3 files" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_bar_on_a_terminal() -> None:
    """On a terminal there is a live bar, notes do not break it, and stdout stays clean."""
    code = (
        "from hybridize.console import Console\n"
        "console = Console()\n"
        "with console.progress('align', total=4, unit='token') as tracker:\n"
        "    for i in range(4):\n"
        "        tracker.advance(status='loss 0.5')\n"
        "        console.note(f'note [{i}]')\n"
        "console.result({'done': 4})\n"
    )
    main, terminal = pty.openpty()
    root = str(Path(module.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    assert done.returncode == 0 and done.stdout.split() == [b"done", b"4"]
    for part in (b"align", b"4/4", b"loss 0.5", b"note [3]"):
        assert part in shown


def test_words() -> None:
    assert [duration(12), duration(185), duration(3723)] == ["12 s", "3:05", "1:02:03"]
    assert [size(512), size(1536), size(2 * 2**30), size(3 * 2**40)] == ["512 B", "1.5 KiB", "2.0 GiB", "3.0 TiB"]
    assert [rate(10, 31, "step"), rate(5000, 2, "token"), rate(0, 1, "x")] == ["3.1 s/step", "2,500 tokens/s", ""]
    assert [show(None), show(True), show([1, 2.5]), show({"a": 1})] == ["-", "yes", "1, 2.5", "a 1"]


def test_plain_takes_numpy_and_torch() -> None:
    import numpy
    import torch

    data = {"a": numpy.float32(0.5), "b": torch.tensor(3), "c": torch.ones(2), "d": {3, 1}, "e": torch.float32}
    assert plain(data) == {"a": 0.5, "b": 3, "c": [1.0, 1.0], "d": [1, 3], "e": "torch.float32"}
