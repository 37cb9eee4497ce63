"""However a sequence is cut into forwards, logits and states are the same."""

import pytest
import torch
from hybrid_cases import CASES, EVERY, cache_of, check_equal, hybrid, make, run, states, tokens


@pytest.mark.parametrize(("case", "mixer"), EVERY)
def test_cuts(case, mixer):
    model = hybrid(case, mixer)
    ids = tokens(2, 64)
    whole = run(model, ids)
    want = {"logits": whole.logits, **states(cache_of(whole), model)}
    changed = ids.clone()
    changed[:, 58] = changed[:, 58] % 63 + 1
    assert (run(model, changed).logits - whole.logits)[:, -1].abs().max() > 1e-3, "the past must matter"
    for cuts in ([40, 24], [63, 1], [1] * 64):
        cache, logits = None, []
        for part in ids.split(cuts, dim=1):
            out = run(model, part, cache)
            cache = cache_of(out)
            logits.append(out.logits)
        got = {"logits": torch.cat(logits, 1), **states(cache, model)}
        check_equal(got, want, f"{case} {mixer} in pieces of {cuts[:2]}")
        assert cache.get_seq_length() == 64


@pytest.mark.parametrize("case", CASES)
def test_without_cache_and_inner_model(case):
    model = hybrid(case, "mixed")
    ids = tokens(2, 64)
    want = run(model, ids)
    check_equal({"x": run(model, ids, use_cache=False).logits}, {"x": want.logits}, f"{case} without a cache")
    inner = model.base_model  # called by itself it makes its own cache
    first = run(inner, ids[:, :40])
    second = run(inner, ids[:, 40:], cache_of(first))
    got = model.lm_head(torch.cat([first.last_hidden_state, second.last_hidden_state], 1))
    check_equal({"x": got}, {"x": want.logits}, f"{case} inner model")
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        check_equal({"x": model(inputs_embeds=embeds).logits}, {"x": want.logits}, f"{case} from embeddings")


def test_states_are_fp32_and_long_prompts_split():
    model = make("llama", "GKA-GDN-M2", {"num_iters": 6}).to(torch.bfloat16)
    cache = cache_of(run(model, tokens(1, 300)))
    for name, x in states(cache, model).items():
        assert x.dtype == (torch.bfloat16 if "conv" in name else torch.float32), name
    model = make("llama", "GKA-GDN-M2-SWA-*")  # published settings, and more tokens than a chunk or a window holds
    ids = tokens(1, 600)
    whole = run(model, ids)
    first = run(model, ids[:, :301])
    second = run(model, ids[:, 301:], cache_of(first))
    got = {"logits": torch.cat([first.logits, second.logits], 1), **states(cache_of(second), model)}
    check_equal(got, {"logits": whole.logits, **states(cache_of(whole), model)}, "600 tokens", 3e-4)
