"""`push`: verifies a finished hybrid, writes its model card, and uploads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridize.console import Console, size
from hybridize.errors import CheckpointError, UsageError
from hybridize.hub.card import MARK, write_card
from hybridize.hub.contents import CARD, Contents
from hybridize.hub.metadata import check_metadata, lacking, read_card
from hybridize.hub.origin import Origin, find_origin
from hybridize.hub.preflight import Preflight, Trial, check_folder, read_config
from hybridize.hub.remote_code import CODE, with_auto_map, write_remote_code
from hybridize.hub.upload import Hub, Target, check_target
from hybridize.hybrid.plan import LayerPlan
from hybridize.workspace import Workspace, write_text

REPORT = "prime.json"


def push(
    folder: str | os.PathLike[str] | None = None,
    repository: str | None = None,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    card: str = "keep",
    yes: bool = False,
    dry_run: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    workspace: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    confirm: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Verify a hybrid's folder, write its card, and push it to the Hub in one commit; returns a report.

    Without a folder: the workspace's last hybrid. Without a repository, USER/SOURCE-MIXER-PERCENT is proposed to
    `confirm`, or taken with `yes`. A card of one's own in the folder is kept unless `card` is "overwrite". dry_run:
    verify only, with all that is wrong under `findings`; otherwise CheckpointError lists it before anything is sent.
    Of a sound folder, the card, the modelling code and the place in config.json that names it are written anew.
    The model is tried on `device`, in `dtype` or else its own, on tokens drawn with `seed`.
    Raises UsageError for a wrong or missing name, HubError for what the Hub refuses.
    """
    console = console or Console(quiet=True)
    if card not in ("keep", "overwrite"):
        raise UsageError(f"card is {card!r}; it must be keep or overwrite.")
    place = Workspace(Path(workspace) if workspace else None)
    path, repository = _places(folder, repository, place, console)
    target = Target(repository or "", private, revision, create_pr, commit_message or "")
    check_target(target)
    raw = read_config(path)
    if repository is None and not (yes or dry_run or confirm):
        raise UsageError("No REPO was given; give one, or --yes to push to USER/SOURCE-MIXER-PERCENT.")
    hub = Hub()
    user = "USER" if dry_run else hub.user()
    origin = find_origin((raw.get("hybrid") or {}).get("source") or {})
    preflight = check_folder(path, raw, origin, console, Trial(device, dtype, seed))
    own = _own_card(path, card)
    if own is not None:
        preflight.findings.extend(check_metadata(own))
    report = {"folder": str(path), "repository": repository, **preflight.summary(), "card_kept": own is not None}
    if preflight.findings:
        if dry_run:
            return {"dry_run": True, **report}
        raise CheckpointError(_listing(path, preflight))
    named = with_auto_map(raw)
    if dry_run:
        report["repository"] = repository or _proposed(user, raw, origin)
        written = own or _card(report["repository"], path, named, origin, place)
        return {"dry_run": True, **report, "card": written}
    if repository is None:
        repository = _proposed(user, raw, origin)
        if not yes and confirm is not None and not confirm(f"Push to {repository}?"):
            raise UsageError("Nothing was pushed; give another REPO after the folder.")
    elif "/" not in repository:
        repository = f"{user}/{repository}"
    message = commit_message or f"Upload a hybrid, {raw['hybrid']['pattern']}"
    target = replace(target, repository=repository, message=message)
    if own is None:
        write_text(path / CARD, _card(repository, path, named, origin, place))
    elif missing := lacking(own):
        console.warn(f"{path / CARD} is your own and is kept; its metadata has no {' and no '.join(missing)}.")
    write_remote_code(path, raw)
    contents = _with_written(path, preflight.contents)
    _announce(console, path, contents, target)
    done = hub.push(path, contents, target, console)
    place.record("push", repository, folder=str(path), commit=done["commit"])
    return {**report, "repository": repository, "bytes": contents.bytes, **done}


def _own_card(folder: Path, card: str) -> str | None:
    """The card in the folder that is a person's own and is to be kept."""
    text = read_card(folder)
    return None if text is None or MARK in text or card == "overwrite" else text


def _places(
    folder: str | os.PathLike[str] | None, repository: str | None, place: Workspace, console: Console
) -> tuple[Path, str | None]:
    """The folder and the repository; one argument that is no folder is the repository."""
    if folder is not None and repository is None:
        name = os.fspath(folder)
        path = Path(name).expanduser()
        if not (path.exists() or path.is_absolute() or name.startswith(".")):
            folder, repository = None, name
    if folder is None:
        last = place.last("hybrid")
        if last is None:
            raise UsageError(f"No DIR was given, and {place.folder} holds no hybrid; give a folder that prime wrote.")
        console.note(f"No DIR was given: taking {last['value']}, the last hybrid in {place.folder}.")
        folder = last["value"]
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UsageError(f"There is no folder {path}; check the path.")
    return path, repository


def _proposed(user: str, raw: dict[str, Any], origin: Origin) -> str:
    """USER/SOURCE-MIXER-PERCENT, such as me/Qwen3-0.6B-gka-50."""
    name = (origin.repository or origin.name).rpartition("/")[2].removesuffix(".gguf")
    return f"{user}/{name}-{LayerPlan.from_pattern(raw['hybrid']['pattern']).label}"


def _card(repository: str, folder: Path, raw: dict[str, Any], origin: Origin, place: Workspace) -> str:
    report = json.loads((folder / REPORT).read_text("utf-8")) if (folder / REPORT).is_file() else {}
    chat = (folder / "chat_template.jinja").is_file() or "chat_template" in _text(folder / "tokenizer_config.json")
    return write_card(repository, raw, report, origin, _scores(raw, report, place), chat, _notices(folder))


def _notices(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.upper().startswith(("LICEN", "NOTICE")))


def _scores(raw: dict[str, Any], report: dict[str, Any], place: Workspace) -> list[float] | None:
    """The scores of the probe that chose the layers, where this workspace has it."""
    if not str(report.get("chosen", "")).startswith("selected by "):
        return None
    path = Path(report["chosen"].partition(" in ")[2])
    last = [Path(entry["value"]) for entry in place.entries() if entry["kind"] == "probe"]
    if path not in last or not path.is_file():
        return None
    layers = json.loads(path.read_text("utf-8")).get("layers", [])
    scores = [layer["score"] for layer in layers if isinstance(layer.get("score"), int | float)]
    return scores if len(scores) == raw["num_hidden_layers"] else None


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def _with_written(folder: Path, contents: Contents) -> Contents:
    """The contents with the card and the modelling code, which may be new."""
    names = sorted({*contents.files, CARD, CODE})
    return Contents({name: (folder / name).stat().st_size for name in names}, contents.left_out)


def _announce(console: Console, folder: Path, contents: Contents, target: Target) -> None:
    """What is about to be sent, before the first byte."""
    branch = target.revision or "main"
    kind = "a pull request on" if target.create_pr else f"branch {branch} of"
    files = f"{len(contents.files)} files, {size(contents.bytes)}"
    console.note(f"{folder} is sound: pushing {files}, to {kind} {target.repository}.")
    if contents.left_out:
        console.note(f"Left out: {', '.join(contents.left_out)}.")
    for name in ("config.json", REPORT):
        home = str(Path.home())
        if name in contents.files and len(home) > 1 and home in _text(folder / name):
            console.warn(f"{name} names folders below {home} of this machine, and will be seen by others.")


def _listing(folder: Path, preflight: Preflight) -> str:
    count = len(preflight.findings)
    things = "1 thing is" if count == 1 else f"{count} things are"
    lines = [f"  {finding.file}: {finding.problem}" for finding in preflight.findings]
    return "\n".join([f"Nothing was pushed: {things} wrong with {folder}.", *lines])
