"""Which files of a finished folder are pushed, which stay here, and which have no business there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from hybridize.checksums import SUMS, read_checksums, sha256
from hybridize.console import Console
from hybridize.errors import CheckpointError
from hybridize.sources import WEIGHT_SUFFIXES, companions
from hybridize.weights import INDEX, SINGLE

CARD = "README.md"
_LEFT_OUT = ("*.tmp", "*.partial", "*.part", "*.lock", "*.incomplete", "*.pyc", "*.orig", "*.bak", "*~", "*.log")
_UNLISTED = {CARD, SUMS}  # what push itself may write


@dataclass(frozen=True, order=True)
class Finding:
    """Something wrong with a folder: the file's name in it, and what is wrong, with a next step."""

    file: str
    problem: str


@dataclass
class Contents:
    """The files to push by name, with their bytes, and the names of those that are left out."""

    files: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The size of all files to push."""
        return sum(self.files.values())


def list_contents(folder: Path) -> tuple[Contents, list[Finding]]:
    """Sort the folder's files; weights that no index names are findings, hidden and temporary files are left out."""
    contents, findings = Contents(), []
    wanted = shards(folder)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            continue
        pure = PurePath(name)
        if any(part.startswith(".") or part == "__pycache__" for part in pure.parts) or any(map(pure.match, _LEFT_OUT)):
            contents.left_out.append(name)
        elif not path.exists():
            findings.append(Finding(name, "is a link to nothing; restore its target, or delete it."))
        elif path.name.endswith(WEIGHT_SUFFIXES) and name not in wanted:
            findings.append(Finding(name, "holds weights that are no part of this model; move it away."))
        else:
            contents.files[name] = path.stat().st_size
    return contents, findings


def shards(folder: Path) -> set[str]:
    """The weight files that the folder should hold, its index among them; only the index if that is damaged."""
    if not (folder / INDEX).exists():
        return {SINGLE}
    try:
        places = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        return {INDEX, *(name for name in places.values() if isinstance(name, str))}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {INDEX, *(path.name for path in folder.glob("model-*-of-*.safetensors"))}


def check_sums(folder: Path, console: Console) -> list[Finding]:
    """Compare every file that prime wrote with the sum that it noted."""
    try:
        sums = read_checksums(folder)
    except CheckpointError as error:
        return [Finding(SUMS, str(error).removeprefix(f"{folder / SUMS} "))]
    findings = []
    names = [name for name in sums if name not in _UNLISTED]
    with console.progress("Checksums", len(names), "file") as tracker:
        for name in names:
            if not (folder / name).is_file():
                findings.append(Finding(name, f"is missing, although {SUMS} lists it; restore it."))
            elif sha256(folder / name) != sums[name]:
                problem = f"is not what prime wrote; restore it or, if you changed it, delete its line in {SUMS}."
                findings.append(Finding(name, problem))
            tracker.advance()
    return findings


def check_json(folder: Path) -> list[Finding]:
    """Every JSON file at the folder's top must be readable."""
    findings = []
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_text("utf-8"))
        except ValueError as error:
            findings.append(Finding(path.name, f"is not valid JSON ({error}); restore it."))
    return findings


def check_companions(folder: Path, source: Path) -> list[Finding]:
    """Tokenizer, chat template, generation config and licence must be the source's, byte for byte."""
    findings = []
    for theirs in companions(source):
        ours = folder / theirs.name
        if not ours.is_file():
            findings.append(Finding(theirs.name, f"is missing; copy it from {source}."))
        elif ours.read_bytes() != theirs.read_bytes():
            findings.append(Finding(theirs.name, f"differs from that of {source}; copy it from there."))
    return findings
