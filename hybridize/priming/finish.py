"""The end of a run: its report, and the finished folder with all that the source's folder held beside the weights."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from hybridize.checksums import write_checksums
from hybridize.priming.checkpoints import explained_write
from hybridize.sources import Source, companions
from hybridize.workspace import atomic_folder, write_json


def stated(losses: dict[str, float]) -> dict[str, Any]:
    """The report's part on held-out losses: by stage, and the hybrid's perplexity over the source's, less 1."""
    hybrid = [loss for name, loss in losses.items() if name != "baseline"][-1]
    against = [name for name in ("source", "baseline") if name in losses]
    return {
        "losses": {name: {"loss": loss, "perplexity": _perplexity(loss)} for name, loss in losses.items()},
        "perplexity_above": {name: _perplexity(hybrid - losses[name]) - 1 for name in against},
    }


def write_hybrid(hybrid: Any, source: Source, output: str, dtype: torch.dtype, report: dict[str, Any]) -> None:
    """Write the finished folder in one step, the weights in `dtype`."""
    with explained_write(output), atomic_folder(output) as partial:
        hybrid.to(dtype).save_pretrained(partial)
        copy_companions(source, partial)
        write_json(partial / "prime.json", report)
        write_checksums(partial)


def copy_companions(source: Source, folder: Path) -> None:
    """Tokenizer, chat template, generation config, licence: byte for byte, except from inside a GGUF."""
    if source.gguf:
        source.tokenizer.save_pretrained(folder)
        return
    for path in companions(source.path):
        shutil.copyfile(path, folder / path.name)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
