"""Where a hybrid came from: its source's repository or folder, and what its model card says of licence and language."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridize.builtin import LICENSE, REPOSITORY
from hybridize.sources import REPOSITORY_NAME

CARRIED = ("license", "license_name", "license_link", "language")


@dataclass(frozen=True)
class Origin:
    """The source: a name to show, its repository and commit, its folder where it is at hand, its card's metadata."""

    name: str
    repository: str | None = None
    revision: str | None = None
    folder: Path | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def find_origin(source: dict[str, Any]) -> Origin:
    """The origin that the `source` of a config's hybrid block names: a folder, or a repository in the cache or, for
    its card, on the Hub."""
    name, revision = str(source.get("name") or ""), source.get("revision")
    if name.startswith(f"{REPOSITORY} ("):  # the copy in a GGUF
        return Origin(REPOSITORY, REPOSITORY, None, None, {"license": LICENSE})
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(path)
    if not REPOSITORY_NAME.fullmatch(name):
        return Origin(path.name or "an unnamed model")
    folder = _cached(name, revision)
    card = folder / "README.md" if folder is not None else None
    if card is None or not card.is_file():
        card = _card(name, revision)
    return Origin(name, name, revision, folder, _metadata(card))


def _local(path: Path) -> Origin:
    folder = path if path.is_dir() else path.parent
    metadata = _metadata(folder / "README.md")
    return Origin(path.name, None, None, path if path.is_dir() else None, metadata)


def _cached(repository: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except Exception:  # not in the cache, in one way or another
        return None


def _card(repository: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "README.md", revision=revision))
    except Exception:  # a source without a card, or that is gone: the card says that its licence is not known
        return None


def _metadata(card: Path | None) -> dict[str, Any]:
    """What a card's YAML says of licence and language; nothing where it cannot be read."""
    import yaml

    if card is None or not card.is_file():
        return {}
    block = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", card.read_text("utf-8", errors="replace"), re.DOTALL)
    try:
        found = yaml.safe_load(block[1]) if block else None
    except yaml.YAMLError:
        return {}
    return {name: found[name] for name in CARRIED if found.get(name)} if isinstance(found, dict) else {}
