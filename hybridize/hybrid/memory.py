"""What a sequence takes while text is generated: keys and values of every token, and the states of converted layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from hybridize.hybrid.config import plan_of
from hybridize.hybrid.model import convert, mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.mixers.base import geometry


@dataclass(frozen=True)
class CacheBytes:
    """Bytes per sequence. state: of all converted layers together; source, hybrid: keys and values of one token.

    smaller_from: the tokens from which the hybrid takes less than its source.
    """

    state: int
    source: int
    hybrid: int
    smaller_from: int

    @staticmethod
    def of(hybrid: Any, dtype: torch.dtype) -> CacheBytes:
        """Of a hybrid in `dtype`; it may be on the meta device."""
        own = mixers(hybrid)
        layers = len(plan_of(hybrid.config).kinds)
        _, kv_heads, head_dim = geometry(hybrid.config)
        kv = 2 * kv_heads * head_dim * dtype.itemsize
        state = sum(mixer.state_bytes(dtype) for mixer in own.values())
        smaller_from = ceil(state / (kv * len(own))) if own else 0
        return CacheBytes(state, kv * layers, kv * (layers - len(own)), smaller_from)

    def at(self, tokens: int) -> dict[str, int]:
        """Bytes of a sequence of this many tokens, in the source and in the hybrid."""
        return {
            "tokens": tokens,
            "source_bytes": tokens * self.source,
            "hybrid_bytes": tokens * self.hybrid + self.state,
        }

    def summary(self) -> dict[str, Any]:
        """As reports have it."""
        return {
            "state_bytes_per_sequence": self.state,
            "source_bytes_per_token": self.source,
            "hybrid_bytes_per_token": self.hybrid,
            "smaller_from_tokens": self.smaller_from,
        }


def on_meta(config: Any, plan: LayerPlan, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The source of this config and its hybrid, on the meta device: all shapes, and no weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        source = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return source, convert(source, plan, share=True, **settings)
