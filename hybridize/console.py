"""The only place that prints: results on stdout; progress, notes and warnings on stderr.

--json prints one JSON document as the result; --quiet leaves out progress and notes. Both may be given.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybridize.processes import rank as process_rank

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_BLOCKS = "▏▎▍▌▋▊▉█"  # one to eight eighths of a character
LINE_INTERVAL = 10.0  # seconds between progress lines where stderr is not a terminal


class Tracker(Protocol):
    """Long work's handle on its progress display."""

    def advance(self, amount: float = 1, status: str | None = None) -> None:
        """Count `amount` more units as done, and show a short status such as the loss beside the bar."""


class Console:
    """Shows results, tables and progress in one of the modes human, --json and --quiet."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.silent = process_rank() > 0  # of several processes, the first one speaks
        self.quiet = quiet or self.silent
        self._live: Progress | None = None

    def result(self, data: Mapping[str, Any], human: Callable[[], None] | None = None) -> None:
        """Print the command's result: as JSON, or by calling `human`, or else as a report of the data."""
        if self.silent:
            return
        if self.json:
            print(json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False))
        elif human is not None:
            human()
        else:
            self.report(data)

    def text(self, text: str) -> None:
        """Print a line of a human result on stdout."""
        print(text)

    def note(self, text: str) -> None:
        """Say on stderr what is going on; --quiet leaves it out."""
        if not self.quiet:
            self._stderr(text)

    def warn(self, text: str) -> None:
        """Say on stderr what a person should know, in every mode."""
        if not self.silent:
            self._stderr(f"Warning: {text}")

    def error(self, text: str) -> None:
        """Say on stderr why the command failed."""
        self._stderr(f"Error, process {process_rank()}: {text}" if self.silent else f"Error: {text}")

    def report(self, values: Mapping[str, Any], title: str | None = None) -> None:
        """Print names and values in two columns."""
        if title:
            print(title)
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            print(f"  {name:<{width}}  {show(value)}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
        """Print a table: the first column to the left, numbers to the right."""
        from rich import box
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(columns):
            number = any(isinstance(row[index], int | float) for row in rows)
            table.add_column(column, justify="right" if index and number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(show(cell)) for cell in row))
        # A pipe has no width, and a table folded at 80 columns is hard to read or to search.
        RichConsole(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)

    @contextmanager
    def progress(self, description: str, total: float | None = None, unit: str = "step") -> Iterator[Tracker]:
        """Show a bar with rate and estimated end while the block runs; lines now and then without a terminal."""
        if self.quiet:
            yield _Silent()
        elif sys.stderr.isatty() and self._live is None:
            with _bar(description, total, unit) as tracker:
                self._live = tracker.progress
                try:
                    yield tracker
                finally:
                    self._live = None
        else:
            lines = _Lines(self._stderr, description, total, unit)
            yield lines
            lines.close()

    def _stderr(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


class _Silent:
    def advance(self, amount: float = 1, status: str | None = None) -> None:
        """Show nothing."""


class _Bar:
    """One task of a live rich progress display."""

    def __init__(self, progress: "Progress", task: "TaskID", unit: str) -> None:
        self.progress = progress
        self.task = task
        self.unit = unit
        self.start = time.monotonic()
        self.done = 0.0
        self.status = ""

    def advance(self, amount: float = 1, status: str | None = None) -> None:
        self.done += amount
        self.status = self.status if status is None else status
        speed = rate(self.done, time.monotonic() - self.start, self.unit)
        self.progress.update(self.task, advance=amount, rate=speed, status=self.status)


class _Lines:
    """Progress as a line every LINE_INTERVAL seconds, and one at the end."""

    def __init__(self, write: Callable[[str], None], description: str, total: float | None, unit: str) -> None:
        self.write = write
        self.description = description
        self.total = total
        self.unit = unit
        self.start = self.last = time.monotonic()
        self.done = 0.0
        self.status = ""

    def advance(self, amount: float = 1, status: str | None = None) -> None:
        self.done += amount
        self.status = self.status if status is None else status
        now = time.monotonic()
        if now - self.last >= LINE_INTERVAL:
            self.last = now
            self._line(now, ended=False)

    def close(self) -> None:
        self._line(time.monotonic(), ended=True)

    def _line(self, now: float, ended: bool) -> None:
        elapsed = now - self.start
        count = f"{self.done:,.0f}" if self.total is None else f"{self.done:,.0f}/{self.total:,.0f}"
        parts = [f"{self.description}: {count} {self.unit}s", rate(self.done, elapsed, self.unit)]
        if ended:
            parts.append(f"took {duration(elapsed)}")
        elif self.total is not None and self.done > 0:
            parts.append(f"{duration(elapsed / self.done * (self.total - self.done))} left")
        self.write(", ".join(part for part in [*parts, self.status] if part))


@contextmanager
def _bar(description: str, total: float | None, unit: str) -> Iterator[_Bar]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[status]}", markup=False),
    ]
    with Progress(*columns, console=RichConsole(stderr=True), redirect_stdout=False, redirect_stderr=False) as progress:
        yield _Bar(progress, progress.add_task(description, total=total, rate="", status=""), unit)


def rate(done: float, seconds: float, unit: str) -> str:
    """Speed in words: `1,234 tokens/s`, or `3.1 s/step` where one unit takes longer than a second."""
    if done <= 0 or seconds <= 0:
        return ""
    speed = done / seconds
    if speed < 1:
        return f"{1 / speed:.1f} s/{unit}"
    return f"{speed:,.0f} {unit}s/s" if speed >= 100 else f"{speed:.1f} {unit}s/s"


def duration(seconds: float) -> str:
    """Seconds as `12 s`, `3:05` or `1:02:03`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Bytes as `512 B`, `1.5 MiB` or `2.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def bar(share: float, width: int = 20) -> str:
    """A bar that fills `share`, from 0 to 1, of `width` characters; of # where stdout's encoding has no blocks."""
    filled, eighths = divmod(round(8 * width * min(max(share, 0.0), 1.0)), 8)
    try:
        _BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#" * round(filled + eighths / 8)
    return _BLOCKS[-1] * filled + (_BLOCKS[eighths - 1] if eighths else "")


def show(value: Any) -> str:
    """A value for a person: thousands separated, floats to four digits, lists joined, None as a dash."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(show(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {show(item)}" for name, item in value.items())
    return str(value)


def plain(value: Any) -> Any:
    """The value in JSON's own types: paths as text, scalars of numpy and torch as numbers, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain(value.item())
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
