"""Free-running generation: whether a model repeats itself, or wanders off from what its source finds likely.

A next-token loss is measured on text that people wrote; here a model must live with what it wrote itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hybridize.hybrid.walk import entry_device
from hybridize.tasks.perplexity import token_losses

PROMPT_TOKENS = 32
NEW_TOKENS = 256
NGRAM, REPEATS = 6, 3  # a text is repetitive when so many tokens in a row occur more than so many times


def take_prompts(rows: Tensor, count: int, length: int = PROMPT_TOKENS) -> Tensor:
    """At most `count` prompts int64 [N, length] from rows [R, T]: every row's beginning first, then what follows it."""
    length = min(length, rows.shape[1])
    pieces = rows[:, : rows.shape[1] // length * length].unflatten(1, (-1, length))
    return pieces.transpose(0, 1).flatten(0, 1)[:count]


class _FirstRowsGreedy(LogitsProcessor):
    """Leaves the first `count` rows only their likeliest token, so that sampling is greedy there."""

    def __init__(self, count: int):
        self.count = count

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        head, rest = scores[: self.count], scores[self.count :]
        best = head.argmax(-1, keepdim=True)
        return torch.cat([torch.full_like(head, -math.inf).scatter(-1, best, 0.0), rest])


@torch.no_grad()
def continue_text(model: Any, prompts: Tensor, new_tokens: int, seed: int) -> dict[str, Tensor]:
    """What the model writes after prompts [N, P], int64 [N, new_tokens] on the CPU: all of it, no text ends early.

    `greedy`, and `sampled` from the model's whole distribution with this seed; both in one batch, since a step of
    decoding costs about the same for either number of rows.
    """
    device = entry_device(model)
    ids = torch.cat([prompts, prompts]).to(device)
    # Every setting is given: the source's own generation config may penalise just what is to be seen here.
    chosen = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=chosen,
            logits_processor=LogitsProcessorList([_FirstRowsGreedy(len(prompts))]),
        )
    greedy, sampled = out[:, ids.shape[1] :].cpu().chunk(2)
    return {"greedy": greedy, "sampled": sampled}


def most_repeated(tokens: Sequence[int], length: int = NGRAM) -> int:
    """How often the most frequent run of `length` tokens occurs; overlapping runs count."""
    runs = Counter(tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1))
    return max(runs.values(), default=0)


def source_perplexity(source: Any, prompts: Tensor, written: Tensor, batch_tokens: int) -> list[float]:
    """Perplexity under the source of each text [N, new_tokens], given its prompt [N, P]."""
    both = torch.cat([prompts, written], dim=1)
    found: list[float] = []
    for ids in both.split(max(1, batch_tokens // both.shape[1])):
        losses = token_losses(source, ids.to(entry_device(source)))[:, prompts.shape[1] - 1 :]
        found += [math.exp(min(loss, 700.0)) for loss in losses.double().mean(1).tolist()]
    return found


def judge(written: Tensor, perplexities: Sequence[float], bound: float) -> dict[str, Any]:
    """Of texts [N, new_tokens]: how many do not repeat themselves, are likely (below `bound`), and are both."""
    fresh = [most_repeated(text) <= REPEATS for text in written.tolist()]
    likely = [perplexity < bound for perplexity in perplexities]
    return {
        "texts": len(fresh),
        "good": sum(a and b for a, b in zip(fresh, likely, strict=True)),
        "not_repetitive": sum(fresh),
        "likely": sum(likely),
        "perplexity": sorted(perplexities)[len(perplexities) // 2],  # the median: one text can outweigh any mean
    }
