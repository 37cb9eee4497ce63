"""What a run measures beside the loss: retrieval, and text that a model writes by itself.

Texts are judged under the source at the run's end, when all of them are there: the source need not stay in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.console import Console
from hybridize.errors import DataError
from hybridize.priming.align import DivergedError
from hybridize.priming.batches import Batch
from hybridize.priming.options import PrimeOptions
from hybridize.processes import share, total, world
from hybridize.sources import Source
from hybridize.tasks import generation, retrieval
from hybridize.tasks.generation import NEW_TOKENS, continue_text, judge, source_perplexity, take_prompts
from hybridize.tasks.perplexity import mean_loss

LIKELY = 2.0  # a text is likely when its perplexity is below so many times that of the held-out text, under the source


@dataclass(frozen=True)
class Quality:
    """Retrieval items and prompts, the same for every model of a run; either may be empty."""

    items: list[retrieval.Item]
    prompts: Tensor
    new_tokens: int
    batch_tokens: int
    seed: int

    def measure(self, model: Any, title: str, console: Console) -> dict[str, Any]:
        """{"retrieval": summary, "texts": {"greedy": ids, "sampled": ids}} of what there is to measure."""
        found: dict[str, Any] = {}
        if self.items:
            with console.progress(f"Retrieval, {title}", len(self.items), "item") as tracker:
                answers = retrieval.measure(model, self.items, self.batch_tokens, tracker.advance)
            found["retrieval"] = retrieval.summary(self.items, *answers)
        if len(self.prompts):
            with console.progress(f"Generation, {title}", 2 * len(self.prompts), "text") as tracker:
                written = continue_text(model, self.prompts, self.new_tokens, self.seed)
                tracker.advance(2 * len(self.prompts))
            found["texts"] = {mode: ids.tolist() for mode, ids in written.items()}
        return found

    def report(self, measured: Mapping[str, Any], source_loss: float, load: Callable[[], Any]) -> dict[str, Any]:
        """`retrieval` and `generation` of the run's report, by model; texts are judged under the source, as loaded."""
        result: dict[str, Any] = {}
        if self.items:
            result["retrieval"] = {name: found["retrieval"] for name, found in measured.items()}
        if len(self.prompts):
            source = load()
            bound = LIKELY * math.exp(min(source_loss, 700.0))
            result["generation"] = {
                "prompt_tokens": self.prompts.shape[1],
                "new_tokens": self.new_tokens,
                "ngram": generation.NGRAM,
                "repeats_allowed": generation.REPEATS,
                "perplexity_bound": bound,
                "models": {name: self._judged(found["texts"], source, bound) for name, found in measured.items()},
            }
        return result

    def _judged(self, texts: Mapping[str, list[list[int]]], source: Any, bound: float) -> dict[str, Any]:
        result = {}
        for mode, ids in texts.items():
            written = torch.tensor(ids)
            found = source_perplexity(source, self.prompts, written, self.batch_tokens)
            result[mode] = judge(written, found, bound)
        return result


def shared_loss(model: Any, rows: Batch, batch_size: int, title: str, advance: Callable[[int], None]) -> float:
    """Mean held-out loss over the targets of rows, of which each process takes its share; DivergedError if not finite.

    Of several processes, one's share may hold no target at all.
    """
    mine = rows.part(share())
    told = lambda tokens: advance(tokens * world())
    count, loss = int(mine.targets[:, 1:].sum()), 0.0
    if count:
        loss = mean_loss(model, mine.ids, batch_size, told, mine.positions, mine.targets)
    if world() > 1:
        summed, targets = total(torch.tensor([loss * count, count], dtype=torch.float64)).tolist()
        loss = summed / targets
    if not math.isfinite(loss):
        raise DivergedError(f"{title} is {loss}; no hybrid was written.")
    return loss


def make_quality(options: PrimeOptions, source: Source, held_out: Tensor, console: Console) -> Quality:
    """What to measure on held-out rows [N, T], with items of T tokens; a warning where a row holds no question."""
    context = held_out.shape[1]
    items: list[retrieval.Item] = []
    if options.items:
        # A row may begin or end within a character.
        decode: Any = source.tokenizer.decode
        text = [decode(row, skip_special_tokens=True).strip("\ufffd") for row in held_out.tolist()]
        try:
            items = retrieval.make_items(
                source.tokenizer, text, lengths=[context], per_cell=options.items, seed=options.seed
            )
        except DataError as error:
            console.warn(f"Retrieval is not measured. {error}")
    prompts = take_prompts(held_out, options.prompts)
    longest = getattr(source.config, "max_position_embeddings", None)
    new_tokens = NEW_TOKENS if longest is None else min(NEW_TOKENS, longest - prompts.shape[1])
    if new_tokens < 1:
        prompts = prompts[:0]
    return Quality(items, prompts, new_tokens, options.batch_size * context, options.seed)
