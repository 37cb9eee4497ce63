"""From what --data names to batches: sources mixed by weight, packed into rows, resumable at every batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from hybridize.builtin import BUILTIN
from hybridize.errors import CheckpointError, DataError, UsageError
from hybridize.priming.batches import Batch
from hybridize.priming.corpus import Document
from hybridize.priming.encoding import Encoder
from hybridize.priming.feeds import Feed, HubFeed, LocalFeed
from hybridize.priming.hub import HubDataset
from hybridize.priming.mixture import open_source_of_text, parse_mixture
from hybridize.priming.packing import Packer, Row
from hybridize.priming.reader import Reader

_POOL_ROWS = 32  # rows' worth of pieces that wait to be drawn, so that a long document's are not in succession
_FRUITLESS = 10_000  # documents in succession that give nothing before a source is called unusable


class TokenStream:
    """Batches of a mixture: documents are read from the source that is furthest behind its share of the tokens.

    Every rank of `world` makes all rows and keeps every world-th batch, so that together they read what one process
    would, in its order; a state is of all ranks alike, and may be loaded with another `world`. `counts` says how many
    documents and tokens were read, left out or dropped.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        names: Sequence[str],
        shares: Sequence[float],
        packer: Packer,
        *,
        batch_rows: int,
        rank: int,
        world: int,
        excluded: set[bytes],
        fingerprint: str,
        warn: Callable[[str], None],
    ):
        self.readers, self.names, self.shares = readers, names, shares
        self.packer, self.batch_rows = packer, batch_rows
        self.rank, self.world, self.excluded, self.warn = rank, world, excluded, warn
        self.fingerprint = fingerprint
        self.given = [0] * len(readers)  # tokens
        self.counts = {"documents": 0, "tokens": 0, "dropped_tokens": 0, "skipped_conversations": 0, "also_held_out": 0}
        self._warned = [False] * len(readers)
        self._fruitless = [0] * len(readers)  # documents since one that gave tokens
        self._before = [0] * len(readers)  # tokens given before the epoch
        self._fill()

    def batch(self) -> Batch:
        """This rank's next batch."""
        mine: list[Row] = []
        for number in range(self.world):
            rows = [self._row() for _ in range(self.batch_rows)]
            if number == self.rank:
                mine = rows
        return stack(mine)

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
            return (
                f"In no conversation of {name} can the assistant's tokens be told from the rest: it says nothing, or "
                "the chat template renders what was said before otherwise once more is said; give other conversations, "
                "or a template with {% generation %}."
            )
        if self.counts["also_held_out"]:
            return f"Every document of {name} is also held out; give other text with --held-out."
        if not self.packer.packed:
            return (
                f"No document is as long as one row of {self.packer.context} tokens in {name}; give longer text or a "
                "smaller --context."
            )
        return f"There is no text in {name}; give --data something to read."


def stack(rows: Sequence[Row]) -> Batch:
    """Rows as a batch."""
    ids, positions, targets = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    return Batch(ids, positions, targets)


def open_stream(
    spec: str,
    tokenizer: Any,
    *,
    context: int,
    batch_rows: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
    held_out: str | None = None,
    held_out_tokens: int = 32_768,
    tokens: int | None = None,
    vocabulary: int | None = None,
    text_field: str | None = None,
    boundary: int | Literal["eos"] | None = "eos",
    packed: bool = True,
    buffer: int = 1000,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[TokenStream, Batch]:
    """The training stream of `spec`, and held-out rows that share no document with it.

    spec: a text, JSONL, Parquet or pre-tokenised file, a folder of them, a dataset `owner/name[:config[:split]]` of the
    Hub, "builtin", or several with weights by tokens: `texts/=2,owner/name=1,chat.jsonl=0.5`. Conversations are
    rendered with the tokenizer's chat template, and only what the assistant says is a target.
    context: tokens a row; batch_rows: rows of one rank's batch; tokens: the run's budget, if it is to be checked.
    held_out: another spec to measure on; without it one document in 20 is held out, by its name. held_out_tokens: the
    size of the held-out rows, int64 [N, context] in a Batch, at most; they are the same for every seed.
    vocabulary: the number of ids that the model knows, if not the tokenizer's length. boundary: the id that ends a
    document in pre-tokenised files, "eos" for the tokenizer's, None where the whole file is one.
    packed: several documents a row; otherwise a row is of one document, and a text's last partial row is dropped.
    buffer: documents of a streamed dataset that are shuffled together. warn: told once per source that is read again.

    Raises UsageError and DataError before anything is trained: data that are missing, empty, not UTF-8 or out of the
    vocabulary, a missing library, conversations without a template, a budget below one batch.
    """
    for name, value in (("context", context), ("batch-size", batch_rows), ("held-out-tokens", held_out_tokens)):
        if value < 1:
            raise UsageError(f"--{name} is {value}; it must be at least 1.")
    if context < 2:
        raise UsageError("--context is 1; a row needs at least 2 tokens, of which the second is predicted.")
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank} of {world}")
    if tokens is not None and tokens < batch_rows * context * world:
        raise UsageError(
            f"--tokens {tokens} is less than one step of {batch_rows * world} rows of {context} tokens; give more "
            "tokens, or smaller steps."
        )
    size = vocabulary or len(tokenizer)
    end = tokenizer.eos_token_id if boundary == "eos" else boundary
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None and i < size), 0)
    encoder = Encoder(tokenizer, size)

    def feeds(spec: str, split: bool, side: Literal["train", "held-out"]) -> tuple[list[Feed], list[str], list[float]]:
        parts = parse_mixture(spec)
        made: list[Feed] = []
        for number, part in enumerate(parts):
            opened = open_source_of_text(part.name, size, end, text_field, side)
            numbers = [seed, number]
            mine = split and part.name != BUILTIN
            if isinstance(opened, HubDataset):
                if opened.chat:
                    encoder.check_chat(part.name)
                made.append(HubFeed(opened, context, numbers, mine, buffer))
            else:
                if any((corpus.lengths == 0).any() for corpus in opened):
                    encoder.check_chat(part.name)
                made.append(LocalFeed(opened, part.name, context, numbers, mine))
        total = sum(part.weight for part in parts)
        return made, [part.name for part in parts], [part.weight / total for part in parts]

    train, names, shares = feeds(spec, held_out is None, "train")
    if held_out is None:
        # The built-in text has a held-out part of its own.
        beside = [
            feeds(BUILTIN, False, "held-out")[0][0].everything() if n == BUILTIN else f.held_out()
            for f, n in zip(train, names, strict=True)
        ]
        weights = shares
    else:
        others, _, weights = feeds(held_out, False, "held-out")
        beside = [feed.everything() for feed in others]
    rows, excluded = held_out_rows(beside, weights, encoder, context, pad, packed, held_out_tokens)
    options = {"context": context, "batch": batch_rows, "packed": packed, "seed": seed, "shares": shares, "size": size}
    prints = [*(feed.fingerprint for feed in train), *(digest.hex() for digest in sorted(excluded))]
    stream = TokenStream(
        [Reader(feed, encoder, context) for feed in train],
        names,
        shares,
        Packer(context, pad, packed, seed),
        batch_rows=batch_rows,
        rank=rank,
        world=world,
        excluded=excluded,
        fingerprint=hashlib.sha256(json.dumps([options, buffer, prints]).encode()).hexdigest()[:16],
        warn=warn,
    )
    return stream, rows


def held_out_rows(
    sources: Sequence[Iterator[Document]],
    shares: Sequence[float],
    encoder: Encoder,
    context: int,
    pad: int,
    packed: bool,
    tokens: int,
) -> tuple[Batch, set[bytes]]:
    """At most `tokens` tokens in rows, of each source its share and at least one row, and the documents' digests."""
    rows: list[Row] = []
    digests: set[bytes] = set()
    for documents, share in zip(sources, shares, strict=True):
        packer = Packer(context, pad, packed, seed=0)
        count = max(1, int(tokens / context * share))
        for document in documents:
            digests.add(document.digest())
            if encoded := encoder.encode([document])[0]:
                packer.add(*encoded)
            if packer.tokens >= count * context:
                break
        mine = [packer.row() for _ in range(count) if packer.ready()]
        if not mine and packer.pieces:
            mine = [packer.row()]  # too little for a whole row: the rest is padding
        rows += mine
        if not mine:
            raise DataError(
                f"No held-out document gives one row of {context} tokens; give longer text, a smaller --context, or "
                "other text with --held-out."
            )
    return stack(rows), digests
