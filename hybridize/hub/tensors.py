"""Checks a folder's tensors: against the index, against the model that config.json describes, and their values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hybridize.console import Console
from hybridize.errors import HybridizeError
from hybridize.hub.contents import Finding, shards
from hybridize.hybrid.model import FP32_NAMES
from hybridize.weights import INDEX, SINGLE, read_header

LIMIT = 1e6  # an absolute value that no sound weight reaches, and a flipped exponent easily does
_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {number: name for name, number in _FORMATS.items()}
_RESTORE = "restore the file, or run hybridize prime again"


class Tensors:
    """The tensors of a folder by name: the file that holds each, its format and its shape; and what is wrong."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.findings: list[Finding] = []
        self.files: list[str] = []  # those whose headers can be read
        self.places: dict[str, str] = {}
        self.formats: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.bytes = 0
        index = self._index()
        self.promised: dict[str, str] = index["weight_map"] if index is not None else {}
        for file in sorted(shards(folder) - {INDEX}):
            self._read(file)
        if index is not None:
            self._compare(index)

    @property
    def main(self) -> str:
        """The file to name where no single one is to blame."""
        return INDEX if (self.folder / INDEX).exists() else SINGLE

    def _find(self, file: str, problem: str) -> None:
        self.findings.append(Finding(file, f"{problem}; {_RESTORE}."))

    def _index(self) -> dict[str, Any] | None:
        if not (self.folder / INDEX).exists():
            return None
        try:
            index: dict[str, Any] = json.loads((self.folder / INDEX).read_text("utf-8"))
            if all(isinstance(name, str) for name in index["weight_map"].values()):
                return index
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        self._find(INDEX, "is not an index of weight files")
        return None

    def _read(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            return self._find(file, "is missing" + (f", although {INDEX} names it" if self.main == INDEX else ""))
        try:
            header = read_header(path)
        except HybridizeError as error:
            self.findings.append(Finding(file, str(error).removeprefix(f"{path} ")))
            return
        self.files.append(file)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = entry["data_offsets"]
            if begin != end:
                self._find(file, f"has a gap or an overlap before the tensor {name}")
            end = stop
            if name in self.places:
                right, wrong = self.places[name], file
                if self.promised.get(name) == file:
                    right, wrong = file, right
                self._find(wrong, f"holds the tensor {name}, which {right} holds as well")
                if right != file:
                    continue
            else:
                self.bytes += stop - begin
            self.places[name], self.formats[name] = file, entry["dtype"]
            self.shapes[name] = tuple(entry["shape"])

    def _compare(self, index: dict[str, Any]) -> None:
        for name, file in self.promised.items():
            if file in self.files and self.places.get(name) != file:
                self._find(file, f"lacks the tensor {name}, which {INDEX} says it holds")
        for name, file in self.places.items():
            if name not in self.promised:
                self._find(file, f"holds the tensor {name}, which {INDEX} does not name")
        total = (index.get("metadata") or {}).get("total_size")
        complete = len(self.files) == len(set(self.promised.values()))
        if complete and total is not None and total != self.bytes:
            self._find(INDEX, f"says {total:,} bytes of tensors, and the files hold {self.bytes:,}")

    def check_model(self, model: Any, number: torch.dtype | None) -> list[Finding]:
        """Compare with a model on the meta device whose weights are in `number`: names, shapes, formats, ties."""
        found: list[Finding] = []
        expected = model.state_dict()
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        for name in sorted(tied & set(self.places)):
            found.append(Finding(self.places[name], f"holds {name}, which config.json ties to another; {_RESTORE}."))
        if not _regrouped(model.config):
            for name in sorted(set(expected) - tied - set(self.places)):
                found.append(Finding(self.main, f"lacks the tensor {name}, which the model needs; {_RESTORE}."))
            for name in sorted(set(self.places) - set(expected)):
                found.append(Finding(self.places[name], f"holds {name}, which the model does not have; {_RESTORE}."))
        strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        for name, file in self.places.items():
            if name in expected and tuple(expected[name].shape) != self.shapes[name]:
                shapes = f"{list(self.shapes[name])}, and the model's is {list(expected[name].shape)}"
                found.append(Finding(file, f"has the tensor {name} of shape {shapes}; {_RESTORE}."))
            wanted = self._format(name, strict, number)
            if wanted is not None and self.formats[name] in _FORMATS and self.formats[name] != wanted:
                problem = f"has {name} in {self.formats[name]}, and it should be in {wanted}"
                found.append(Finding(file, f"{problem}; {_RESTORE}."))
        return found

    @staticmethod
    def _format(name: str, strict: set[str], number: torch.dtype | None) -> str | None:
        """What the tensor must be stored in; None where that is the family's own choice, or not known."""
        parts = name.split(".")
        if parts[-1] in FP32_NAMES:
            return "F32"
        if number is None or not (strict - FP32_NAMES).isdisjoint(parts):
            return None
        return _NAMES.get(number)

    def check_values(self, console: Console) -> list[Finding]:
        """Read every tensor: NaN, infinity and implausibly large values are findings."""
        found = []
        with console.progress("Values", len(self.places), "tensor") as tracker:
            for file, name, x in self._tensors():
                tracker.advance()
                if x.numel() == 0 or not x.is_floating_point():
                    continue
                low, high = (float(bound) for bound in torch.aminmax(x))
                peak = max(-low, high)
                if not peak < float("inf"):  # NaN too
                    found.append(Finding(file, f"has NaN or infinity in {name}; {_RESTORE}."))
                elif peak > LIMIT:
                    found.append(Finding(file, f"has the implausible value {peak:.1e} in {name}; {_RESTORE}."))
        return found

    def _tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for file in self.files:
            with safe_open(self.folder / file, framework="pt") as opened:
                yield from ((file, name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118


def _regrouped(config: Any) -> bool:
    """Whether checkpoints of this family name tensors otherwise than the model; loading compares the names then."""
    from transformers import conversion_mapping

    return conversion_mapping.get_checkpoint_conversion_mapping(config.model_type) is not None
