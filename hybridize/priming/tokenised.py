"""Pre-tokenised files: flat arrays of token ids, checked when they are opened and never read whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from hybridize.errors import DataError

_CHUNK = 1 << 22  # tokens looked at together
_RAW = {".u16": "<u2", ".u32": "<u4"}


class TokenIds:
    """A .npy array of whole numbers, or raw little-endian .u16 or .u32 numbers: documents that end at `boundary`.

    Without a boundary, or where it does not occur, the file is one document. DataError where an id is not below
    `vocabulary`.
    """

    per_token = 1

    def __init__(self, file: Path, name: str, vocabulary: int, boundary: int | None):
        self.file, self.name = file, name
        self.ids = _open(file)
        digest = hashlib.sha256(f"{boundary}".encode())
        ends: list[np.ndarray] = []
        for start in range(0, len(self.ids), _CHUNK):
            chunk = np.asarray(self.ids[start : start + _CHUNK])
            digest.update(chunk.tobytes())
            wrong = np.flatnonzero((chunk < 0) | (chunk >= vocabulary))
            if len(wrong):
                raise DataError(
                    f"{file} holds the token id {chunk[wrong[0]]} at position {start + wrong[0]}, but the model has "
                    f"ids from 0 to {vocabulary - 1}; tokenise the text with this model's tokenizer."
                )
            if boundary is not None:
                ends.append(start + 1 + np.flatnonzero(chunk == boundary))
        borders = np.unique(np.concatenate([[0], *ends, [len(self.ids)]])).astype(np.int64)
        self.starts = borders[:-1]
        self.lengths = np.diff(borders)
        self.fingerprint = digest.hexdigest()

    def title(self, index: int) -> str:
        return f"{self.name}:{index + 1}" if len(self.starts) > 1 else self.name

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        at = self.starts[index]
        return np.asarray(self.ids[at + start : at + stop]).astype(np.int64)


def _open(file: Path) -> np.ndarray:
    if file.suffix in _RAW:
        kind = np.dtype(_RAW[file.suffix])
        size = file.stat().st_size
        if size % kind.itemsize:
            raise DataError(
                f"{file} has {size} bytes, which is not a whole number of {kind.itemsize}-byte token ids; write it "
                "again, or give it the ending of its kind (.u16 or .u32)."
            )
        return np.memmap(file, kind, "r") if size else np.empty(0, kind)
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{file} is not a NumPy array ({error}); write it again with numpy.save.") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{file} holds {ids.dtype} of shape {tuple(ids.shape)}; pre-tokenised files are flat arrays of whole "
            "numbers."
        )
    return ids
