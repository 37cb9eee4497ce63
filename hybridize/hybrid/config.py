"""The config of a hybrid: the source's own config class with one more block, `hybrid`."""

from __future__ import annotations

import sys
from copy import deepcopy
from functools import cache
from typing import Any

from hybridize.errors import ConversionError, PlanError
from hybridize.hybrid.plan import LayerPlan

FORMAT = 1
PREFIX = "hybridize_"


@cache
def hybrid_config_class(source: type) -> type:
    """The hybrid twin of a transformers config class, e.g. LlamaConfig -> HybridLlamaConfig."""

    def __post_init__(self: Any, **kwargs: Any) -> None:
        super(cls, self).__post_init__(**kwargs)
        # The Auto classes learn the model class here and not at import: importing every family's code takes seconds.
        from hybridize.hybrid.registry import register_family

        register_family(cls)

    name = f"Hybrid{source.__name__}"
    cls: Any = type(
        name,
        (source,),
        {
            "__module__": __name__,
            "__annotations__": {"hybrid": "dict | None"},
            "__doc__": f"{source.__name__} and a `hybrid` block: format, layer pattern, mixer settings, source.",
            "__post_init__": __post_init__,
            "hybrid": None,
            "model_type": PREFIX + source.model_type,  # type: ignore[attr-defined]
            # The source's plan would shard the projections that a mixer needs whole.
            "base_model_tp_plan": None,
        },
    )
    setattr(sys.modules[__name__], name, cls)  # pickle and the saving of remote code look it up here
    return cls


def __getattr__(name: str) -> Any:
    """Find HybridXConfig in a fresh process, as unpickling does."""
    if name.startswith("Hybrid") and name.endswith("Config"):
        import transformers

        return hybrid_config_class(getattr(transformers, name.removeprefix("Hybrid")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def hybrid_block(plan: LayerPlan, settings: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """The `hybrid` block of config.json. ConversionError for a setting that none of the plan's mixers has."""
    from hybridize.mixers import MIXERS

    kinds = [kind for kind in MIXERS if kind in plan.kinds]
    if unknown := [name for name in settings if not any(name in MIXERS[kind].defaults for kind in kinds)]:
        known = sorted({name for kind in kinds for name in MIXERS[kind].defaults})
        raise ConversionError(f"No mixer of this plan has a setting {unknown[0]!r}; known are {', '.join(known)}.")
    mixers = {}
    for kind in kinds:
        defaults = deepcopy(MIXERS[kind].defaults)
        mixers[kind] = {**defaults, **{name: value for name, value in settings.items() if name in defaults}}
        if "memory" in mixers[kind]:
            mixers[kind]["memory"] = list(mixers[kind]["memory"])
    return {"format": FORMAT, "pattern": str(plan), "mixers": mixers, "source": source}


def plan_of(config: Any) -> LayerPlan:
    """The layer plan in a hybrid's config; PlanError when it is missing, too new, or does not fit the model."""
    block = getattr(config, "hybrid", None)
    if not isinstance(block, dict) or "pattern" not in block:
        raise PlanError(f"config.json of this {config.model_type} model has no hybrid block with a layer pattern.")
    if block.get("format", FORMAT) > FORMAT:
        raise PlanError(f"This hybrid has format {block['format']}, this hybridize reads up to {FORMAT}: upgrade it.")
    plan = LayerPlan.from_pattern(block["pattern"])
    plan.check_length(config.num_hidden_layers)
    return plan
