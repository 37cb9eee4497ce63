"""A hybrid is the source's own model class in which some attention modules are mixers.

The classes are made here from the source's, once per family: no modelling code is copied. The body (LlamaModel, ...)
decides once per forward which tokens are real and where documents begin, and hands that to every mixer.
"""

from __future__ import annotations

import copy
import inspect
import os
import stat
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hybridize.errors import CheckpointError, ConversionError, SourceError
from hybridize.hybrid.cache import install_state_layers
from hybridize.hybrid.config import hybrid_block, hybrid_config_class, plan_of
from hybridize.hybrid.documents import attention_masks
from hybridize.hybrid.families import check_attention, check_family
from hybridize.hybrid.plan import LayerPlan
from hybridize.hybrid.registry import register_model
from hybridize.mixers import MIXERS, Mixer
from hybridize.mixers.tokens import token_layout
from hybridize.weights import check_weights

# transformers 5.20 renamed past_key_values to cache, and takes both for a while.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
_OLD_CACHE = "past_key_values"
FP32_NAMES = set(Mixer.fp32_names)


class HybridBody:
    """Mixin for the source's inner model: builds the cache, finds padding and document borders."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        source = super().forward  # type: ignore[misc]
        kwargs.update(zip(inspect.signature(source).parameters, args, strict=False))
        self._prepare(kwargs)
        return source(**kwargs)

    def _prepare(self: Any, kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("input_ids")
        inputs = kwargs["inputs_embeds"] if inputs is None else inputs
        batch, length = inputs.shape[:2]
        if CACHE != _OLD_CACHE and _OLD_CACHE in kwargs:
            kwargs.setdefault(CACHE, kwargs.pop(_OLD_CACHE))
        plan = plan_of(self.config)
        cache = kwargs.get(CACHE)
        use_cache = kwargs.get("use_cache")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.training and self.gradient_checkpointing:
            use_cache = False
        if cache is None and use_cache:
            cache = kwargs[CACHE] = DynamicCache(config=self.config)
        past = 0
        if cache is not None:
            install_state_layers(cache, plan.layers, len(plan.kinds))
            past = cache.get_seq_length()
        if not plan.layers:
            return
        full_mask: Any = kwargs.get("attention_mask")
        mask = _token_mask(full_mask, length)
        positions = kwargs.get("position_ids")
        positions = None if positions is None else positions.expand(batch, -1)
        began: Any = bool(past)
        if began and mask is not None and full_mask.shape[1] > length:
            began = full_mask[:, :-length].any(1)
        layout = token_layout(mask, positions, began)
        kwargs["token_layout"] = layout
        keeper = None if cache is None else cache.layers[plan.layers[0]]
        masks = attention_masks(self.config, inputs, self.dtype, kwargs, cache, layout, past, keeper, CACHE)
        if masks is not None:
            kwargs["attention_mask"] = masks
        elif positions is not None and cache is None and mask is None:
            # Positions that leap ahead are one document here, with or without a cache; without either, transformers
            # would make them two.
            kwargs["attention_mask"] = torch.ones_like(positions)


def _token_mask(attention_mask: Any, length: int) -> torch.Tensor | None:
    """The real tokens among the last `length`, [B, length] bool; None when all are."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        raise ConversionError(
            "State-space layers cannot read a 4-D attention mask: pass the 2-D mask [batch, tokens], and position_ids "
            "that start again at 0 for packed documents."
        )
    return attention_mask[:, -length:].bool()


class HybridCausalLM:
    """Mixin for the source's model with its head: construction, strict loading, caches for generate()."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plan_of(config)  # a wrong pattern is reported before the model is built
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install_mixers(self)

    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, *args, **kwargs
        )
        cache = model_kwargs.get(CACHE)
        if cache is not None:
            plan = plan_of(self.config)
            install_state_layers(cache, plan.layers, len(plan.kinds))
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return result

    @classmethod
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Load strictly: a missing, unexpected or misshapen tensor is an error that names it (CheckpointError)."""
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)  # so that they are reported here
        try:
            model, info = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            _explain_damage(args[0] if args else None)
            raise
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(key if isinstance(key, str) else str(key[0]) for key in info.get(what, ())):
                kind = what.split("_")[0]
                raise CheckpointError(
                    f"The checkpoint {args[0] if args else ''} has {len(names)} {kind} tensors, the first is "
                    f"{names[0]}: it is not whole, or not this model's; make or download it again."
                )
        return (model, info) if wants_info else model

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does; files get the permissions that other files get here (safetensors makes 0600)."""
        if self._auto_class is None and hasattr(self.config, "auto_map"):
            del self.config.auto_map  # it names code that lies beside a pushed model, and not beside this one
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        umask = os.umask(0)
        os.umask(umask)
        for entry in os.scandir(save_directory):
            if entry.name.endswith(".safetensors") and stat.S_IMODE(entry.stat().st_mode) == 0o600:
                os.chmod(entry.path, 0o666 & ~umask)


def _explain_damage(folder: Any) -> None:
    """CheckpointError that names the damaged or missing file of a local checkpoint, if there is one."""
    if folder is None or not os.path.isdir(folder):
        return
    try:
        check_weights(Path(folder))
    except SourceError as damage:
        raise CheckpointError(str(damage)) from None


@cache
def hybrid_class(source: Any) -> Any:
    """The hybrid twin of a transformers model class with a head, e.g. LlamaForCausalLM -> HybridLlamaForCausalLM."""
    cls = _twin(HybridCausalLM, source, config_class=hybrid_config_class(source.config_class))
    register_model(cls)
    return cls


@cache
def _body_class(source: Any) -> Any:
    return _twin(HybridBody, source, config_class=hybrid_config_class(source.config_class))


def _twin(mixin: type, source: Any, **attributes: Any) -> Any:
    name = f"Hybrid{source.__name__}"
    strict = set(source._keep_in_fp32_modules_strict or ()) | FP32_NAMES
    cls = type(name, (mixin, source), {"__module__": __name__, "_keep_in_fp32_modules_strict": strict, **attributes})
    setattr(sys.modules[__name__], name, cls)
    return cls


def __getattr__(name: str) -> Any:
    """Find HybridX classes in a fresh process, as unpickling does."""
    if name.startswith("Hybrid"):
        import transformers

        source = getattr(transformers, name.removeprefix("Hybrid"))
        return hybrid_class(source) if name.endswith("ForCausalLM") else _body_class(source)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install_mixers(model: Any) -> None:
    """Put a mixer in place of every converted layer's attention module; the mixer takes over the projections."""
    body = model.base_model
    body_class: Any = type(body)
    body.__class__ = _body_class(body_class)
    # Which outputs (output_hidden_states, ...) can be recorded was noted under the name of the source's class. The
    # registry of transformers 5.24 takes models where a dictionary takes names.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(body)), body._can_record_outputs)
    for i, kind in enumerate(plan_of(model.config).kinds):
        if kind is None:
            continue
        attention = body.layers[i].self_attn
        check_attention(attention, i)
        like = attention.o_proj.weight
        with torch.device(like.device):
            mixer = MIXERS[kind](model.config, attention, i)
        mixer.to(like.dtype).train(attention.training)
        body.layers[i].self_attn = mixer
        if like.device.type != "meta":
            mixer.reset_parameters()


def mixers(model: Any) -> dict[int, Mixer]:
    """A hybrid's mixers by layer."""
    layers = enumerate(model.base_model.layers)
    return {i: layer.self_attn for i, layer in layers if isinstance(layer.self_attn, Mixer)}


def convert(model: PreTrainedModel, plan: LayerPlan, *, share: bool = False, **mixer_settings: Any) -> Any:
    """A hybrid of `model` with the plan's layers converted; the source model is untouched.

    share=True lets the hybrid use the source's tensors in every layer that stays as it is (half the memory; then train
    only the mixers). Raises PlanError, SourceError or ConversionError.
    """
    check_family(model)
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConversionError("The model is quantised: load it in bf16 or fp32 to convert it.")
    plan.check_length(model.config.num_hidden_layers)
    body: Any = model.base_model
    for i in plan.layers:
        check_attention(body.layers[i].self_attn, i)
    source = {"name": model.name_or_path, "model_type": model.config.model_type}
    block = hybrid_block(plan, mixer_settings, source)
    memo: dict[int, Any] = {}
    if share:
        own = tuple(f"{model.base_model_prefix}.layers.{i}.self_attn." for i in plan.layers)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        memo = {id(x): x for name, x in tensors if not (own and name.startswith(own))}
    model_class: Any = type(model)
    config_class: Any = type(model.config)
    hybrid: Any = copy.deepcopy(model, memo)
    # The modules all hold the one config object: changing its class in place changes it for all of them.
    hybrid.config.__class__ = hybrid_config_class(config_class)
    hybrid.config.hybrid = block
    hybrid.__class__ = hybrid_class(model_class)
    hybrid.config.architectures = [type(hybrid).__name__]
    hybrid._keep_in_fp32_modules_strict = set(hybrid._keep_in_fp32_modules_strict or ()) | FP32_NAMES
    install_mixers(hybrid)
    return hybrid


__all__ = ["CACHE", "convert", "hybrid_class", "install_mixers", "mixers"]
