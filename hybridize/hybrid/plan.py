"""Which layers of a model are converted, and into what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from hybridize.errors import PlanError

ATTENTION = "*"
TOKENS = {"gka": "GKA", "gdn": "GDN", "mamba2": "M2", "swa": "SWA"}
_KINDS = {token: kind for kind, token in TOKENS.items()}


@dataclass(frozen=True)
class LayerPlan:
    """One entry per decoder layer: the mixer's kind, or None where attention stays. str(plan) is the layer pattern."""

    kinds: tuple[str | None, ...]

    @staticmethod
    @cache  # a hybrid reads its pattern at every forward
    def from_pattern(pattern: str) -> LayerPlan:
        """Read '*-GKA-*-GDN'; PlanError names the first position that is wrong."""
        kinds: list[str | None] = []
        for position, token in enumerate(pattern.strip().split("-")):
            if token != ATTENTION and token.upper() not in _KINDS:
                raise PlanError(
                    f"Layer pattern has {token!r} at position {position}; "
                    f"use {ATTENTION} for attention or one of {', '.join(_KINDS)}, separated by '-'."
                )
            kinds.append(None if token == ATTENTION else _KINDS[token.upper()])
        return LayerPlan(tuple(kinds))

    @staticmethod
    def from_layers(num_layers: int, layers: Iterable[int], kind: str) -> LayerPlan:
        """Convert the given layers (counted from 0) of a model with num_layers layers into `kind`."""
        check_kind(kind)
        chosen = list(layers)
        for layer in chosen:
            if not 0 <= layer < num_layers:
                raise PlanError(f"Layer {layer} does not exist: the model has layers 0 to {num_layers - 1}.")
        if len(set(chosen)) != len(chosen):
            raise PlanError(f"Layer {next(x for x in chosen if chosen.count(x) > 1)} is named twice; name it once.")
        return LayerPlan(tuple(kind if i in set(chosen) else None for i in range(num_layers)))

    @staticmethod
    def evenly_spaced(num_layers: int, ratio: float, kind: str) -> LayerPlan:
        """Convert round(ratio * num_layers) layers, at least one, evenly spaced and ending with the last layer."""
        if not 0 < ratio <= 1:
            raise PlanError(f"The ratio of layers to convert is {ratio}; it must be above 0 and at most 1.")
        count = max(1, round(ratio * num_layers))
        return LayerPlan.from_layers(num_layers, [(i + 1) * num_layers // count - 1 for i in range(count)], kind)

    @property
    def layers(self) -> list[int]:
        """The converted layers, counted from 0."""
        return [i for i, kind in enumerate(self.kinds) if kind is not None]

    @property
    def label(self) -> str:
        """The mixers and the share of converted layers in percent, such as gka-50."""
        kinds = sorted({kind for kind in self.kinds if kind})
        return "-".join([*kinds, str(round(100 * len(self.layers) / len(self.kinds)))])

    def check_length(self, num_layers: int) -> None:
        """PlanError unless the plan has one entry for each of the model's layers."""
        if len(self.kinds) == num_layers:
            return
        if len(self.kinds) < num_layers:
            where = f"nothing stands for layer {len(self.kinds)}"
        else:
            where = f"position {num_layers} stands for no layer"
        raise PlanError(
            f"The pattern has {len(self.kinds)} entries but the model has {num_layers} layers: {where}; "
            f"give one entry per layer."
        )

    def __str__(self) -> str:
        return "-".join(ATTENTION if kind is None else TOKENS[kind] for kind in self.kinds)


def check_kind(kind: str) -> None:
    """PlanError unless `kind` names a mixer."""
    if kind not in TOKENS:
        raise PlanError(f"There is no layer kind {kind!r}; use one of {', '.join(TOKENS)}.")
