"""Text that a model writes by itself: prompts, decoding of both kinds at once, and how it is judged."""

import math

import torch
from hybrid_cases import source
from training_case import pair

from hybridize.tasks.generation import continue_text, judge, most_repeated, source_perplexity, take_prompts


def test_prompts_are_beginnings_of_rows_first():
    rows = torch.arange(3 * 10).view(3, 10)
    assert take_prompts(rows, 5, 4).tolist() == [
        [0, 1, 2, 3],
        [10, 11, 12, 13],
        [20, 21, 22, 23],
        [4, 5, 6, 7],
        [14, 15, 16, 17],
    ]
    assert len(take_prompts(rows, 100, 4)) == 6 and take_prompts(rows, 2, 99).shape == (2, 10)
    assert take_prompts(rows, 0).shape[0] == 0


def test_greedy_is_the_first_choice_and_sampling_goes_by_the_seed():
    _, model = pair("llama")
    prompts = torch.randint(1, 60, (3, 5), generator=torch.Generator().manual_seed(0))
    model.generation_config.repetition_penalty = 50.0  # not to be followed
    model.generation_config.eos_token_id = None
    state = torch.get_rng_state()
    got = continue_text(model, prompts, 12, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    ids = prompts
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(got["greedy"], ids[:, 5:])
    again, other = continue_text(model, prompts, 12, seed=1), continue_text(model, prompts, 12, seed=2)
    assert torch.equal(got["sampled"], again["sampled"]) and not torch.equal(got["sampled"], other["sampled"])


def test_no_text_ends_early():
    model = source("llama", 2).eval()
    model.generation_config.eos_token_id = list(range(59))
    assert continue_text(model, torch.ones(2, 3, dtype=torch.long), 10, seed=0)["greedy"].shape == (2, 10)


def test_texts_are_judged_by_repetition_and_by_the_source():
    assert most_repeated([1, 2, 3, 4, 5, 6] * 3) == 3 and most_repeated([1, 2, 3]) == 0
    assert most_repeated([7] * 9) == 4  # overlapping
    model = source("llama", 2).eval()
    prompts, written = torch.randint(1, 60, (2, 4)), torch.stack([torch.arange(1, 21), torch.full((20,), 7)])
    found = source_perplexity(model, prompts, written, 24)
    whole = torch.cat([prompts, written], dim=1)
    with torch.no_grad():
        logits = model(whole).logits[:, 3:-1].log_softmax(-1)
    for row, perplexity in enumerate(found):
        loss = -logits[row].gather(-1, written[row][:, None]).mean().item()
        assert math.isclose(perplexity, math.exp(loss), rel_tol=1e-4)
    assert judge(written, [5.0, 6.0], bound=5.5) == {
        "texts": 2,
        "good": 1,
        "not_repetitive": 1,
        "likely": 1,
        "perplexity": 6.0,
    }
