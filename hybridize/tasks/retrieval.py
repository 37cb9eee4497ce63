"""Retrieval probes: something is hidden at a depth in real text and asked for at its end.

A pass key, key-value pairs and a copy show what a layer remembers; more keys, more values, and facts that must be put
together, what is left of a long text. All of it comes from a seed and needs no download. The reply's first words are
given, so that even a small model knows what is asked of it, and an answer's log-probability tells more than whether it
is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from hybridize.errors import DataError
from hybridize.hybrid.walk import entry_device
from hybridize.tasks.facts import tell
from hybridize.tasks.perplexity import LOGIT_ROWS, head_logits
from hybridize.tasks.prompts import Filler, Frame, Question, TooShort

TASKS = ("passkey", "recall", "copy")
LONG_TASKS = ("passkey", "multikey", "multivalue", "facts")  # of which no item holds more, the longer it is
DEPTHS = 5
_Z = 1.959964  # of a normal distribution, for 95 %
_TOKENS_PER_PAIR = 64  # of an item of recall
_KEYS, _VALUES = 8, 4  # of an item of multikey, and of multivalue
_COPIED = 6  # words
_COLOURS_AND_SUCH = (
    "amber ancient bitter blue brave bright broken calm clever cold copper crimson curious dark distant dry eager "
    "early empty faint fierce frozen gentle golden grand green heavy hidden hollow honest humble ivory jolly late "
    "lazy little lonely loud lucky marble mellow narrow noble pale patient polite proud purple quick quiet rapid "
    "rough royal rusty scarlet secret sharp silent silver simple sleepy slow smooth solid steady strange sudden "
    "sunny swift tall tender tiny velvet violet warm white wild winter wooden young "
)
_THINGS = (
    "anchor apple arrow basket beach bell bird boat bottle bridge brush butter camera candle castle chair cherry "
    "circle clock cloud coin cotton crown desert door dragon eagle engine falcon farmer feather field finger fire "
    "flower forest fountain garden glass hammer harbor horse island jacket kettle kitchen ladder lake lamp lemon "
    "letter lion mirror moon mountain needle ocean orange paper pencil piano pillow planet pocket prince rabbit "
    "ribbon river rocket saddle sailor shadow shoe silk snow spoon spring stone storm summer table teacher temple "
    "tiger tower train tree tunnel valley village violin wagon wheel window winter wizard "
)
_ADJECTIVES, _NOUNS = _COLOURS_AND_SUCH.split(), _THINGS.split()


@dataclass(frozen=True, eq=False)
class Item:
    """One question: ids int64 [length]; [start, stop) of the answer's tokens, at the end; depth of what is asked for.

    depth is the share of the filler's tokens that precede it, from 0 to 1; of several things, the first. body is
    [start, stop) of the tokens of the text and of what is hidden in it: instructions precede it, the question follows.
    """

    task: str
    length: int
    depth: float
    ids: Tensor
    answer: tuple[int, int]
    body: tuple[int, int]


def make_items(
    tokenizer: Any,
    filler: Sequence[str],
    *,
    lengths: Sequence[int],
    depths: int = DEPTHS,
    per_cell: int = 20,
    tasks: Sequence[str] = TASKS,
    seed: int = 0,
) -> list[Item]:
    """Items of every task, length and depth, `per_cell` of each; depths are evenly spaced from 0 to 1.

    Each item goes by the seed, its task, length, depth and number alone, whatever else is made. filler: documents to
    hide things in, of which no item holds a part twice. Raises DataError where they are too short, and where a length
    is.
    """
    text = Filler(Frame(tokenizer), filler)
    places = [n / max(1, depths - 1) for n in range(depths)]
    items = []
    for task, length in product(tasks, lengths):
        try:
            items += [_item(text, seed, task, length, *cell) for cell in product(places, range(per_cell))]
        except TooShort as short:
            least = _least_length(text, seed, task, short.needed, list(product(places, range(per_cell))))
            raise DataError(
                f"Items of {length} tokens are too short for the {task} task, which takes {least} with this tokenizer; "
                "give a larger --context."
            ) from None
    return items


def _item(filler: Filler, seed: int, task: str, length: int, depth: float, number: int) -> Item:
    pick = random.Random(f"{seed} {task} {length} {depth:.6f} {number}")
    question = _QUESTIONS[task](pick, depth, length)
    found = filler.fill(question, length, pick.random())
    return Item(task, length, depth, torch.tensor(found.ids), (found.answer, length), found.body)


def _least_length(filler: Filler, seed: int, task: str, length: int, cells: Iterable[tuple[float, int]]) -> int:
    """The first length from `length` on at which all items of the task can be made."""
    for cell in cells:
        try:
            _item(filler, seed, task, length, *cell)
        except TooShort as short:
            return _least_length(filler, seed, task, short.needed, cells)
    return length


def _passkey(pick: random.Random, depth: float, length: int) -> Question:
    key = "".join(pick.choices("0123456789", k=5))
    return Question(
        "A pass key is hidden in the text below. Remember it.",
        [(depth, f"The pass key is {key}.")],
        "What is the pass key?",
        "The pass key is ",
        key,
    )


def _recall(pick: random.Random, depth: float, length: int) -> Question:
    return _pairs(pick, depth, max(2, length // _TOKENS_PER_PAIR))


def _multikey(pick: random.Random, depth: float, length: int) -> Question:
    return _pairs(pick, depth, _KEYS)


def _pairs(pick: random.Random, depth: float, count: int) -> Question:
    """So many keys with a number each, of which one is asked for; the others lie anywhere."""
    names = pick.sample([f"{adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS], count)
    numbers = pick.sample(range(1000, 10_000), count)
    pairs = [f"The number of the {name} is {number}." for name, number in zip(names, numbers, strict=True)]
    others = [(pick.random(), pair) for pair in pairs[1:]]
    return Question(
        "Numbers are hidden in the text below. Remember them.",
        sorted([(depth, pairs[0]), *others]),
        f"What is the number of the {names[0]}?",
        f"The number of the {names[0]} is ",
        str(numbers[0]),
    )


def _copy(pick: random.Random, depth: float, length: int) -> Question:
    words = " ".join(pick.sample(_NOUNS, _COPIED))
    return Question(
        "A quotation is hidden in the text below. Remember it.",
        [(depth, f'The quotation is: "{words}".')],
        "What is the quotation?",
        'The quotation is: "',
        words,
    )


def _multivalue(pick: random.Random, depth: float, length: int) -> Question:
    """One key with several numbers: the first at the depth, each other one somewhere in its share of what follows."""
    name = f"{pick.choice(_ADJECTIVES)} {pick.choice(_NOUNS)}"
    numbers = pick.sample(range(1000, 10_000), _VALUES)
    shares = [0.0, *((n + pick.random()) / _VALUES for n in range(1, _VALUES))]
    return Question(
        "Numbers are hidden in the text below. Remember them.",
        [
            (depth + (1 - depth) * share, f"A number of the {name} is {n}.")
            for share, n in zip(shares, numbers, strict=True)
        ],
        f"What are all the numbers of the {name}, in the order in which they are in the text?",
        f"The numbers of the {name}, in order, are ",
        ", ".join(map(str, numbers)),
    )


def _facts(pick: random.Random, depth: float, length: int) -> Question:
    """A story whose first supporting sentence is at the depth; those before and after it lie anywhere on their side."""
    story = tell(pick)
    first = story.supporting[0]
    before = sorted(depth * pick.random() for _ in range(first))
    after = sorted(depth + (1 - depth) * pick.random() for _ in story.sentences[first + 1 :])
    return Question(
        "Sentences about people, and about things that they carry, are hidden in the text below. Remember them.",
        list(zip([*before, depth, *after], story.sentences, strict=True)),
        story.question,
        story.lead,
        story.answer,
    )


_QUESTIONS: dict[str, Callable[[random.Random, float, int], Question]] = {
    "passkey": _passkey,
    "recall": _recall,
    "copy": _copy,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "facts": _facts,
}


@torch.no_grad()
def measure(
    model: Any, items: Sequence[Item], batch_tokens: int, advance: Callable[[int], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each answer in nats per token, fp32 [N], and whether greedy decoding gives it, bool [N].

    Batches hold items of one length, at most `batch_tokens` tokens (one item at least), so nothing is padded.
    advance(items) is called after each batch.
    """
    log_probability, right = torch.zeros(len(items)), torch.zeros(len(items), dtype=torch.bool)
    for length in sorted({item.length for item in items}):
        same = torch.tensor([number for number, item in enumerate(items) if item.length == length])
        for batch in same.split(max(1, batch_tokens // length)):
            log_probability[batch], right[batch] = _answers(model, [items[number] for number in batch.tolist()])
            if advance is not None:
                advance(len(batch))
    return log_probability, right


def _answers(model: Any, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
    """Mean log-probability of each item's answer, and whether all of it is the first choice, [B] on the CPU."""
    ids = torch.stack([item.ids for item in items])
    hidden = model.base_model(input_ids=ids.to(entry_device(model)), use_cache=False).last_hidden_state
    row = torch.cat([torch.full((item.answer[1] - item.answer[0],), number) for number, item in enumerate(items)])
    place = torch.cat([torch.arange(*item.answer) for item in items])
    before = hidden[row.to(hidden.device), place.to(hidden.device) - 1]
    found, first = _tokens(model, before, ids[row, place])
    count = row.bincount().float()
    total = torch.zeros(len(items)).index_add_(0, row, found)
    return total / count, torch.zeros(len(items)).index_add_(0, row, first.float()) == count


@torch.no_grad()
def score_answer(model: Any, hidden: Tensor, answer: Tensor) -> tuple[float, bool]:
    """What `measure` says of one answer, int64 [T], whose tokens are predicted from hidden states [T, hidden].

    That is, of whatever read the item, the states after the final norm at answer[0] - 1 up to answer[1] - 2.
    """
    found, first = _tokens(model, hidden, answer)
    return found.mean().item(), bool(first.all())


def _tokens(model: Any, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability in fp32 of each wanted token [T], and whether it is the first choice, on the CPU."""
    found, first = [], []
    for some, target in zip(hidden.split(LOGIT_ROWS), wanted.split(LOGIT_ROWS), strict=True):
        logits = head_logits(model, some)
        target = target.to(logits.device)
        found.append(logits.log_softmax(-1).gather(-1, target[:, None])[:, 0].cpu())
        first.append((logits.argmax(-1) == target).cpu())
    return torch.cat(found), torch.cat(first)


def summary(items: Sequence[Item], log_probability: Tensor, right: Tensor) -> dict[str, Any]:
    """Accuracy and log-probability with 95 % confidence intervals, of each task: in all, by length, by depth, by both.

    {task: {"items", "accuracy", "accuracy_ci": [low, high], "log_probability", "log_probability_ci": [low, high] or
    None for a single item, "by_length": {"512": ...}, "by_depth": {"0.25": ...}, "cells": {"512": {"0.25": ...}}}}
    """
    rows = [
        (item, value, good) for item, value, good in zip(items, log_probability.tolist(), right.tolist(), strict=True)
    ]

    def of(task: str, length: int | None = None, depth: float | None = None) -> dict[str, Any]:
        chosen = [
            (value, good)
            for item, value, good in rows
            if item.task == task and length in (None, item.length) and depth in (None, item.depth)
        ]
        return _statistics([value for value, _ in chosen], sum(good for _, good in chosen))

    result: dict[str, Any] = {}
    for task in dict.fromkeys(item.task for item in items):
        made = sorted({(item.length, item.depth) for item in items if item.task == task})
        by_cell: dict[str, dict[str, Any]] = {}
        for length, depth in made:
            by_cell.setdefault(str(length), {})[f"{depth:g}"] = of(task, length, depth)
        result[task] = {
            **of(task),
            "by_length": {str(length): of(task, length) for length in sorted({length for length, _ in made})},
            "by_depth": {f"{depth:g}": of(task, depth=depth) for depth in sorted({depth for _, depth in made})},
            "cells": by_cell,
        }
    return result


def _statistics(values: Sequence[float], right: int) -> dict[str, Any]:
    count = len(values)
    mean = sum(values) / count
    error = sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count) if count > 1 else None
    return {
        "items": count,
        "accuracy": right / count,
        "accuracy_ci": wilson(right, count),
        "log_probability": mean,
        "log_probability_ci": None if error is None else [mean - _Z * error, mean + _Z * error],
    }


def wilson(right: int, count: int) -> list[float]:
    """The 95 % interval [low, high] of a share, `right` of `count`, by Wilson: it stays within 0 and 1."""
    share, square = right / count, _Z**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = _Z * sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return [max(0.0, middle - half), min(1.0, middle + half)]
