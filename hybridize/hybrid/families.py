"""Which model families convert, and what their attention modules must hold."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybridize.errors import ConversionError, SourceError

# model_type -> name of the source's class; the attention's own layout is read from the module (see `check_attention`).
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
SEPARATE, FUSED, NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}, {"q_norm", "k_norm"}


def check_config(config: Any) -> None:
    """SourceError unless models of this config belong to a family that can be converted."""
    kind = type(config).model_type  # a config that was read from a file keeps the file's own word besides
    if kind.startswith("hybridize_"):
        raise SourceError(f"This model is already a hybrid ({kind}); give the model it was made from.")
    if config.model_type not in FAMILIES:
        raise SourceError(
            f"Models of type {config.model_type!r} cannot be converted; known are {', '.join(sorted(FAMILIES))}."
        )


def check_family(model: Any) -> None:
    """SourceError unless this is a causal language model of a family that can be converted."""
    check_config(model.config)
    wanted = FAMILIES[model.config.model_type]
    if all(kind.__name__ != wanted for kind in type(model).__mro__):
        raise SourceError(
            f"A {type(model).__name__} cannot be converted: load the model as a {wanted}, for example with "
            "AutoModelForCausalLM."
        )


def check_attention(attention: nn.Module, layer: int) -> None:
    """ConversionError unless every tensor of the attention module is one that a mixer takes over."""
    held = {name.split(".")[0] for name, _ in attention.named_parameters()}
    held |= {name.split(".")[0] for name, _ in attention.named_buffers()}
    needed = FUSED if "qkv_proj" in held else SEPARATE
    if missing := needed - held:
        raise ConversionError(f"The attention of layer {layer} lacks {', '.join(sorted(missing))}: cannot convert it.")
    if unknown := held - needed - NORMS:
        raise ConversionError(
            f"The attention of layer {layer} has {', '.join(sorted(unknown))}, which no mixer takes over; "
            f"leave this layer as attention."
        )
