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
from hybridize.hybrid.foreign import FORMATS, load_foreign
from hybridize.sources import fetch_model, open_source
from hybridize.weights import check_weights


def load(path_or_repo: str | os.PathLike[str], *, dtype: Any = None, device: Any = None) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of a hybrid or source model: a folder, a GGUF file or a repository on the Hub.

    Hybrids in the format of awslabs/hybrid-model-factory become ours. Without a dtype: float32 on a CPU, bfloat16 on an
    accelerator. Raises SourceError, CheckpointError or PlanError.
    """
    name = os.fspath(path_or_repo)
    raw = _config_of(name)
    model_type = str(raw.get("model_type", ""))
    if not model_type.startswith(PREFIX) and model_type not in FORMATS:
        source = open_source(name)
        return source.load(dtype, device), source.tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = pick_device(None if device is None else str(device))
    number = pick_dtype(dtype, target)
    if model_type in FORMATS:
        folder = Path(name).expanduser()
        folder = folder if folder.is_dir() else fetch_model(name)
        foreign = load_foreign(folder, raw, name, number)
        return foreign.to(target).eval(), AutoTokenizer.from_pretrained(folder, config=foreign.config)
    if Path(name).is_dir():
        check_weights(Path(name))
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=number)
    return model.to(target).eval(), AutoTokenizer.from_pretrained(name)


def _config_of(name: str) -> dict[str, Any]:
    """What config.json says, of a folder or of a repository on the Hub; empty where there is none."""
    folder = Path(name).expanduser()
    if folder.is_file() or (folder.is_dir() and not (folder / "config.json").is_file()):
        return {}
    if folder.is_dir():
        try:
            raw = json.loads((folder / "config.json").read_text("utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{folder / 'config.json'} is not valid JSON ({error}); make it again.") from None
        return raw if isinstance(raw, dict) else {}
    from transformers import PreTrainedConfig

    registry.register()
    try:
        found, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return {}  # open_source says in one sentence why the name leads nowhere
    return dict(found)
