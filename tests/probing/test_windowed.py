"""One layer's windowed attention against a brute-force softmax over the band, in fp64."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from hybrid_cases import VOCAB, source, tokens
from torch import Tensor

from hybridize.errors import ConversionError
from hybridize.hybrid.walk import capture_layer_inputs
from hybridize.probing.windowed import window_attention, windowed, without_masks

CASES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral-window", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
    "qwen2-window": ("qwen2-window", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 11, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0}),
    "phi3": ("phi3", {}),
}
OWN = {"mistral-window": 11, "qwen2-window": 11, "qwen2_moe-window": 11, "qwen3-window": 11}
LENGTH = 40
PADDING = {
    "none": [(0, 0), (0, 0)],
    "left": [(13, 0), (0, 0)],
    "right": [(0, 0), (0, 9)],
    "both": [(5, 7), (37, 0)],
}


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def model_of(case: str, attention: str):
    name, more = CASES[case]
    model = source(name, 2, **more)
    model.set_attn_implementation(attention)
    # Experts have no fp64; eager's softmax is always in fp32, and makes NaN of fp64 rows that are all padding.
    return model if attention == "eager" or "moe" in case else model.double()


def padded(kind: str) -> tuple[Tensor, Tensor | None]:
    """Ids [2, 40] and their mask, None where nothing is padded."""
    ids = tokens(2, LENGTH, seed=3)
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate(PADDING[kind]):
        mask[row, :left] = 0
        mask[row, LENGTH - right :] = 0
    return ids, None if kind == "none" else mask


def brute_force(seen: dict, window: int, sinks: int, own: int | None, mask: Tensor | None) -> Tensor:
    """What the layer's attention gives before o_proj, [B, T, H * D], one query at a time."""
    query, key, value = (seen[name].double() for name in ("query", "key", "value"))
    batch, heads, length, _ = query.shape
    out = torch.zeros(batch, length, heads, value.shape[-1], dtype=torch.float64)
    group = heads // key.shape[1]
    for b in range(batch):
        real = [t for t in range(length) if mask is None or mask[b, t]]
        for i in real:
            visible = [j for j in real if j <= i and (own is None or j > i - own)]
            visible = [j for j in visible if j > i - window or j in real[:sinks]]
            for h in range(heads):
                scores = torch.stack([query[b, h, i] @ key[b, h // group, j] for j in visible]) * seen["scaling"]
                out[b, i, h] = scores.softmax(0) @ torch.stack([value[b, h // group, j] for j in visible])
    return out.flatten(2)


def run_layer_one(model, ids: Tensor, mask: Tensor | None, window: int, sinks: int, around) -> tuple[Tensor, dict]:
    """The input of layer 1's o_proj with that layer windowed, and what its attention function was given."""
    attention = model.model.layers[1].self_attn
    seen: dict = {}

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.update(query=query, key=key, value=value, scaling=kwargs["scaling"])
        return window_attention(module, query, key, value, attention_mask, **kwargs)

    given: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    registry.register("hybridize_window", spy)
    try:
        with torch.no_grad(), around, windowed(attention, window, sinks):
            model(ids, attention_mask=mask, use_cache=False)
    finally:
        hook.remove()
        registry.register("hybridize_window", window_attention)
    return given[0], seen


@pytest.mark.parametrize("attention", ["eager", "sdpa", "without masks"])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_banded_softmax(case: str, attention: str) -> None:
    model = model_of(case, attention.replace("without masks", "sdpa"))
    for padding, (window, sinks) in zip(PADDING, [(7, 0), (6, 3), (9, 2), (3, 5)], strict=True):
        ids, mask = padded(padding)
        around = without_masks(model.model) if attention == "without masks" else nullcontext()
        got, seen = run_layer_one(model, ids, mask, window, sinks, around)
        want = brute_force(seen, window, sinks, OWN.get(case), mask)
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        assert (got - want)[real].abs().max() < TOLERANCE[model.dtype], (padding, window, sinks)
        assert got.isfinite().all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2_moe-window", "qwen3"])
def test_a_window_of_the_whole_context_changes_nothing(case: str, attention: str) -> None:
    model = model_of(case, attention).float()
    for padding in PADDING:
        ids, mask = padded(padding)
        with torch.no_grad():
            base = model(ids, attention_mask=mask, use_cache=False).logits
            for window in (LENGTH, 10_000):
                with windowed(model.model.layers[0].self_attn, window):
                    assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, base)


def test_only_the_windowed_layer_changes_and_only_within_the_block() -> None:
    model = model_of("llama", "sdpa")
    ids, _ = padded("none")
    config = model.model.layers[0].self_attn.config
    with torch.no_grad():
        base = model(ids, output_hidden_states=True).hidden_states
        with windowed(model.model.layers[1].self_attn, 4, 0) as reach:
            inside = model(ids, output_hidden_states=True).hidden_states
        after = model(ids).logits
    assert torch.equal(inside[1], base[1])
    assert torch.equal(inside[2][:, :4], base[2][:, :4])  # the window holds all that the first four see
    assert not torch.allclose(inside[2][:, 4:], base[2][:, 4:])
    assert reach.calls == 1
    assert all(layer.self_attn.config is config for layer in model.model.layers)
    assert torch.equal(after, model(ids).logits)


def test_restores_the_module_after_an_error() -> None:
    attention = model_of("llama", "sdpa").model.layers[0].self_attn
    config = attention.config
    with pytest.raises(RuntimeError), windowed(attention, 4):
        raise RuntimeError
    assert attention.config is config
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_the_whole_model_without_masks_is_the_model(case: str, attention: str) -> None:
    model = model_of(case, attention)
    for padding in PADDING:
        ids, mask = padded(padding)
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        with torch.no_grad():
            base = model(ids, attention_mask=mask, use_cache=False).logits
            with without_masks(model.model):
                got = model(ids, attention_mask=mask, use_cache=False).logits
                _, arguments = capture_layer_inputs(model.model, [ids])
        masks = [kwargs["attention_mask"] for kwargs in arguments]
        assert (got - base)[real].abs().max() < TOLERANCE[model.dtype], padding
        assert masks == [None, None]
    assert model.model.config is model.config


def test_without_masks_keeps_a_window_set_outside() -> None:
    model = model_of("qwen3-window", "sdpa")
    ids, _ = padded("none")
    with torch.no_grad(), windowed(model.model.layers[0].self_attn, 5, 2):
        want = model(ids, use_cache=False).logits
        with without_masks(model.model):
            got = model(ids, use_cache=False).logits
    assert (got - want).abs().max() < 1e-12


def test_long_rows_use_several_blocks() -> None:
    """300 tokens are three blocks of 128 queries; the oracle is one softmax with the whole mask."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 300, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 300, 8, generator=generator, dtype=torch.float64)
    module = torch.nn.Module()
    module.config = transformers.LlamaConfig(attn_implementation="sdpa")
    with windowed(module, 40, 4):
        got, _ = window_attention(module, query, key, value, None, scaling=0.3)
    i, j = torch.arange(300)[:, None], torch.arange(300)
    visible = (j <= i) & ((j > i - 40) | (j < 4))
    scores = (0.3 * query @ key.repeat_interleave(2, 1).mT).masked_fill(~visible, float("-inf"))
    want = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert (got - want).abs().max() < 1e-12


def test_refuses_what_cannot_be_windowed() -> None:
    attention = model_of("llama", "sdpa").model.layers[0].self_attn
    with pytest.raises(ValueError, match="window must be at least 1"), windowed(attention, 0):
        pass
    with pytest.raises(ValueError, match="sinks at least 0"), windowed(attention, 4, -1):
        pass
    with pytest.raises(ConversionError, match="Linear has no config"), windowed(torch.nn.Linear(2, 2), 4):
        pass


def test_refuses_a_cache() -> None:
    model = model_of("llama", "sdpa")
    cache = model(tokens(1, 5), use_cache=True)
    name = "cache" if "cache" in cache else "past_key_values"
    with pytest.raises(ValueError, match="1 queries but 6 keys"), windowed(model.model.layers[0].self_attn, 3):
        model(torch.tensor([[VOCAB - 1]]), **{name: cache[name]})
