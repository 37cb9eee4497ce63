"""Sliding-window attention, the control: the source's own attention over the last `window` tokens and the first few."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hybridize.kernels.swa import chunk_swa
from hybridize.mixers.base import Mixer, rotate
from hybridize.mixers.tokens import State


class SWAMixer(Mixer):
    """State: the last `window` - 1 keys and values, and those of the first `sinks` tokens."""

    kind = "swa"
    defaults: ClassVar[dict[str, Any]] = {"window": 512, "sinks": 4, "rope": True}

    def __init__(self, config: Any, attention: nn.Module, layer_idx: int):
        super().__init__(config, attention, layer_idx)
        self.scaling = float(getattr(attention, "scaling", None) or self.head_dim**-0.5)

    def reset_parameters(self) -> None:
        """Adds no parameter."""

    def gates(self, hidden_states: Tensor) -> State:
        return {}

    def mix(
        self, inputs: State, state: State | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        q, k = inputs["q"], inputs["k"]
        if "cos" in inputs:
            q, k = (rotate(x, inputs["cos"], inputs["sin"]) for x in (q, k))
        names = ("keys", "values", "sink_keys", "sink_values", "seen")
        o, new = chunk_swa(
            q,
            k,
            inputs["v"],
            window=self.settings["window"],
            sinks=self.settings["sinks"],
            scale=self.scaling,
            initial_state=None if state is None else tuple(state[n] for n in names),
            lengths=lengths,
            cu_seqlens=cu_seqlens,
        )
        return o, dict(zip(names, new, strict=True))

    def readout(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        return o.flatten(-2)

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        tail = (self.settings["window"] - 1, self.kv_heads, self.head_dim)
        sink = (self.settings["sinks"], self.kv_heads, self.head_dim)
        return {
            "keys": (tail, None),
            "values": (tail, None),
            "sink_keys": (sink, None),
            "sink_values": (sink, None),
            "seen": ((), torch.int64),
        }
