"""Pico models of every family, with nothing left at a neutral value, and their hybrids."""

from functools import cache

import torch
import transformers
from torch import Tensor

import hybridize
from hybridize.hybrid.config import plan_of
from hybridize.hybrid.families import FAMILIES
from hybridize.hybrid.model import CACHE

VOCAB = 64
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}

# family -> (model type, (heads, key-value heads), more of the config)
CASES = {
    "llama": ("llama", (4, 2), {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", (4, 1), {"sliding_window": None}),
    "mistral-window": ("mistral", (4, 2), {"sliding_window": 11}),
    "ministral": ("ministral", (4, 2), {"head_dim": 8, "sliding_window": 11}),
    "ministral3": ("ministral3", (4, 2), {"head_dim": 8}),
    "mixtral": ("mixtral", (4, 2), {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("qwen2", (6, 2), {"hidden_size": 48, "tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", (4, 2), {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", (4, 2), {**_MOE, "shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", (4, 4), {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", (4, 2), {**_MOE, "head_dim": 16}),
    "phi3": ("phi3", (4, 2), {"pad_token_id": 0}),
}
WINDOWED = {"mistral-window", "ministral", "qwen2-window"}  # some of their own attention sees a window only
# mixer -> (pattern, settings); GKA with few iterations and a larger ridge: the random models are badly conditioned
GKA = {"num_iters": 6, "ridge": 0.1}
MIXERS = {
    "gka": ("GKA-*-GKA", GKA),
    "gdn": ("GDN-*-GDN", {}),
    "mamba2": ("M2-*-M2", {}),
    "swa": ("SWA-*-SWA", {"window": 8, "sinks": 0}),
    "swa-sinks": ("SWA-*-SWA", {"window": 8, "sinks": 2}),
    "mixed": ("*-GKA-SWA-GDN-M2", {"window": 8, "sinks": 2, **GKA}),
}
PAIR = ("GDN-*-SWA", {"window": 8, "sinks": 2})
EVERY = [(case, mixer) for case in CASES for mixer in MIXERS]


def source(case: str, layers: int = 3, **more):
    """A pico model of the family, in eval mode, from a fixed seed; `more` goes to its config."""
    kind, (heads, kv_heads), extra = CASES[case]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        **extra,
        **more,
    }
    if case == "ministral":
        settings["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    torch.manual_seed(0)
    model_class = getattr(transformers, FAMILIES[kind])
    model = model_class(model_class.config_class(**settings)).eval()
    perturb(model)
    return model


@torch.no_grad()
def perturb(model: torch.nn.Module) -> None:
    """Random values wherever a model or a mixer starts with ones, zeros or an identity."""
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        noise = torch.empty(p.shape, dtype=torch.float32).normal_(generator=generator)
        last = name.split(".")[-2:]
        if last[-1] == "A_log":
            p.copy_(noise - 1.0)
        elif last[-1] == "dt_bias":
            p.copy_(0.5 * noise - 1.0)
        elif last[-1] == "bias" or last[-1] == "D":
            p.copy_(0.4 * noise)
        elif "norm" in last[0]:
            p.copy_(1.0 + 0.3 * noise)
        elif "conv" in last[0]:
            p.copy_(0.5 * noise)
        elif last[0] in {"a_proj", "b_proj", "alpha_proj", "g_proj"}:
            p.copy_(0.3 * noise)


def make(case: str, pattern: str, settings: dict | None = None, **more):
    """A hybrid of the pico model with every new parameter random."""
    plan = hybridize.LayerPlan.from_pattern(pattern)
    model = hybridize.convert(source(case, len(plan.kinds), **more), plan, **(settings or {}))
    perturb(model)
    return model


@cache
def hybrid(case: str, mixer: str):
    """The hybrid of one family and one entry of MIXERS; made once, so leave it as it is."""
    return make(case, *(PAIR if mixer == "pair" else MIXERS[mixer]))


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids [batch, length] without 0, which tests use as padding."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model, ids: Tensor, cache=None, **kwargs):
    """Forward; a cache goes under this transformers' name for it."""
    if cache is not None:
        kwargs[CACHE] = cache
    with torch.no_grad():
        return model(ids, **kwargs)


def cache_of(output):
    """The cache that a forward returned, under whatever name."""
    return output[CACHE]


def states(cache, model) -> dict[str, Tensor]:
    """Every state tensor of a hybrid's cache by layer and name; fails when there is none."""
    found = {f"{i}.{n}": x for i in plan_of(model.config).layers for n, x in cache.layers[i].state.items()}
    assert found
    return found


def row_states(cache, model, row: int) -> dict[str, Tensor]:
    """The state tensors of one row of the batch."""
    return {name: x[row : row + 1] for name, x in states(cache, model).items()}


def check_equal(got: dict[str, Tensor], want: dict[str, Tensor], what: str, tolerance: float = 1e-4) -> None:
    """Every tensor within the tolerance; `what` names the case in the message."""
    assert got.keys() == want.keys(), what
    for name, x in want.items():
        assert got[name].shape == x.shape, f"{what}: {name} has shape {got[name].shape}, expected {x.shape}"
        error = (got[name].float() - x.float()).abs().max().item() if x.numel() else 0.0
        assert error <= tolerance, f"{what}: {name} is off by {error:.2e}"  # NaN fails too
