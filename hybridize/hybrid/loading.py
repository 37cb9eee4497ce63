"""Opens a hybrid, or a plain source model, with its tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hybridize.devices import pick_device, pick_dtype
from hybridize.errors import CheckpointError
from hybridize.hybrid import registry
from hybridize.hybrid.config import PREFIX
from hybridize.sources import open_source
from hybridize.weights import check_weights


def load(path_or_repo: str | os.PathLike[str], *, dtype: Any = None, device: Any = None) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of a hybrid or source model: a folder, a GGUF file or a repository on the Hub.

    Without a dtype: float32 on a CPU, bfloat16 on an accelerator. Raises SourceError, CheckpointError or PlanError.
    """
    name = os.fspath(path_or_repo)
    if not _is_hybrid(name):
        source = open_source(name)
        return source.load(dtype, device), source.tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = pick_device(None if device is None else str(device))
    if Path(name).is_dir():
        check_weights(Path(name))
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=pick_dtype(dtype, target))
    return model.to(target).eval(), AutoTokenizer.from_pretrained(name)


def _is_hybrid(name: str) -> bool:
    """Whether config.json says so; a name that is no folder is looked up on the Hub."""
    folder = Path(name).expanduser()
    if folder.is_file() or (folder.is_dir() and not (folder / "config.json").is_file()):
        return False
    if folder.is_dir():
        try:
            raw = json.loads((folder / "config.json").read_text("utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{folder / 'config.json'} is not valid JSON ({error}); make it again.") from None
        return isinstance(raw, dict) and str(raw.get("model_type", "")).startswith(PREFIX)
    from transformers import PreTrainedConfig

    registry.register()
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return False  # open_source says in one sentence why the name leads nowhere
    return str(raw.get("model_type", "")).startswith(PREFIX)
