"""Hybrids on a CUDA device give what the same hybrids give on the CPU."""

import copy

import pytest
import torch
from hybrid_cases import MIXERS, cache_of, check_equal, hybrid, run, states, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _exact_matmuls():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("mixer", MIXERS)
def test_same_as_on_the_cpu(mixer):
    model = hybrid("qwen3", mixer)
    there = copy.deepcopy(model).to("cuda")
    ids = tokens(2, 64)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    want = run(model, ids, attention_mask=mask)
    got = run(there, ids.cuda(), attention_mask=mask.cuda())
    real = mask.bool()
    torch.testing.assert_close(got.logits.cpu()[real], want.logits[real], atol=1e-3, rtol=1e-3)
    ours = {name: x.cpu() for name, x in states(cache_of(got), there).items()}
    check_equal(ours, states(cache_of(want), model), mixer, tolerance=1e-3)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "offloaded"}, {"cache_implementation": "static"}])
def test_generate(how):
    model = copy.deepcopy(hybrid("llama", "pair")).to("cuda")
    ids = tokens(1, 20).cuda()
    with torch.no_grad():
        plain = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, use_cache=False
        )
        cached = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **how)
    assert cached.tolist() == plain.tolist()
