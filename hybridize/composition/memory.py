"""What a model remembers of a run of tokens: the parts that are composed, and what they are read with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hybridize.hybrid.model import mixers
from hybridize.hybrid.walk import entry_device
from hybridize.mixers.tokens import State


@dataclass
class Memory:
    """Tokens ids int64 [T] (on the CPU) that were read at positions `start` and on, and what each layer keeps of them.

    layers: at an attention layer, keys and values [Hk, T, D] of these tokens alone, rotated as they were read (of a
    source's own sliding window, the last window - 1 at most, the prefix's all); at a converted layer, the state behind
    them, without a batch dimension; nothing before the first token. transitions: what these tokens multiply an older
    state by, where a layer has a recurrent state.
    """

    ids: Tensor
    start: int
    layers: list[State]
    transitions: list[State]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.start + self.tokens


def windows(model: Any) -> dict[int, int]:
    """The source's own sliding windows, by layer; converted layers have none."""
    own = mixers(model)
    layers = enumerate(DynamicCache(config=model.config).layers)
    return {i: int(layer.sliding_window) for i, layer in layers if layer.is_sliding and i not in own}  # type: ignore[union-attr]


def layer_devices(model: Any) -> list[torch.device]:
    """Where each layer's keys and states are when it runs."""
    entry = entry_device(model)
    weights = [next(layer.parameters()) for layer in model.base_model.layers]
    return [entry if weight.is_meta else weight.device for weight in weights]
