"""How well chunks are remembered together: the same questions of long text, read plainly and in chunks, by each way.

A chunked reader reads the instructions first and cuts the text behind them into even pieces, so that with the question
no piece takes more positions than the native context; the question is read on top of what was composed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.composition.compose import KEYS, compose
from hybridize.composition.memory import Memory
from hybridize.composition.reader import read_chunks, read_prefix
from hybridize.composition.states import check_method
from hybridize.errors import UsageError
from hybridize.hybrid.walk import entry_device
from hybridize.tasks.perplexity import LOGIT_ROWS, head_logits
from hybridize.tasks.retrieval import Item, score_answer

PLAIN = "plain"
POSITIONS = ("local", "sequential")
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Way:
    """One way to read: plainly, or by a method of composition with a strategy for keys and for positions."""

    method: str
    kv: str = "concat"
    positions: str = "local"

    @staticmethod
    def parse(text: str) -> Way:
        """Read 'plain', 'picaso', 'soup/window' or 'ordered/concat/sequential'; UsageError says what is wrong."""
        method, _, rest = text.partition("/")
        kv, _, positions = rest.partition("/")
        way = Way(method, kv or "concat", positions or "local")
        if method != PLAIN:
            check_method(method)
        if way.kv not in KEYS or way.positions not in POSITIONS:
            raise UsageError(
                f"{text!r} is no way to read; give plain, or METHOD/KEYS/POSITIONS with keys {', '.join(KEYS)} and "
                f"positions {' or '.join(POSITIONS)}."
            )
        return way

    def __str__(self) -> str:
        parts = [self.method, self.kv, self.positions]
        while len(parts) > 1 and parts[-1] in ("concat", "local"):
            parts.pop()
        return "/".join(parts)


def pieces(body: Tensor, size: int, breaks: set[int]) -> list[Tensor]:
    """A text's ids int64 [T] in as few pieces of at most `size` as there can be, even, and cut behind a line if near.

    breaks: the ids of tokens that end a line.
    """
    count = max(1, -(-len(body) // size))
    each = -(-len(body) // count)
    cut = 0
    found: list[Tensor] = []
    while cut < len(body):
        stop = min(cut + each, len(body))
        if stop < len(body):
            # Not so far back that the rest no longer fits.
            left = count - len(found) - 1
            least = max(cut + 1, stop - each // 10, len(body) - left * size)
            stop = next((n for n in range(stop, least - 1, -1) if int(body[n - 1]) in breaks), stop)
        found.append(body[cut:stop])
        cut = stop
    return found


def line_breaks(tokenizer: Any) -> set[int]:
    """The ids of tokens that end with the end of a line."""
    ends = ("\n", "Ċ")  # the latter in byte-level vocabularies
    return {number for word, number in tokenizer.get_vocab().items() if word.endswith(ends) or word == "<0x0A>"}


def _memories(model: Any, ids: Tensor, body: tuple[int, int], native: int, breaks: set[int]) -> _Read:
    prefix = read_prefix(model, ids[: body[0]])
    room = native - prefix.tokens - (len(ids) - body[1])
    if room < prefix.tokens or room < 1:
        raise UsageError(
            f"With {prefix.tokens} tokens before the text and {len(ids) - body[1]} behind it, a native context of "
            f"{native} has too little room for text; give more."
        )
    return _Read(model, prefix, pieces(ids[slice(*body)], room, breaks))


class _Read:
    """An item's prefix and pieces; what was read at which positions is kept, for the ways that share it."""

    def __init__(self, model: Any, prefix: Memory, parts: list[Tensor]):
        self.model, self.prefix, self.parts = model, prefix, parts
        self.read: dict[str, list[Memory]] = {}

    def hidden(self, way: Way, behind: Tensor) -> Tensor:
        """Hidden states [T, C] of the tokens behind the text, read on top of all pieces."""
        if way.positions not in self.read:
            start = self.prefix.tokens
            starts = [start] * len(self.parts)
            if way.positions == "sequential":
                starts = [start + sum(map(len, self.parts[:n])) for n in range(len(self.parts))]
            self.read[way.positions] = list(read_chunks(self.model, self.prefix, self.parts, starts))
        composed = compose(self.model, self.prefix, self.read[way.positions], way.method, way.kv)
        return composed.read(self.model, behind[None])[0]


@torch.no_grad()
def _hidden(
    model: Any, ids: Tensor, body: tuple[int, int], ways: Sequence[Way], native: int, breaks: set[int]
) -> Iterator[tuple[Way, Tensor]]:
    """Each way, and the hidden states [T, C] of the tokens behind the text when it was read so."""
    read: _Read | None = None
    for way in ways:
        if way.method == PLAIN:
            states = model.base_model(input_ids=ids[None].to(entry_device(model)), use_cache=False).last_hidden_state
            yield way, states[0, body[1] :]
        else:
            read = read or _memories(model, ids, body, native, breaks)
            yield way, read.hidden(way, ids[body[1] :])


def answers(
    model: Any,
    items: Sequence[Item],
    ways: Sequence[Way],
    native: int,
    breaks: set[int],
    advance: Advance | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each way: log-probability of each item's answer in nats per token [N], and whether greedy decoding gives it.

    native: positions that a piece, with the instructions before it and the question behind it, may take. advance(n)
    is called after each item. UsageError where that leaves no room.
    """
    found = {str(way): (torch.zeros(len(items)), torch.zeros(len(items), dtype=torch.bool)) for way in ways}
    for number, item in enumerate(items):
        start, stop = item.answer
        before = slice(start - item.body[1] - 1, stop - item.body[1] - 1)  # what predicts the answer
        for way, states in _hidden(model, item.ids, item.body, ways, native, breaks):
            scored = score_answer(model, states[before], item.ids[start:stop])
            found[str(way)][0][number], found[str(way)][1][number] = scored
        if advance is not None:
            advance(1)
    return found


def text_losses(
    model: Any,
    rows: Tensor,
    scored: int,
    ways: Sequence[Way],
    native: int,
    breaks: set[int],
    advance: Advance | None = None,
) -> dict[str, float]:
    """For each way: loss in nats per token of the last `scored` tokens of rows of text int64 [N, T], given the others.

    The first of them is not scored: it is what a chunked reader asks first.
    """
    totals = {str(way): 0.0 for way in ways}
    for row in rows:
        for way, states in _hidden(model, row, (0, len(row) - scored), ways, native, breaks):
            totals[str(way)] += sum(_losses(model, states[:-1], row[-scored + 1 :]))
        if advance is not None:
            advance(1)
    return {name: total / (len(rows) * (scored - 1)) for name, total in totals.items()}


def _losses(model: Any, states: Tensor, targets: Tensor) -> Iterator[float]:
    for some, wanted in zip(states.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        logits = head_logits(model, some)
        yield torch.nn.functional.cross_entropy(logits, wanted.to(logits.device), reduction="sum").item()
