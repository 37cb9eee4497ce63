"""Where runs live, how the next command finds what the last one made, and how files appear only when they are whole."""

import json
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybridize.console import size
from hybridize.errors import WorkspaceError

DEFAULT_FOLDER = "hybridize-runs"
VARIABLE = "HYBRIDIZE_WORKSPACE"
INDEX = "index.json"
FORMAT = 1
KEPT = 1000  # entries of the index; the oldest go first


class Workspace:
    """A folder of runs with an index of what each command used or made, oldest first."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or os.environ.get(VARIABLE) or DEFAULT_FOLDER).expanduser()
        if self.folder.exists() and not self.folder.is_dir():
            raise WorkspaceError(f"The workspace {self.folder} is a file; choose a folder with --workspace.")

    @property
    def option(self) -> str:
        """What a command that is to find this workspace must be given: nothing, or ' --workspace FOLDER'."""
        usual = self.folder.absolute() == Workspace().folder.absolute()
        return "" if usual else f" --workspace {shlex.quote(str(self.folder))}"

    def run_folder(self, name: str) -> Path:
        """A path in the workspace for a new run: the name, made fit for a path, with a number when it is taken."""
        stem = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run"
        candidates = (self.folder / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 10_000))
        for folder in candidates:
            if not folder.exists():
                return folder
        raise WorkspaceError(f"{self.folder} holds 9,999 runs named {stem}; choose another place with --output.")

    def make_run_folder(self, name: str) -> Path:
        """The same, made: of two processes that ask at the same time, each gets its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            folder = self.run_folder(name)
            with suppress(FileExistsError):
                folder.mkdir()
                return folder

    def record(self, kind: str, value: str | Path, **details: Any) -> None:
        """Note that a command used or made `value`; a local path is kept in absolute form."""
        text = str(value.absolute()) if isinstance(value, Path) else value
        entry = {"kind": kind, "value": text, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **details}
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder, wait=True):
            entries = [*self.entries(), entry][-KEPT:]
            write_json(self.folder / INDEX, {"format": FORMAT, "entries": entries})

    def entries(self) -> list[dict[str, Any]]:
        """All entries of the index; WorkspaceError when the file is not one that we wrote."""
        path = self.folder / INDEX
        try:
            data = json.loads(path.read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except ValueError as error:
            raise _bad_index(path, f"is not valid JSON ({error})") from None
        if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
            raise _bad_index(path, "is not an index of runs")
        if data.get("format") != FORMAT:
            raise _bad_index(path, f"has format {data.get('format')!r}, and this version reads {FORMAT}")
        entries = data["entries"]
        if not all(isinstance(entry, dict) and {"kind", "value"} <= entry.keys() for entry in entries):
            raise _bad_index(path, "has an entry without a kind and a value")
        return entries

    def last(self, *kinds: str, **details: Any) -> dict[str, Any] | None:
        """The newest entry of one of these kinds (of any, without arguments) whose value is not a deleted path.

        With details, only entries that were recorded with the same ones.
        """
        for entry in reversed(self.entries()):
            gone = os.path.isabs(entry["value"]) and not os.path.exists(entry["value"])
            fits = all(entry.get(name) == value for name, value in details.items())
            if (not kinds or entry["kind"] in kinds) and fits and not gone:
                return entry
        return None


def _bad_index(path: Path, what: str) -> WorkspaceError:
    return WorkspaceError(f"{path} {what}; move it away (the runs themselves are untouched), or use --workspace.")


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Within the block, no other process holds this folder's lock; a lock goes when its process does.

    WorkspaceError where another holds it, unless that is to be waited for. Where a system has no such locks, nothing
    is held.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise WorkspaceError(f"Another process works on {folder}; wait until it has ended, or stop it.") from None
        except OSError:  # some network file systems
            pass
        yield
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that a reader or a crash sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with named_errors(path), os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Name the file in an error of the system that comes from an open one: a full disk does not say which."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8 in one step; see write_bytes."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON in one step; see write_bytes."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(final: str | Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `final` when the block ends well, and removed when it does not.

    The temporary folder is a hidden sibling. One that a killed process left behind for the same target is removed.
    Raises WorkspaceError when `final` exists, before the block and again after it.
    """
    final = Path(final)
    refuse_existing(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{final.name}.{_host()}-"
    for left in final.parent.glob(f"{_escape(prefix)}*"):
        if not _alive(left.name[len(prefix) :].partition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=final.parent))
    try:
        os.chmod(partial, 0o777 & ~_umask())
        yield partial
        _sync_tree(partial)
        refuse_existing(final)
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_folder(final.parent)


def refuse_existing(path: Path, option: str = "--output") -> None:
    """Raise WorkspaceError when something is at this path already, be it a broken link."""
    if os.path.lexists(path):
        raise WorkspaceError(f"{path} exists already and is left as it is; choose another {option}, or move it away.")


def check_place(path: Path, option: str = "--output") -> None:
    """WorkspaceError when something is at this path or nothing can be made there, said before the work."""
    refuse_existing(path, option)
    parent = path.parent
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise WorkspaceError(f"{path} cannot be made, because {parent} is not a folder; choose another {option}.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise WorkspaceError(f"{path} cannot be made, because {parent} cannot be written to; choose another {option}.")


def check_disk_space(path: str | Path, needed: int) -> None:
    """Raise WorkspaceError when the disk that would hold `path` has fewer than `needed` bytes free."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise WorkspaceError(
            f"{path} needs {size(needed)}, but the disk has {size(free)} free; free some space, or choose another "
            "place with --output or --workspace."
        )


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _host() -> str:
    """This machine's name: a process number means nothing on another one that shares the disk."""
    return re.sub(r"\W+", "_", socket.gethostname())


def _alive(number: str) -> bool:
    if not number.isdigit():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _escape(text: str) -> str:
    """The text as a pattern that matches only itself."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        _sync_folder(Path(parent))


def _sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut, where the system lets folders be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
