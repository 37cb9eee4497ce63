"""Makes the Auto classes of transformers know hybrids."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hybridize.hybrid import config
from hybridize.hybrid.config import PREFIX
from hybridize.hybrid.families import FAMILIES


def register() -> None:
    """Tell AutoConfig about every family's hybrid that this transformers can build; idempotent and lazy.

    This runs while transformers is being imported, so nothing else of transformers may be imported here: the mapping is
    told a name, and the module in which it will find (and thereby make) the class when one is asked for.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for family in FAMILIES:
        if family not in CONFIG_MAPPING._mapping:
            continue  # a family that this transformers does not have yet
        CONFIG_MAPPING._mapping[PREFIX + family] = f"Hybrid{CONFIG_MAPPING._mapping[family]}"
        CONFIG_MAPPING._modules[PREFIX + family] = config


def register_family(config_class: Any) -> None:
    """Make the hybrid model class of a hybrid config class, which registers it."""
    from hybridize.hybrid.model import hybrid_class

    family = config_class.model_type.removeprefix(PREFIX)
    hybrid_class(getattr(import_module("transformers"), FAMILIES[family]))


def register_model(model_class: Any) -> None:
    """Tell AutoModelForCausalLM, AutoTokenizer and the checkpoint loader and saver about a hybrid model class."""
    from transformers import conversion_mapping
    from transformers.models.auto import modeling_auto, tokenization_auto

    model_type: str = model_class.config_class.model_type
    family = model_type.removeprefix(PREFIX)
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.register(model_class.config_class, model_class, exist_ok=True)
    # Tokenizers are chosen by model type: a hybrid's must be its source's.
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    if family in names:
        names[model_type] = names[family]
    misnamed = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", None)
    if isinstance(misnamed, set) and family in misnamed:
        misnamed.add(model_type)
    # Mixture-of-experts checkpoints are regrouped on load and save by rules found under the model type.
    rules = conversion_mapping.get_checkpoint_conversion_mapping(family)
    if rules is not None and conversion_mapping.get_checkpoint_conversion_mapping(model_type) is None:
        conversion_mapping.register_checkpoint_conversion_mapping(model_type, rules)
