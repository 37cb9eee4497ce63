"""A run's checkpoint on disk: written whole or not at all, so that the last good one is always there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hybridize.errors import CheckpointError


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace the checkpoint at `path` in one step; when that fails, the old one stays and no part of the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Given a path, torch.save reports a full disk as an internal error.
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any] | None:
    """The checkpoint's content, or None when there is none; CheckpointError when it is damaged."""
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}); start the run again without --resume.") from None
    return saved


@contextmanager
def explained_write(output: str) -> Iterator[None]:
    """OSError in place of safetensors' own error, which means a damaged file to those who read."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), output) from None
