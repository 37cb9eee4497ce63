"""The YAML block at the top of a model card: made from what is known, and checked here, before the Hub does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridize.hub.contents import CARD, Finding
from hybridize.hub.origin import Origin
from hybridize.hybrid.plan import LayerPlan

RELATIONS = ("finetune", "adapter", "merge", "quantized", "new_version")
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DATASET = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(:[^=]*)?(=[\d.]+)?")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)*|code|multilingual")
_BLOCK = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)


def make_metadata(plan: LayerPlan, origin: Origin, data: Iterable[str], chat: bool) -> str:
    """The block's lines, without the dashes; only what is known is said."""
    from huggingface_hub import ModelCardData

    kinds = sorted({kind for kind in plan.kinds if kind})
    carried = {name: value for name, value in origin.metadata.items() if name != "language"}
    languages = origin.metadata.get("language") or []
    languages = [languages] if isinstance(languages, str) else languages
    known: dict[str, Any] = {
        # Of the relations that the Hub knows, a hybrid comes nearest to a finetune: the source's weights, changed.
        "base_model_relation": "finetune" if origin.repository else None,
        **carried,
    }
    data_card = ModelCardData(
        base_model=origin.repository,
        language=[name for name in languages if isinstance(name, str) and _LANGUAGE.fullmatch(name)] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hybridize", "hybrid-attention", *kinds, *(["conversational"] if chat else [])],
        datasets=datasets(data) or None,
        **{name: value for name, value in known.items() if value},
    )
    return data_card.to_yaml()


def datasets(data: Iterable[str]) -> list[str]:
    """Those of the data that are datasets of the Hub, as OWNER/NAME; local paths are kept in absolute form."""
    found = [_DATASET.fullmatch(name) for name in data]
    return list(dict.fromkeys(match[1] for match in found if match))


def check_metadata(text: str) -> list[Finding]:
    """What the Hub would refuse in a card's metadata, and what it would take in silence and not understand."""
    import yaml

    block = _BLOCK.match(text)
    if block is None:
        return [_finding("has no metadata; begin it with a YAML block between two lines of ---.")]
    try:
        found = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [_finding(f"has metadata that is not valid YAML ({' '.join(str(error).split())[:200]}).")]
    if not isinstance(found, dict):
        return [_finding("has metadata that is no list of names and values.")]
    wrong = []
    for name in ("base_model", "datasets"):
        wrong += [f"{name} {value!r} is no repository" for value in _listed(found, name) if not _is(_ID, value)]
    if "base_model_relation" in found and found["base_model_relation"] not in RELATIONS:
        wrong.append(f"base_model_relation {found['base_model_relation']!r} is none of {', '.join(RELATIONS)}")
    wrong += [
        f"license {value!r} is no licence's name" for value in _listed(found, "license") if not _is(_LICENCE, value)
    ]
    if found.get("license") == "other" and not found.get("license_name"):
        wrong.append("license is other, and license_name does not say which")
    wrong += [
        f"language {value!r} is no code such as en" for value in _listed(found, "language") if not _is(_LANGUAGE, value)
    ]
    wrong += [f"tag {value!r} is no text" for value in _listed(found, "tags") if not isinstance(value, str)]
    return [_finding(f"has metadata that the Hub does not take: {what}; correct it.") for what in wrong]


def lacking(text: str) -> list[str]:
    """What a person's own card leaves out that others look for."""
    import yaml

    block = _BLOCK.match(text)
    found = yaml.safe_load(block[1]) if block else {}
    return [name for name in ("license", "base_model") if not found.get(name)]


def _listed(found: dict[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    return [] if value is None else value if isinstance(value, list) else [value]


def _is(form: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and form.fullmatch(value) is not None


def _finding(problem: str) -> Finding:
    return Finding(CARD, problem)


def read_card(folder: Path) -> str | None:
    """The folder's card, or None."""
    path = folder / CARD
    return path.read_text("utf-8", errors="replace") if path.is_file() else None
