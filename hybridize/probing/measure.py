"""What a probe measures on a loaded model: text and retrieval items made into batches, and each layer's results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridize.builtin import BUILTIN, builtin_text
from hybridize.errors import DataError
from hybridize.probing.fitted import FIT_TOKENS
from hybridize.probing.hankel import HankelOptions, hankel_sweep
from hybridize.probing.options import MIXER, ProbeOptions
from hybridize.probing.swa_proxy import Change, Effects, Sweep
from hybridize.probing.windowed import without_masks
from hybridize.tasks.retrieval import DEPTHS, TASKS, Item, make_items
from hybridize.tasks.scored import SCORED_PER_ROW, Scored, score_answers, score_text
from hybridize.tasks.text import Document, first_rows, read_documents

HANKEL_ROWS = 2  # of text; its statistics hardly differ between rows
Record = dict[str, Any]  # one layer's results: {"layer": 3, "swa": {...}} or a part of them
_ANSWER = 8  # scored tokens of a retrieval item, about


@dataclass(frozen=True)
class Amount:
    """How much is read: tokens of text and of retrieval items, positions of both that are scored, tokens for mixers."""

    text: int
    answers: int
    scored: int
    mixers: int

    @staticmethod
    def expected(options: ProbeOptions) -> Amount:
        """As much as is asked for, if there is as much text."""
        rows = options.sequences if options.reads_text else 0
        swept = rows if {"swa", MIXER} & set(options.methods) else 0
        items = len(TASKS) * DEPTHS * options.items if "retrieval" in options.methods else 0
        scored = swept * min(SCORED_PER_ROW, options.context // 2) + items * len(options.lengths) * _ANSWER
        return Amount(
            rows * options.context, items * sum(options.lengths), scored, mixer_rows(options) * options.context
        )


@dataclass(frozen=True)
class Prepared:
    """What is measured on, as tokens: rows [N, context] by group, rows for mixers, items, and all in batches."""

    rows: dict[str, Tensor]
    fit: Tensor | None
    items: list[Item]
    batches: list[Scored]

    @property
    def amount(self) -> Amount:
        text = sum(rows.numel() for rows in self.rows.values())
        scored = sum(int(batch.targets.sum()) for batch in self.batches)
        mixers = 0 if self.fit is None else self.fit.numel()
        return Amount(text, sum(len(item.ids) for item in self.items), scored, mixers)

    @property
    def fingerprint(self) -> str:
        """Of every token that is measured on, so that a resumed probe cannot mix two texts.

        Batches may be of any size.
        """
        digest = hashlib.sha256()
        scored = [row for batch in self.batches for pair in zip(batch.ids, batch.targets, strict=True) for row in pair]
        more = [*self.rows.values(), *([] if self.fit is None else [self.fit])]
        for row in [*scored, *(row for part in more for row in part)]:
            digest.update(str(len(row)).encode() + row.numpy().tobytes())
        return digest.hexdigest()[:16]


def prepare(options: ProbeOptions, tokenizer: Any, texts: Sequence[str] | None, batch_tokens: int) -> Prepared:
    """Read and tokenise all that is measured on; DataError for too little or unreadable text."""
    groups = text_of(options, texts)
    rows = rows_of(groups, tokenizer, options) if options.reads_text else {}
    batches = text_batches(rows, batch_tokens) if {"swa", MIXER} & set(options.methods) else []
    fit = fit_rows(groups, tokenizer, options) if MIXER in options.methods else None
    items: list[Item] = []
    if "retrieval" in options.methods:
        filler = [text for documents in groups.values() for _, text in documents]
        items = make_items(tokenizer, filler, lengths=options.lengths, per_cell=options.items, seed=options.seed)
        batches += score_answers(items, batch_tokens)
    return Prepared(rows, fit, items, batches)


def text_of(options: ProbeOptions, texts: Sequence[str] | None) -> dict[str, list[Document]]:
    """Documents by group: the given texts, the built-in held-out prose and code, or those of options.data."""
    if texts is not None:
        return {"text": [(f"text {number}", text) for number, text in enumerate(texts)]}
    groups: dict[str, list[Document]] = {}
    if options.data == BUILTIN:
        for document in builtin_text("held-out"):
            groups.setdefault(document.kind, []).append((document.name, document.text))
        return groups
    for name, text in read_documents(Path(options.data)):
        groups.setdefault("code" if name.endswith(".py") else "prose", []).append((name, text))
    return groups


def rows_of(groups: dict[str, list[Document]], tokenizer: Any, options: ProbeOptions) -> dict[str, Tensor]:
    """Rows of token ids [N, context] by group, options.sequences in all and as equal as the groups allow.

    DataError where no document is as long as a row.
    """
    return _rows(groups, tokenizer, options, options.sequences)


def fit_rows(groups: dict[str, list[Document]], tokenizer: Any, options: ProbeOptions) -> Tensor:
    """Rows of token ids [N, context] to fit and align mixers on, in random order: `mixer_rows`, or all there are.

    None of them are among `rows_of`. DataError where there are none.
    """
    extra = mixer_rows(options)
    measured = rows_of(groups, tokenizer, options)
    # The first rows stay the same when more are asked for; where one group has too few, the others make up for it.
    more = _rows(groups, tokenizer, options, options.sequences + extra * len(groups))
    left = torch.cat([rows[len(measured.get(group, ())) :] for group, rows in more.items()])
    rows = left[torch.randperm(len(left), generator=torch.Generator().manual_seed(options.seed))][:extra]
    if not len(rows):
        raise DataError(
            f"--method mixer fits mixers on other text than it measures on, and {options.sequences} rows of "
            f"{options.context} tokens take all there is; give more --data, or smaller --sequences or --context."
        )
    return rows


def mixer_rows(options: ProbeOptions) -> int:
    """Rows to fit mixers on, and then to align them on."""
    return max(1, max(FIT_TOKENS, options.align) // options.context) if MIXER in options.methods else 0


def _rows(
    groups: dict[str, list[Document]], tokenizer: Any, options: ProbeOptions, sequences: int
) -> dict[str, Tensor]:
    rows: dict[str, Tensor] = {}
    failure: DataError | None = None
    for number, (group, documents) in enumerate(groups.items()):
        count = (sequences + number) // len(groups)
        try:
            rows |= {group: first_rows(documents, tokenizer, options.context, count)} if count else {}
        except DataError as error:  # another group may have longer documents
            failure = error
    if not rows:
        raise failure or DataError("There is no text to measure on; give --data something to read.")
    return rows


def text_batches(rows: dict[str, Tensor], batch_tokens: int) -> list[Scored]:
    return [batch for group, ids in rows.items() for batch in score_text(ids, group, batch_tokens)]


def swept_layers(
    sweep: Sweep, changes: dict[str, Change], methods: Collection[str], tasks: Sequence[str], done: set[int]
) -> Iterator[Record]:
    """Each layer's effects under every change, a window or a mixer, apart for text and for the retrieval `tasks`."""
    for layer, by_change in sweep.run(changes, skip=done):
        record: Record = {"layer": layer}
        for change, effects in by_change.items():
            text = {group: _text(effect) for group, effect in effects.items() if group not in tasks}
            answers = {group: effect for group, effect in effects.items() if group in tasks}
            if text and change == MIXER:
                record[MIXER] = {**_mean(text, ("loss", "kl")), "groups": text}
            elif text and "swa" in methods:
                record.setdefault("swa", {})[change] = {**_mean(text, ("loss", "kl")), "groups": text}
            if answers:
                found = {task: _answer(effect, sweep.base[task]) for task, effect in answers.items()}
                means = _mean(found, ("loss", "kl", "log_probability", "accuracy"))
                record.setdefault("retrieval", {})[change] = {**means, "tasks": found}
        yield record


def _text(effect: dict[str, float]) -> dict[str, float]:
    """Whether a whole row of text is predicted right says nothing."""
    return {name: effect[name] for name in ("loss", "kl", "tokens")}


def _answer(effect: dict[str, float], base: dict[str, float]) -> dict[str, float]:
    """With the answer's log-probability in nats per token beside how much it fell."""
    return {**effect, "log_probability": -base["loss"] - effect["loss"]}


def _mean(effects: Effects, names: Sequence[str]) -> dict[str, float]:
    """Means over groups, which count alike however many tokens they have."""
    return {name: sum(effect[name] for effect in effects.values()) / len(effects) for name in names}


def measured_hankel(
    model: Any,
    rows: dict[str, Tensor],
    options: ProbeOptions,
    layers: Sequence[int],
    done: Callable[[Record], None],
    advance: Callable[[int], None],
) -> None:
    """Hankel statistics of the given layers on a few rows of every group; done(record) is called after each layer."""
    every = torch.cat(list(rows.values()))
    some = every[torch.arange(min(HANKEL_ROWS, len(every))) * len(every) // min(HANKEL_ROWS, len(every))]
    settings = HankelOptions(sinks=options.sinks, window=options.windows[0], seed=options.seed)
    with without_masks(model.base_model):
        hankel_sweep(
            model,
            some,
            settings,
            layers=layers,
            advance=advance,
            done=lambda layer, result: done({"layer": layer, "hankel": result}),
        )
