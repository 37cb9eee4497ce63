"""Verifies a finished folder before the first byte of it goes anywhere, and lists all that is wrong with it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridize.checksums import SUMS
from hybridize.console import Console
from hybridize.errors import CheckpointError, explain
from hybridize.hub.contents import (
    Contents,
    Finding,
    check_companions,
    check_json,
    check_sums,
    list_contents,
)
from hybridize.hub.origin import Origin
from hybridize.hub.tensors import Tensors
from hybridize.hybrid.config import PREFIX, plan_of
from hybridize.hybrid.loading import load

_PROMPT = "The quick brown fox"
_DRAWN, _NEW_TOKENS = 8, 8  # random tokens behind the prompt, and tokens to write


@dataclass(frozen=True)
class Preflight:
    """What was found: the config as it stands on disk, the files, and everything that is wrong, by file."""

    config: dict[str, Any]
    contents: Contents
    findings: list[Finding]
    tensors: int
    tensor_bytes: int
    checksums: bool
    tried: bool

    def summary(self) -> dict[str, Any]:
        """As the report has it."""
        return {
            "tensors": self.tensors,
            "tensor_bytes": self.tensor_bytes,
            "checksums": self.checksums,
            "generation_tried": self.tried,
            "files": [{"name": name, "bytes": size} for name, size in self.contents.files.items()],
            "bytes": self.contents.bytes,
            "left_out": self.contents.left_out,
            "findings": [{"file": finding.file, "problem": finding.problem} for finding in self.findings],
        }


@dataclass(frozen=True)
class Trial:
    """How the model is tried: where, in which number format (None: its own), and on which random tokens."""

    device: str | None = None
    dtype: str | None = None
    seed: int = 0

    @torch.no_grad()
    def findings(self, folder: Path, raw: dict[str, Any], file: str) -> list[Finding]:
        """Load the model as a person would, and let it write a few tokens; `file` is to blame when it cannot."""
        try:
            model, tokenizer = load(folder, dtype=self.dtype or raw.get("dtype"), device=self.device)
            generator = torch.Generator().manual_seed(self.seed)
            words = tokenizer(_PROMPT, add_special_tokens=False)["input_ids"]
            drawn = torch.randint(len(tokenizer), (_DRAWN,), generator=generator).tolist()
            ids = torch.tensor([words + drawn], device=model.device)
            finite = bool(model(ids).logits.isfinite().all())
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_NEW_TOKENS,
                min_new_tokens=_NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return [Finding(file, f"cannot be loaded and run ({_reason(error)})")]
        return [] if finite else [Finding(file, "gives logits that are not finite; run hybridize prime again.")]


def read_config(folder: Path) -> dict[str, Any]:
    """A hybrid's config.json; CheckpointError where it is none, or cannot be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; give a folder that hybridize prime wrote.")
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}); restore it, or run hybridize prime again."
        ) from None
    if not isinstance(raw, dict) or not str(raw.get("model_type", "")).startswith(PREFIX):
        raise CheckpointError(f"{path} is not a hybrid's; give a folder that hybridize prime wrote.")
    return raw


def check_folder(
    folder: Path, raw: dict[str, Any], origin: Origin, console: Console, trial: Trial | None = None
) -> Preflight:
    """Check files, sums, tensors, config and companions, and let a sound model write a few tokens."""
    contents, findings = list_contents(folder)
    findings += check_json(folder)
    listed = (folder / SUMS).exists()
    if listed:
        findings += check_sums(folder, console)
    elif origin.folder is not None:
        findings += check_companions(folder, origin.folder)
    else:
        console.note(f"{folder} has no {SUMS}, and its source is not at hand: unchanged bytes cannot be proven.")
    tensors = Tensors(folder)
    findings += tensors.findings
    config, wrong = _open_config(folder)
    findings += wrong
    if config is not None:
        findings += tensors.check_model(_on_meta(config), getattr(torch, str(raw.get("dtype")), None))
        findings += _check_text(folder, config)
    findings += tensors.check_values(console)
    tried = not findings
    if tried:
        findings += (trial or Trial()).findings(folder, raw, tensors.main)
    found = sorted(set(findings))
    return Preflight(raw, contents, found, len(tensors.places), tensors.bytes, listed, tried)


def _open_config(folder: Path) -> tuple[Any, list[Finding]]:
    """The config as transformers reads it, with a layer pattern that fits the model."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        plan_of(config)
        architecture = f"Hybrid{_source_class(config)}"
        if config.architectures != [architecture]:
            problem = f"names the class {config.architectures}, and the model's is {architecture}; restore it."
            return None, [Finding("config.json", problem)]
        return config, []
    except Exception as error:  # a damaged config makes transformers raise anything
        return None, [Finding("config.json", _reason(error))]


def _source_class(config: Any) -> str:
    from hybridize.hybrid.families import FAMILIES

    return FAMILIES[config.model_type.removeprefix(PREFIX)]


def _on_meta(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def _check_text(folder: Path, config: Any) -> list[Finding]:
    """The tokenizer loads and fits the embeddings; generation stops wherever the config says that text ends."""
    from transformers import AutoTokenizer

    name = "tokenizer.json" if (folder / "tokenizer.json").exists() else "tokenizer_config.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(_PROMPT, add_special_tokens=False)["input_ids"]
    except Exception as error:
        return [Finding(name, f"does not load as a tokenizer ({_reason(error)}); copy the source's.")]
    if not ids:
        return [Finding(name, "reads text as nothing; copy the source's tokenizer files.")]
    findings = []
    if max(ids) >= config.vocab_size:
        findings.append(Finding(name, f"has the token {max(ids)}, and the model has {config.vocab_size:,}."))
    path = folder / "generation_config.json"
    if not path.exists():
        return [*findings, Finding(path.name, "is missing; copy the source's, or text may never end.")]
    try:
        stops = set(_listed(json.loads(path.read_text("utf-8")).get("eos_token_id")))
    except (ValueError, AttributeError):
        return findings  # not valid JSON, which is a finding already
    if lost := sorted(set(_listed(config.eos_token_id)) - stops):
        ends = ", ".join(map(str, lost))
        findings.append(Finding(path.name, f"lacks the end tokens {ends} of config.json; copy the source's."))
    return findings


def _listed(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _reason(error: Exception) -> str:
    return explain(error) or (str(error).strip().splitlines() or [type(error).__name__])[0]
