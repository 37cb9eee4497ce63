"""Which parameters a stage trains, by what they are for; the same words mean the same places in hybrid and source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

ROLES = ("mixers", "mixers+norms+attention", "all")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The decoder layer that a parameter's name places it in; None for embeddings, final norm and head."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def by_role(model: Any, role: str, converted: Iterable[int]) -> dict[str, nn.Parameter]:
    """The model's parameters of a role, by name: ROLES has them.

    `mixers` are the token mixers of the converted layers: in the source, those layers' attention.
    """
    own = set(converted)

    def belongs(name: str) -> bool:
        mixes = ".self_attn." in name
        if role == "mixers":
            return mixes and layer_of(name) in own
        return role == "all" or mixes or "norm" in name.rsplit(".", 2)[-2]

    return {name: p for name, p in model.named_parameters() if belongs(name)}


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay means anything: matrices, and not the per-channel weights of norms and convolutions."""
    owner = name.split(".")[-2:-1]
    return parameter.dim() >= 2 and not any(word in owner[0] for word in ("norm", "conv") if owner)


def own_copies(model: Any, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Give the model its own copies of these parameters (where it has one twice, both), and return them by name.

    A hybrid made with share=True holds its source's tensors: what trains must not move the source.
    """
    copies = {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in parameters.values()}
    for module in model.modules():
        for key, p in module._parameters.items():
            if id(p) in copies:
                module._parameters[key] = copies[id(p)]
    return {name: copies[id(p)] for name, p in parameters.items()}
