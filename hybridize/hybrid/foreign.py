"""Loads hybrids in the format of awslabs/hybrid-model-factory as hybrids of ours, which are saved in our format.

That format has a model type of its own per family (hybrid_qwen3, ...), the pattern in `hybrid_override_pattern`, a
block of settings per kind of layer, and a converted layer's tensors under a module named by its kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hybridize.errors import PlanError, SourceError
from hybridize.hybrid.config import PREFIX, hybrid_block
from hybridize.hybrid.families import FAMILIES
from hybridize.hybrid.plan import LayerPlan
from hybridize.weights import check_weights

# Their model types -> the family; and of a layer's kind: the block of settings, and the module.
FORMATS = {f"hybrid_{family}": family for family in ("llama", "ministral3", "qwen2", "qwen3", "qwen3_moe")}
_BLOCKS = {"gka": "gka_config", "gdn": "gdn_config", "mamba2": "mamba2_config", "swa": "swa_config"}
_MODULES = {"gka": "gka", "gdn": "gdn", "mamba2": "mamba", "swa": "swa"}
# What our layers do by other settings than our defaults: SiLU behind the convolutions, no rotary embedding.
_ALWAYS = {"conv_activation": "silu", "rope": False}
_SETTINGS: dict[str, dict[str, Any]] = {
    "gka": {**_ALWAYS, "qk_norm": False, "norm_eps": 1e-6},
    "gdn": {**_ALWAYS, "qk_norm": False, "norm_eps": 1e-5},
    "mamba2": {**_ALWAYS, "conv_bias": True, "gate_first": True, "qk_l2norm": False, "norm_eps": 1e-5},
    "swa": {"sinks": 0},
}
# Their name of a setting -> ours.
_READ = {
    "gka": {"num_iter": "num_iters", "ridge_strength": "ridge", "conv_size": "conv_size", "norm_eps": "norm_eps"},
    "gdn": {"conv_size": "conv_size", "conv_bias": "conv_bias", "norm_eps": "norm_eps"},
    "mamba2": {"use_qk_norm": "qk_norm"},
    "swa": {"window_size": "window"},
}
# What can be switched there and not here, with the only value that is built.
_FIXED = {
    "use_gate": True,
    "use_short_conv": True,
    "use_v_conv": True,
    "use_alpha_connection": True,
    "use_beta_gate": True,
    "use_forgetting_gate": True,
    "use_forgetting_gate_kk": True,
    "gla_rescale": True,
    "solver_type": "chebyshev",
    "allow_neg_eigval": False,
    "kv_proj_rank": None,
    "kv_learnable_residual": False,
    "use_pos_emb": False,
}
_HEADS = {f"{n}_proj.weight": f"{n}_proj.weight" for n in "qkvgo"} | {
    f"{n}_conv1d.weight": f"{n}_conv.weight" for n in "qkv"
}
_DECAY = {"A_log": "A_log", "dt_bias": "dt_bias", "o_norm.weight": "o_norm.weight"}
# Their name of a converted layer's tensor -> ours; Mamba-2's fused tensors are cut first.
_TENSORS = {
    "gka": _HEADS
    | _DECAY
    | {f"{n}.{part}": f"{n}.{part}" for n in ("b_proj", "alpha_proj") for part in ("weight", "bias")}
    | {"a_proj.weight": "a_proj.weight"},
    "gdn": _HEADS | _DECAY | {"b_proj.weight": "b_proj.weight", "gk_proj.weight": "a_proj.weight"},
    "mamba2": {
        **{name: name for name in ("A_log", "dt_bias", "D")},
        **{f"{n}_proj.weight": f"{n}_proj.weight" for n in "qkvga"},
        **{f"{n}_conv.{part}": f"{n}_conv.{part}" for n in "qkv" for part in ("weight", "bias")},
        "out_proj.weight": "o_proj.weight",
        "norm.weight": "o_norm.weight",
    },
}
_OPTIONAL = {"gdn": {f"{n}_conv1d.bias": f"{n}_conv.bias" for n in "qkv"}}
_NORMS = {"C_norm.weight": "q_norm.weight", "B_norm.weight": "k_norm.weight"}
_FUSED = ("in_proj.weight", "conv1d.weight", "conv1d.bias")
# Ours, and not theirs: zero says nothing there.
_ZERO = ("g_proj.bias", "b_proj.bias", "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")


def load_foreign(folder: Path, raw: dict[str, Any], name: str, dtype: torch.dtype) -> Any:
    """The hybrid in a folder whose config.json is `raw`, as one of ours on the CPU.

    SourceError names a layer that is not built here, a setting with another value, and any tensor that is missing or
    left over.
    """
    import transformers

    from hybridize.hybrid.model import hybrid_class

    family = FORMATS[raw["model_type"]]
    config = _config(raw, family, name)
    model_class = hybrid_class(getattr(transformers, FAMILIES[family]))
    with torch.device("meta"):
        wanted = model_class(config).state_dict()
    files = check_weights(folder)
    tensors = _translated(_read(files), LayerPlan.from_pattern(config.hybrid["pattern"]), wanted, name)
    config.architectures = [model_class.__name__]
    model = model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    model.config._name_or_path = name
    return model


def _config(raw: dict[str, Any], family: str, name: str) -> Any:
    from transformers import AutoConfig

    plan = _plan(str(raw.get("hybrid_override_pattern") or ""), name)
    settings: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(filter(None, plan.kinds)):
        settings[kind] = _settings(kind, raw, name)
    block = hybrid_block(plan, {}, {"name": name, "model_type": family, "format": raw["model_type"]})
    for kind, values in settings.items():
        block["mixers"][kind].update(values)
    left_out = {"model_type", "architectures", "hybrid_override_pattern", "auto_map", "bmojo_config", *_BLOCKS.values()}
    rest = {key: value for key, value in raw.items() if key not in left_out}
    kinds = rest.get("layer_types")
    if kinds and not set(kinds) <= {"full_attention", "sliding_attention"}:  # theirs say what the pattern says
        del rest["layer_types"]
    config = AutoConfig.for_model(PREFIX + family, **rest, hybrid=block)
    plan.check_length(config.num_hidden_layers)
    return config


def _plan(pattern: str, name: str) -> LayerPlan:
    for layer, token in enumerate(pattern.split("-")):
        if token.upper().startswith("BMF"):
            raise SourceError(
                f"Layer {layer} of {name} is B'MOJO-F ({token}), which hybridize does not build; take a model of GKA, "
                "GDN, M2 or SWA layers."
            )
        if token != "*" and any(mark in token for mark in "*>"):
            raise SourceError(
                f"Layer {layer} of {name} is {token}, a fused layer that still holds its teacher; unfuse the model "
                "with the tool that made it."
            )
    try:
        return LayerPlan.from_pattern(pattern)
    except PlanError as error:
        raise SourceError(f"{name}: hybrid_override_pattern in config.json cannot be read: {error}") from None


def _settings(kind: str, raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Our settings of one kind of layer, from their block."""
    block = raw.get(_BLOCKS[kind]) or {}
    for key, only in _FIXED.items():
        if block.get(key, only) != only:
            raise SourceError(
                f"{name} sets {key} to {block[key]!r} in {_BLOCKS[kind]}; hybridize builds such layers with {only!r} "
                "only."
            )
    if kind == "swa" and "window_size" not in block:
        raise SourceError(f"{name} has sliding-window layers and no window_size in swa_config; add it to config.json.")
    return _SETTINGS[kind] | {ours: block[theirs] for theirs, ours in _READ[kind].items() if theirs in block}


def _read(files: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no dictionary)
    return tensors


def _translated(tensors: dict[str, Tensor], plan: LayerPlan, wanted: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """All tensors under our names."""
    for layer, kind in enumerate(plan.kinds):
        if kind is None:
            continue
        theirs, ours = f"model.layers.{layer}.{_MODULES[kind]}.", f"model.layers.{layer}.self_attn."
        own = {key.removeprefix(theirs): tensors.pop(key) for key in list(tensors) if key.startswith(theirs)}
        shapes = {key.removeprefix(ours): x.shape for key, x in wanted.items() if key.startswith(ours)}
        if kind == "mamba2":
            own = _cut(own, shapes, theirs, name)
        names = _names(kind, own, shapes)
        if missing := sorted(names.keys() - own.keys()):
            raise SourceError(f"{name} lacks the tensor {theirs}{missing[0]}; download or copy it again.")
        if unknown := sorted(own.keys() - names.keys()):
            raise SourceError(f"{name} has the tensor {theirs}{unknown[0]}, which no layer of hybridize holds.")
        for key, x in own.items():
            tensors[ours + names[key]] = _shaped(x, shapes.get(names[key]))
        for key in _ZERO:
            if kind != "swa" and key in shapes and ours + key not in tensors:
                tensors[ours + key] = torch.zeros(shapes[key])
    return tensors


def _names(kind: str, own: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, str]:
    """Their tensors' names -> ours, for a layer of this kind."""
    if kind == "swa":
        return {key: key for key in shapes}
    names = dict(_TENSORS[kind])
    if kind == "mamba2" and "q_norm.weight" in shapes:
        names |= _NORMS
    return names | {key: ours for key, ours in _OPTIONAL.get(kind, {}).items() if ours in shapes}


def _shaped(x: Tensor, shape: torch.Size | None) -> Tensor:
    """Theirs in our layout: convolutions without the middle axis, one norm for all heads as one for each."""
    if shape is None or x.shape == shape:
        return x
    if x.dim() == 3 and x.shape[1] == 1:
        return x[:, 0]
    if len(shape) == 2 and x.numel() == shape.numel():
        return x.view(shape)
    return x.expand(shape).clone() if len(shape) == 2 and x.shape == shape[1:] else x


def _cut(own: dict[str, Tensor], shapes: dict[str, torch.Size], theirs: str, name: str) -> dict[str, Tensor]:
    """Mamba-2's projections [z | x | B | C | dt] and its convolution's channels [x | B | C], apart."""
    if missing := [key for key in _FUSED if key not in own]:
        raise SourceError(f"{name} lacks the tensor {theirs}{missing[0]}; download or copy it again.")
    wide, narrow, heads = (shapes[key][0] for key in ("q_proj.weight", "k_proj.weight", "a_proj.weight"))
    rows = {"g": wide, "v": narrow, "k": narrow, "q": wide, "a": heads}
    channels = {part: rows[part] for part in "vkq"}
    for key, sizes in (("in_proj.weight", rows), ("conv1d.weight", channels), ("conv1d.bias", channels)):
        if own[key].shape[0] != sum(sizes.values()):
            raise SourceError(
                f"{name}: the tensor {theirs}{key} has {own[key].shape[0]} rows where {sum(sizes.values())} belong; "
                "its weights do not fit its config.json."
            )
    cut = {key: x for key, x in own.items() if key not in _FUSED}
    split = own["in_proj.weight"].split(list(rows.values()))
    cut |= {f"{part}_proj.weight": x for part, x in zip(rows, split, strict=True)}
    for part in ("weight", "bias"):
        pieces = own[f"conv1d.{part}"].split(list(channels.values()))
        cut |= {f"{channel}_conv.{part}": x for channel, x in zip(channels, pieces, strict=True)}
    return cut


__all__ = ["FORMATS", "load_foreign"]
