"""What a conversion will do, before it does it: every tensor accounted for, parameters, memory and cache sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from hybridize.errors import ConversionError
from hybridize.hybrid.model import convert, mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.mixers.base import geometry


@dataclass(frozen=True)
class Accounting:
    """Source tensors by fate, and sizes. copied + transformed + dropped are all of the source's tensors."""

    copied: list[str]
    transformed: list[str]
    dropped: dict[str, str]
    new: list[str]
    parameters: int
    new_parameters: int
    trained_parameters: int
    checkpoint_bytes: int
    training_bytes: int
    state_bytes: int
    source_kv_bytes: int
    hybrid_kv_bytes: int
    smaller_from: int

    def summary(self) -> dict[str, Any]:
        """Counts and sizes, for the report."""
        return {
            "tensors": {
                "copied": len(self.copied),
                "transformed": len(self.transformed),
                "dropped": self.dropped,
                "new": len(self.new),
            },
            "parameters": self.parameters,
            "new_parameters": self.new_parameters,
            "trained_parameters": self.trained_parameters,
            "checkpoint_bytes": self.checkpoint_bytes,
            "training_bytes": self.training_bytes,
            "cache": {
                "state_bytes_per_sequence": self.state_bytes,
                "source_bytes_per_token": self.source_kv_bytes,
                "hybrid_bytes_per_token": self.hybrid_kv_bytes,
                "smaller_from_tokens": self.smaller_from,
            },
        }


def account(config: Any, plan: LayerPlan, dtype: torch.dtype, solves: bool, settings: dict[str, Any]) -> Accounting:
    """Account for a conversion of a model with this config, saved in `dtype`, without loading or making any weight.

    `solves`: whether stage init solves the output projections. Raises ConversionError when a tensor is left over.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        source = AutoModelForCausalLM.from_config(config)
    hybrid = convert(source, plan, share=True, **settings)
    theirs, ours = set(source.state_dict()), hybrid.state_dict()
    if lost := sorted(theirs - set(ours)):
        raise ConversionError(f"{len(lost)} source tensors would be left over, the first is {lost[0]}.")
    own = mixers(hybrid)
    prefix = f"{hybrid.base_model_prefix}.layers"
    solved = {f"{prefix}.{i}.self_attn.o_proj.weight" for i in own} if solves else set()
    new = sorted(set(ours) - theirs)
    trained = sum(p.numel() for mixer in own.values() for p in mixer.parameters())
    parameters = sum(p.numel() for p in hybrid.parameters())
    kept = len(plan.kinds) - len(own)
    _, kv_heads, head_dim = geometry(config)
    kv = 2 * kv_heads * head_dim * dtype.itemsize
    state = sum(mixer.state_bytes(dtype) for mixer in own.values())
    return Accounting(
        copied=sorted(theirs - solved),
        transformed=sorted(solved),
        dropped={},
        new=new,
        parameters=parameters,
        new_parameters=sum(ours[name].numel() for name in new),
        trained_parameters=trained,
        checkpoint_bytes=sum(p.numel() * dtype.itemsize for p in hybrid.parameters()),
        # fp32: the source, the mixers' own copies, and for those a gradient and two moments
        training_bytes=4 * (sum(p.numel() for p in source.parameters()) + 4 * trained),
        state_bytes=state,
        source_kv_bytes=kv * len(plan.kinds),
        hybrid_kv_bytes=kv * kept,
        smaller_from=ceil(state / (kv * len(own))) if own else 0,
    )
