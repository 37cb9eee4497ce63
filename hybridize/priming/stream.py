"""From what --data names to batches: sources mixed by weight, packed into rows, resumable at every batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from hybridize.builtin import BUILTIN
from hybridize.errors import CheckpointError, DataError
from hybridize.priming.batches import Batch
from hybridize.priming.corpus import Document
from hybridize.priming.encoding import Encoder
from hybridize.priming.feeds import Feed, HubFeed, LocalFeed
from hybridize.priming.hub import HubDataset
from hybridize.priming.mixture import open_source_of_text, parse_mixture
from hybridize.priming.packing import Packer, Row
from hybridize.priming.reader import Reader

_POOL_ROWS = 32  # rows' worth of pieces that wait to be drawn, so that a long document's are not in succession
_NOT_LEARNT = (
    "In no conversation of {name} can the assistant's tokens be told from the rest: it says nothing, or the chat "
    "template renders what was said before otherwise once more is said; give other conversations, or a template with "
    "{{% generation %}}."
)
_FRUITLESS = 10_000  # documents in succession that give nothing before a source is called unusable


class TokenStream:
    """Batches of a mixture: documents are read from the source that is furthest behind its share of the tokens.

    `counts` says how many documents and tokens were read, left out or dropped.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        names: Sequence[str],
        shares: Sequence[float],
        packer: Packer,
        *,
        batch_rows: int,
        excluded: set[bytes],
        fingerprint: str,
        warn: Callable[[str], None],
    ):
        self.readers, self.names, self.shares = readers, names, shares
        self.packer, self.batch_rows = packer, batch_rows
        self.excluded, self.fingerprint, self.warn = excluded, fingerprint, warn
        self.given = [0] * len(readers)  # tokens
        self.counts = {"documents": 0, "tokens": 0, "dropped_tokens": 0, "skipped_conversations": 0, "also_held_out": 0}
        self._warned = [False] * len(readers)
        self._fruitless = [0] * len(readers)  # documents since one that gave tokens
        self._before = [0] * len(readers)  # tokens given before the epoch
        self._fill()

    def batch(self) -> Batch:
        """The next batch."""
        return stack([self._row() for _ in range(self.batch_rows)])

    def state(self) -> dict[str, Any]:
        """The exact position: JSON values and tensors, at most about _POOL_ROWS rows of them."""
        return {
            "fingerprint": self.fingerprint,
            "places": [reader.state() for reader in self.readers],
            "given": list(self.given),
            "warned": list(self._warned),
            "counts": dict(self.counts),
            "packer": self.packer.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position; CheckpointError where the data, or how they are packed, are not the same."""
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"The text of {', '.join(self.names)} (or how it is read) has changed since the run was begun; start "
                "the run without --resume."
            )
        for reader, saved in zip(self.readers, state["places"], strict=True):
            reader.load_state(saved)
        self.given, self.counts, self._warned = list(state["given"]), dict(state["counts"]), list(state["warned"])
        self._fruitless, self._before = [0] * len(self.readers), [-1] * len(self.readers)
        self.packer.load_state(state["packer"])

    def _row(self) -> Row:
        self._fill()
        return self.packer.row()

    def _fill(self) -> None:
        """Read until enough pieces wait; into a second epoch only where there would be no row without it."""
        while self.packer.tokens < _POOL_ROWS * self.packer.context:
            at = min(range(len(self.readers)), key=lambda i: self.given[i] / self.shares[i])
            if self.readers[at].peek().opens:
                if not self._warned[at]:
                    if self.packer.ready():
                        return
                    self._warned[at] = True
                    self.warn(f"All of {self.names[at]} ({self.given[at]:,} tokens) has been read: it is read again.")
                if self._before[at] == self.given[at]:
                    raise DataError(self._why_nothing(self.names[at]))
                self._before[at] = self.given[at]
            self._take(at)

    def _take(self, at: int) -> None:
        """Put one document of a source into the pool; DataError where the source has long had nothing to give."""
        read = self.readers[at].next()
        kept = 0
        if read.digest in self.excluded:
            self.counts["also_held_out"] += 1
        elif read.encoded is None:
            self.counts["skipped_conversations"] += 1
        else:
            kept, dropped = self.packer.add(*read.encoded)
            self.counts["documents"] += 1
            self.counts["tokens"] += kept
            self.counts["dropped_tokens"] += dropped
            self.given[at] += kept
        self._fruitless[at] = 0 if kept else self._fruitless[at] + 1
        if self._fruitless[at] == _FRUITLESS:
            raise DataError(self._why_nothing(self.names[at]))

    def _why_nothing(self, name: str) -> str:
        if self.counts["skipped_conversations"]:
            return _NOT_LEARNT.format(name=name)
        if self.counts["also_held_out"]:
            return f"Every document of {name} is also held out; give other text with --held-out."
        return f"There is no text in {name}; give --data something to read."


@dataclass(frozen=True)
class HeldOut:
    """Rows to measure on, which share no document with the training stream.

    stated: what results are stated on; choosing: other rows, on which one of several results may be chosen, or None
    where there is only one row to hold out.
    """

    stated: Batch
    choosing: Batch | None


def stack(rows: Sequence[Row]) -> Batch:
    """Rows as a batch."""
    ids, positions, targets = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    return Batch(ids, positions, targets)


def open_stream(
    data: Sequence[str],
    tokenizer: Any,
    *,
    vocabulary: int,
    context: int,
    batch_rows: int,
    seed: int,
    held_out: str | None = None,
    held_out_tokens: int = 32_768,
    text_field: str | None = None,
    buffer: int = 1000,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[TokenStream, HeldOut]:
    """The training stream of `data`, and held-out rows that share no document with it.

    data: names, each with a weight by tokens behind `=` unless that is 1: text, JSONL, Parquet or pre-tokenised files,
    folders of them, datasets `owner/name[:config[:split]]` of the Hub, "builtin". Conversations are rendered with the
    tokenizer's chat template, and only what the assistant says is a target.
    vocabulary: the number of ids that the model knows; context: tokens a row; batch_rows: rows a batch.
    held_out: what to measure on; without it one document in 20 is held out, by its name. held_out_tokens: how many
    results are stated on, at most; a quarter as many to choose on come on top. They are the same for every seed.
    buffer: documents of a streamed dataset that are shuffled together. warn: told once per source that is read again.

    Raises UsageError and DataError before anything is trained: data that are missing, empty, not UTF-8 or out of the
    vocabulary, a missing library, conversations without a template.
    """
    ends = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad = next((number for number in ends if number is not None and number < vocabulary), 0)
    encoder = Encoder(tokenizer, vocabulary)

    def feed(name: str, number: int, split: bool, side: Literal["train", "held-out"]) -> Feed:
        opened = open_source_of_text(name, vocabulary, tokenizer.eos_token_id, text_field, side)
        if isinstance(opened, HubDataset):
            if opened.chat:
                encoder.check_chat(name)
            return HubFeed(opened, context, [seed, number], split, buffer)
        if any((corpus.lengths == 0).any() for corpus in opened):
            encoder.check_chat(name)
        return LocalFeed(opened, name, context, [seed, number], split)

    parts = parse_mixture(data)
    names = [part.name for part in parts]
    shares = [part.weight / sum(part.weight for part in parts) for part in parts]
    # The built-in text has a held-out part of its own.
    split = [held_out is None and name != BUILTIN for name in names]
    train = [feed(name, number, split[number], "train") for number, name in enumerate(names)]
    if held_out is None:
        sources = [
            mine.held_out() if split[number] else feed(BUILTIN, number, False, "held-out").everything()
            for number, mine in enumerate(train)
        ]
        measured = [
            held_out_rows(source, name, encoder, context, pad, held_out_tokens * share)
            for source, name, share in zip(sources, names, shares, strict=True)
        ]
    else:
        other = feed(held_out, 0, False, "held-out")
        measured = [held_out_rows(other.everything(), held_out, encoder, context, pad, held_out_tokens)]
    excluded = {digest for _, _, digests in measured for digest in digests}
    options = {"context": context, "batch": batch_rows, "seed": seed, "shares": shares, "size": vocabulary}
    prints = [*(feed.fingerprint for feed in train), *(digest.hex() for digest in sorted(excluded))]
    stream = TokenStream(
        [Reader(feed, encoder, context) for feed in train],
        names,
        shares,
        Packer(context, pad, seed),
        batch_rows=batch_rows,
        excluded=excluded,
        fingerprint=hashlib.sha256(json.dumps([options, buffer, prints]).encode()).hexdigest()[:16],
        warn=warn,
    )
    stated = [row for rows, _, _ in measured for row in rows]
    choosing = [row for _, rows, _ in measured for row in rows]
    return stream, HeldOut(stack(stated), stack(choosing) if choosing else None)


def held_out_rows(
    documents: Iterator[Document], name: str, encoder: Encoder, context: int, pad: int, tokens: float
) -> tuple[list[Row], list[Row], set[bytes]]:
    """Rows of at most `tokens` tokens of a source, yet at least one; a quarter as many more; the documents' digests."""
    packer = Packer(context, pad, seed=0)
    digests: set[bytes] = set()
    skipped = 0
    count = max(1, int(tokens / context))
    more = max(1, count // 4)
    for document in documents:
        digests.add(document.digest())
        encoded = encoder.encode([document])[0]
        if encoded is None:
            skipped += 1
        else:
            packer.add(*encoded)
        if packer.tokens >= (count + more) * context:
            break
    rows: list[Row] = []
    while packer.pieces and len(rows) < count + more:
        rows.append(packer.row())  # with padding, where it is the last of little text
    if not any(targets.any() for _, _, targets in rows):
        if skipped:
            raise DataError(_NOT_LEARNT.format(name=name))
        raise DataError(
            f"What is held out of {name} has no token to predict in rows of {context} tokens; give more text, or other "
            "text with --held-out."
        )
    stated = min(count, max(1, len(rows) - max(1, len(rows) // 5)))
    return rows[:stated], rows[stated:], digests
