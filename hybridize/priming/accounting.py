"""What a conversion will do, before it does it: every tensor accounted for, parameters, memory and cache sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hybridize.errors import ConversionError
from hybridize.hybrid.memory import CacheBytes, on_meta
from hybridize.hybrid.model import mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.priming.roles import by_role


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
    cache: CacheBytes

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
            "cache": self.cache.summary(),
        }


def account(
    config: Any, plan: LayerPlan, dtype: torch.dtype, solves: bool, settings: dict[str, Any], role: str = "mixers"
) -> Accounting:
    """Account for a conversion of a model with this config, saved in `dtype`, without loading or making any weight.

    `solves`: whether stage init solves the output projections; `role`: the most that a stage trains. Raises
    ConversionError when a tensor is left over.
    """
    source, hybrid = on_meta(config, plan, settings)
    theirs, ours = set(source.state_dict()), hybrid.state_dict()
    if lost := sorted(theirs - set(ours)):
        raise ConversionError(f"{len(lost)} source tensors would be left over, the first is {lost[0]}.")
    own = mixers(hybrid)
    prefix = f"{hybrid.base_model_prefix}.layers"
    solved = {f"{prefix}.{i}.self_attn.o_proj.weight" for i in own} if solves else set()
    new = sorted(set(ours) - theirs)
    trained = sum(p.numel() for p in by_role(hybrid, role, own).values())
    parameters = sum(p.numel() for p in hybrid.parameters())
    return Accounting(
        copied=sorted(theirs - solved),
        transformed=sorted(solved),
        dropped={},
        new=new,
        parameters=parameters,
        new_parameters=sum(ours[name].numel() for name in new),
        trained_parameters=trained,
        checkpoint_bytes=sum(p.numel() * dtype.itemsize for p in hybrid.parameters()),
        # fp32: the source, own copies of what trains, and for those a gradient and two moments
        training_bytes=4 * (sum(p.numel() for p in source.parameters()) + 4 * trained),
        cache=CacheBytes.of(hybrid, dtype),
    )
