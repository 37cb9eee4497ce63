"""Checks that a folder's safetensors files are whole, from their headers alone.

A safetensors file is the header's length in 8 bytes (little endian), the header in JSON, and the tensors' bytes; each
entry of the header gives its tensor's `data_offsets` from the end of the header.
"""

import json
from pathlib import Path
from typing import Any

from hybridize.errors import SourceError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_AGAIN = "download or copy it again"


def check_weights(folder: Path) -> list[Path]:
    """The folder's weight files, each one whole; SourceError names the file or tensor that is missing or damaged."""
    if (folder / INDEX).exists():
        return _check_shards(folder)
    path = folder / SINGLE
    if not path.exists():
        if any(folder.glob("pytorch_model*.bin")):
            raise SourceError(
                f"{folder} holds its weights as pytorch_model.bin; load it with transformers and save it again, which "
                "writes safetensors."
            )
        raise SourceError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}; {_AGAIN}.")
    read_header(path)
    return [path]


def _check_shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        places: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SourceError(f"{index} is not an index of weight files; {_AGAIN}.") from None
    headers = {}
    for number, shard in enumerate(shards, 1):
        path = folder / shard
        if not path.exists():
            raise SourceError(f"{path} is missing (shard {number} of {len(shards)}); {_AGAIN}.")
        headers[shard] = read_header(path)
    for tensor, shard in places.items():
        if tensor not in headers[shard]:
            raise SourceError(f"{folder / shard} lacks the tensor {tensor} that {INDEX} promises; {_AGAIN}.")
    return [folder / shard for shard in shards]


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file whose length fits it; SourceError when the file is damaged or cut short."""
    total = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if (start + file.read(32)).startswith(b"version https://git-lfs"):
            raise SourceError(f"{path} is a Git LFS pointer and not the weights; run: git lfs pull")
        if len(start) < 8 or length > _HEADER_LIMIT or 8 + length > total:
            raise SourceError(f"{path} is cut short or no safetensors file ({total:,} bytes); {_AGAIN}.")
        file.seek(8)
        text = file.read(length)
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise SourceError(f"{path} has a damaged header; {_AGAIN}.") from None
    if total != expected:
        raise SourceError(f"{path} has {total:,} bytes where its header says {expected:,}; {_AGAIN}.")
    return tensors
