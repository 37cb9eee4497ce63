"""The cache of a hybrid: rows chosen, repeated, reset; tokens taken back; caches that do not fit refused."""

import copy
import inspect
import random

import pytest
import torch
from hybrid_cases import CACHE, GKA, MIXERS, cache_of, check_equal, hybrid, make, run, source, states, tokens
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import CacheLayerMixin

from hybridize.errors import HybridizeError
from hybridize.hybrid.cache import MAX_ROLLBACK, RollbackError, StateLayer, install_state_layers
from hybridize.hybrid.config import plan_of


def follow(model, cache, ids):
    """Logits and states of one more forward."""
    out = run(model, ids, cache)
    return {"logits": out.logits, **states(cache, model)}


@pytest.mark.parametrize("mixer", MIXERS)
def test_rows(mixer):
    model = hybrid("qwen3", mixer)
    ids, more = tokens(3, 20), tokens(3, 4, seed=1)
    for record in (False, True):
        for change, rows in (
            (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
            (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        ):
            cache = DynamicCache(config=model.config)
            mask = torch.ones(3, 20, dtype=torch.long)
            mask[1, :5] = 0
            if record:
                run(model, ids[:, :2], cache, attention_mask=mask[:, :2])
                cache.activate_past_recording()
                run(model, ids[:, 2:], cache, attention_mask=mask)
            else:
                run(model, ids, cache, attention_mask=mask)
            change(cache)
            length = 20
            if record:
                cache.crop(-6)
                length = 14
            mask = torch.cat([mask[rows, :length], torch.ones(len(rows), 4, dtype=torch.long)], 1)
            got = run(model, more[rows], cache, attention_mask=mask)
            want = run(model, torch.cat([ids[rows, :length], more[rows]], 1), attention_mask=mask)
            check_equal(
                {"logits": got.logits, **states(cache, model)},
                {"logits": want.logits[:, -4:], **states(cache_of(want), model)},
                f"{mixer} rows {rows} recorded {record}",
            )


@pytest.mark.parametrize("prompt", [1, 20, 300])
@pytest.mark.parametrize("mixer", MIXERS)
def test_taking_tokens_back(mixer, prompt):
    """Random forwards and crops end where a fresh run over the kept tokens ends."""
    model = hybrid("qwen2", mixer)
    chance = random.Random(f"{mixer} {prompt}")
    cache = DynamicCache(config=model.config)
    install_state_layers(cache, plan_of(model.config).layers, 3)
    late = chance.random() < 0.5  # recording may begin before or after the prompt
    if not late:
        cache.activate_past_recording()
    kept = tokens(1, prompt)
    run(model, kept, cache)
    cache.activate_past_recording()
    assert cache.is_croppable
    recorded = 0 if late else min(prompt, MAX_ROLLBACK)
    total = 0
    for step in range(12):
        draft = tokens(1, 150 if step == 7 else chance.choice([1, 1, 2, 5, 9]), seed=step)
        run(model, draft, cache)
        kept = torch.cat([kept, draft], 1)
        recorded = min(recorded + draft.shape[1], MAX_ROLLBACK)
        back = chance.choice([0, 1, min(12, recorded), min(draft.shape[1], MAX_ROLLBACK)])
        cache.crop(-back)
        recorded -= back
        total += back
        kept = kept[:, : kept.shape[1] - back]
        assert cache.get_seq_length() == kept.shape[1]
    assert total > 5
    last = tokens(1, 3, seed=99)
    got = follow(model, cache, last)
    want = run(model, torch.cat([kept, last], 1))
    check_equal(got, {"logits": want.logits[:, -3:], **states(cache_of(want), model)}, f"{mixer} prompt {prompt}")


def test_decoding_is_recorded_within_bounds():
    """Hundreds of recorded steps keep a bounded record, and the last MAX_ROLLBACK can be taken back."""
    model = hybrid("llama", "gdn")
    cache = DynamicCache(config=model.config)
    install_state_layers(cache, plan_of(model.config).layers, model.config.num_hidden_layers)
    cache.activate_past_recording()
    ids = tokens(1, 310)
    for part in ids.split(1, dim=1):
        run(model, part, cache)
        cache.activate_past_recording()
    layer = cache.layers[0]
    assert MAX_ROLLBACK <= sum(inputs["q"].shape[1] for inputs, _ in layer._record) < 2 * MAX_ROLLBACK
    cache.crop(-MAX_ROLLBACK)
    last = tokens(1, 2, seed=9)
    want = run(model, torch.cat([ids[:, :-MAX_ROLLBACK], last], 1))
    got = follow(model, cache, last)
    check_equal(got, {"logits": want.logits[:, -2:], **states(cache_of(want), model)}, "after 310 steps")


def test_taking_back_with_documents_and_padding():
    model = make("qwen3", "*-GDN-SWA-*-GKA", {"window": 8, "sinks": 2, **GKA})
    first, second, more = tokens(1, 150), tokens(1, 170, seed=1), tokens(1, 6, seed=2)
    cache = DynamicCache(config=model.config)
    install_state_layers(cache, plan_of(model.config).layers, model.config.num_hidden_layers)
    cache.activate_past_recording()
    place = torch.cat([torch.arange(150), torch.arange(170)])[None]
    run(model, torch.cat([first, second], 1), cache, position_ids=place)
    kept = 60
    cache.crop(-(170 - kept))
    got = run(model, more, cache, position_ids=(kept + torch.arange(6))[None])
    want = run(model, torch.cat([second[:, :kept], more], 1))
    got = {"logits": got.logits, **states(cache, model)}
    check_equal(got, {"logits": want.logits[:, -6:], **states(cache_of(want), model)}, "documents")
    cache = cache_of(run(model, first[:, :5]))
    cache.activate_past_recording()
    run(
        model,
        torch.cat([first[:, 5:10], second[:, :9]], 1),
        cache,
        position_ids=place[:, [*range(5, 10), *range(150, 159)]],
    )
    with pytest.raises(RollbackError, match="packed document"):
        cache.crop(-9)


def test_refusals():
    model = hybrid("llama", "mixed")
    out = run(model, tokens(1, 20))
    with pytest.raises(RollbackError, match="activate_past_recording"):
        cache_of(out).crop(-1)
    cache = DynamicCache(config=model.config)
    run(model, tokens(1, 5), cache)
    cache.activate_past_recording()
    run(model, tokens(1, 5), cache)
    with pytest.raises(RollbackError, match="only the last 5"):
        cache.layers[1].crop(-6)
    with pytest.raises(RollbackError, match="negative"):
        cache.layers[1].crop(3)
    cache.layers[1].crop(-2)
    with pytest.raises(RollbackError, match="next forward"):
        _ = cache.layers[1].state
    with pytest.raises(RollbackError, match="no keys and values"):
        cache.layers[1].update(torch.zeros(1), torch.zeros(1))
    full = cache_of(run(source("llama", 5), tokens(1, 4)))
    with pytest.raises(HybridizeError, match="another model"):
        run(model, tokens(1, 4), full)
    with pytest.raises(HybridizeError, match="another model"):  # another hybrid's, with other layers converted
        run(make("llama", "GDN-*-*-*-*"), tokens(1, 4), cache_of(out))


def test_what_transformers_reads():
    model = hybrid("mistral-window", "mixed")
    cache = DynamicCache(config=model.config)
    run(model, tokens(2, 20), cache)
    converted = [isinstance(layer, StateLayer) for layer in cache.layers]
    assert converted == [False, True, True, True, True]
    assert cache.is_linear == [False] * 5 and cache.is_sliding == [True] + [False] * 4
    assert not cache.is_compileable and not cache.is_croppable
    assert cache.get_seq_length() == cache.get_seq_length(1) == 20
    assert cache.get_mask_sizes(3, 1) == cache.get_mask_sizes(3, 0)
    twin = copy.deepcopy(cache)
    run(model, tokens(2, 5), twin)
    assert cache.get_seq_length() == 20 and twin.get_seq_length() == 25
    twin.layers[2].reset()
    assert twin.layers[2].state is None
    every = make("llama", "GDN-GDN-GDN")
    cache = DynamicCache(config=every.config)
    run(every, tokens(2, 20), cache)
    assert cache.get_seq_length() == 20 and cache.get_mask_sizes(3, 0) == (23, 0)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[0].state is None
    assert CACHE in ("cache", "past_key_values")


def test_a_longer_reach_is_kept():
    """Drafts longer than MAX_ROLLBACK are taken back whole if announced, in one piece or by steps."""
    model, reach = hybrid("qwen3", "gdn"), MAX_ROLLBACK + 32
    ids, last = tokens(1, 8 + 2 * reach), tokens(1, 1, seed=3)
    for pieces in (1, 2 * reach // 4):
        cache = DynamicCache(config=model.config)
        run(model, ids[:, :8], cache)
        for layer in cache.layers:
            if isinstance(layer, StateLayer):
                layer.activate_past_recording(recurrent_states_to_keep=reach)
        for piece in ids[:, 8:].chunk(pieces, dim=1):
            run(model, piece, cache)
        cache.crop(-reach)
        got = run(model, last, cache)
        want = run(model, torch.cat([ids[:, : 8 + reach], last], 1))
        torch.testing.assert_close(got.logits[:, -1], want.logits[:, -1], atol=1e-4, rtol=1e-4)


def test_takes_what_transformers_own_layers_take():
    """A release that passes a new argument to every layer of a cache must not fail at ours."""
    own = [c for n, c in vars(cache_utils).items() if n.endswith("Layer") and issubclass(c, CacheLayerMixin)]
    compared = 0
    for name in ("activate_past_recording", "crop", "get_seq_length", "get_mask_sizes", "reorder_cache", "reset"):
        ours = inspect.signature(getattr(StateLayer, name))
        takes_any = any(p.kind is p.VAR_KEYWORD for p in ours.parameters.values())
        for method in {getattr(c, name) for c in own if hasattr(c, name)}:
            compared += 1
            for parameter in inspect.signature(method).parameters.values():
                known = parameter.name in ours.parameters or takes_any
                assert known, f"{method.__qualname__} takes {parameter.name}, StateLayer.{name} does not"
    assert compared >= 6
