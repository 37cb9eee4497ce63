"""SHA-256 sums of a finished folder's files, in the file that `sha256sum --check SHA256SUMS` reads."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from hybridize.errors import CheckpointError
from hybridize.workspace import write_text

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Note the sums of all files at the folder's top, or, in an existing list, those of `names` anew."""
    if names is None:
        sums = {}
        names = [path.name for path in folder.iterdir() if path.is_file() and path.name != SUMS]
    else:
        sums = read_checksums(folder)
    sums.update({name: sha256(folder / name) for name in names})
    write_text(folder / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def read_checksums(folder: Path) -> dict[str, str]:
    """Hexadecimal sums by file name, none where there is no list; CheckpointError when it is damaged."""
    path = folder / SUMS
    if not path.exists():
        return {}
    lines = [_LINE.fullmatch(line) for line in path.read_text("utf-8", errors="replace").splitlines()]
    if not all(lines):
        raise CheckpointError(f"{path} is not a list of SHA-256 sums; restore it, or delete it to do without.")
    return {line[2]: line[1] for line in lines if line}


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
