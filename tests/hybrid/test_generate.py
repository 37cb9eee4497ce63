"""generate(), in every way it uses a cache, gives what a model without one gives."""

import copy

import pytest
import torch
import transformers
from hybrid_cases import CACHE, CASES, GKA, MIXERS, cache_of, hybrid, make, run, source, tokens
from transformers import DynamicCache, StaticCache

from hybridize.hybrid.cache import StateLayer

NEW = 8
# Every family with two mixers, and every mixer in one family.
SOME = [(case, "pair") for case in CASES] + [("qwen3", mixer) for mixer in MIXERS]


def _resets() -> bool:
    """Whether this transformers' own caches are empty after reset()."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    cache.reset()
    return cache.get_seq_length() == 0


RESETS = _resets()


def repeating(length=30):
    """A prompt that prompt lookup finds drafts in."""
    return tokens(1, 6, seed=3).repeat(1, 9)[:, :length]


def from_scratch(model, ids, new=NEW):
    """Greedy tokens, each from a forward over everything before it."""
    for _ in range(new):
        ids = torch.cat([ids, run(model, ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def generate(model, ids, new=NEW, **kwargs):
    kwargs = {"do_sample": False, "attention_mask": torch.ones_like(ids), **kwargs}  # token 0 is no padding
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=new, **kwargs)


@pytest.fixture
def crops(monkeypatch):
    """How many tokens each crop of a state took back."""
    counts = []
    crop = StateLayer.crop

    def counted(self, count):
        counts.append(-count)
        crop(self, count)

    monkeypatch.setattr(StateLayer, "crop", counted)
    return counts


@pytest.mark.parametrize(("case", "mixer"), SOME)
def test_greedy(case, mixer):
    model = hybrid(case, mixer)
    rows = [tokens(1, n, seed=n) for n in (20, 13, 6)]
    want = [from_scratch(model, row) for row in rows]
    assert torch.equal(generate(model, rows[0]), want[0]), f"{case} {mixer}"
    ids, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 20 - row.shape[1] :], mask[i, 20 - row.shape[1] :] = row[0], 1
    for more in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 7}, {"use_cache": False}):
        got = generate(model, ids, attention_mask=mask, **more)
        for i, row in enumerate(want):
            assert torch.equal(got[i, 20 - rows[i].shape[1] :], row[0]), f"{case} {mixer} {more} row {i}"


@pytest.mark.parametrize(("case", "mixer"), SOME)
def test_beams_and_drafts(case, mixer, crops, monkeypatch):
    model, plain = hybrid(case, mixer), source(case, initializer_range=0.15)
    ids = repeating()
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(model, ids, **beams), generate(model, ids, use_cache=False, **beams)), f"{case} {mixer}"
    want = from_scratch(model, ids)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4), want), f"{case} {mixer} prompt lookup"
    assert max(crops) > 0
    crops.clear()
    assert torch.equal(generate(model, ids, assistant_model=plain), want), f"{case} {mixer} with an assistant"
    assert crops
    crops.clear()
    if "window" not in case or transformers.__version__ >= "5.18":  # 5.17's own windows cannot take back long drafts
        monkeypatch.setattr(model.generation_config, "assistant_confidence_threshold", 0.0)  # else it drafts one token
    assert torch.equal(generate(plain, ids, assistant_model=model), from_scratch(plain, ids)), (
        f"{case} {mixer} assisting"
    )
    assert max(crops) > 0


@pytest.mark.parametrize(("case", "mixer"), SOME)
def test_two_turns(case, mixer):
    """A conversation on one cache; the user's own, with and without a config, or the one generate returned."""
    model = hybrid(case, mixer)
    first, more = tokens(1, 21), tokens(1, 10, seed=1)
    one = from_scratch(model, first)
    two = from_scratch(model, torch.cat([one, more], 1))
    returned = generate(model, first, return_dict_in_generate=True)[CACHE]
    caches = {"config": DynamicCache(config=model.config)}
    if case == "qwen3":
        caches |= {"returned": returned, "bare": DynamicCache()}
    for name, cache in caches.items():
        if cache is not returned:
            assert torch.equal(generate(model, first, **{CACHE: cache}), one), f"{case} {mixer} {name}"
        assert cache.get_seq_length() == one.shape[1] - 1
        twin = copy.deepcopy(cache)
        got = generate(model, torch.cat([one, more], 1), **{CACHE: cache})
        assert torch.equal(got, two), f"{case} {mixer} {name} second turn"
        got = generate(model, torch.cat([one, more], 1), **{CACHE: twin})
        assert torch.equal(got, two), f"{case} {mixer} {name} second turn on a copy"
        if not RESETS:
            continue
        cache.reset()
        assert torch.equal(generate(model, first, **{CACHE: cache}), one), f"{case} {mixer} {name} after reset"


@pytest.mark.parametrize("pattern", ["GKA-GDN-M2", "SWA-SWA-SWA", "M2-*-*", "*-*-GKA"])
def test_any_set_of_layers_generates(pattern, crops):
    settings = {**({"window": 8, "sinks": 2} if "SWA" in pattern else {}), **(GKA if "GKA" in pattern else {})}
    model = make("qwen3", pattern, settings)
    ids = repeating()
    want = from_scratch(model, ids)
    for more in ({}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 8}):
        assert torch.equal(generate(model, ids, **more), want), f"{pattern} {more}"
    assert max(crops) > 0
    beams = {"num_beams": 3}
    assert torch.equal(generate(model, ids, **beams), generate(model, ids, use_cache=False, **beams)), pattern
    cache = StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(generate(model, ids, **{CACHE: cache}), want), f"{pattern} the user's static cache"


def test_drafts_then_a_second_turn(crops):
    """Drafts after a prompt longer than can be taken back; then the conversation goes on without drafts."""
    model = hybrid("mistral", "mixed")
    ids = repeating(30).repeat(1, 10)
    one = from_scratch(model, ids, 10)
    cache = DynamicCache(config=model.config)
    assert torch.equal(generate(model, ids, 10, prompt_lookup_num_tokens=5, **{CACHE: cache}), one)
    assert max(crops) > 0 and cache.get_seq_length() == 309
    more = torch.cat([one, tokens(1, 8)], 1)
    assert torch.equal(generate(model, more, 5, **{CACHE: cache}), from_scratch(model, more, 5))


def test_generated_positions_and_scores():
    """The logits of generate() are those of a forward, with and without a cache."""
    model = hybrid("qwen2", "mixed")
    ids = tokens(2, 15)
    out = generate(model, ids, output_logits=True, return_dict_in_generate=True)
    want = run(model, out.sequences, use_cache=False).logits[:, 14:-1]
    assert (torch.stack(out.logits, 1) - want).abs().max() < 1e-4
    assert cache_of(out).get_seq_length() == out.sequences.shape[1] - 1
