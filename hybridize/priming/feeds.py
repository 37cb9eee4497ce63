"""The order in which documents are read: shuffled, without end, held-out ones left out, from any saved position."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from hybridize.errors import DataError
from hybridize.priming.corpus import Corpus, Document, section
from hybridize.priming.hub import HubDataset

SECTION_ROWS = 4  # a longer document is read in sections of about so many rows, so that it does not fill a whole batch
_SHARE = 20  # one document in so many is held out


class Feed(Protocol):
    """Training documents without end, and the held-out ones beside them."""

    fingerprint: str
    epoch: int

    def held_out(self) -> Iterator[Document]:
        """Documents that the feed never gives, in a fixed order that is the same for every seed."""

    def everything(self) -> Iterator[Document]:
        """All documents, in a fixed order: what is held out when nothing else is in the feed."""

    def at_end(self) -> bool:
        """Whether the next document begins a new epoch."""

    def next(self) -> Document:
        """The next document or section."""

    def state(self) -> dict[str, Any]:
        """The position, in JSON's types."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""


class LocalFeed:
    """Sections of local documents, all of them shuffled anew in every epoch."""

    def __init__(self, corpora: Sequence[Corpus], where: str, context: int, seed: Sequence[int], split: bool):
        self.corpora, self.where, self.seed = corpora, where, list(seed)
        tables = [_sections(number, corpus, context) for number, corpus in enumerate(corpora)]
        self.table = np.concatenate(tables)  # rows of corpus, document, start, stop
        held = np.empty((0, 4), dtype=np.int64)
        if split:
            self.table, held = self._split()
        if not len(self.table):
            raise DataError(f"There is too little text in {where} to hold some of it out; give more, or --held-out.")
        self._held = held
        self.fingerprint = hashlib.sha256("".join(corpus.fingerprint for corpus in corpora).encode()).hexdigest()
        self.load_state({"epoch": 0, "position": 0})

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """The table without and with the held-out documents.

        Where no name, or every name, says so: those whose names have the least hashes; of few documents, the end of the
        longest.
        """
        titles = [[corpus.title(index) for index in range(len(corpus.lengths))] for corpus in self.corpora]
        held = np.array([is_held_out(titles[row[0]][row[1]]) for row in self.table], dtype=bool)
        if held.any() and not held.all():
            return self.table[~held], self.table[held]
        hashes = {hashlib.sha256(title.encode()).digest() for mine in titles for title in mine}
        sizes = self.table[:, 3] - self.table[:, 2]
        if len(hashes) >= _SHARE or not sizes.any():
            if len(hashes) < 2:
                raise DataError(
                    f"{self.where} holds a single conversation, of which nothing can be held out; give more, or "
                    "--held-out."
                )
            least = sorted(hashes)[max(1, len(hashes) // _SHARE) - 1]
            held = np.array([hashlib.sha256(titles[n][i].encode()).digest() <= least for n, i, _, _ in self.table])
            return self.table[~held], self.table[held]
        longest = max((c.lengths.max(), n, c.lengths.argmax()) for n, c in enumerate(self.corpora))
        length, number, index = (int(value) for value in longest)
        cut = length - max(1, length // _SHARE)
        train, held_rows = self.table.copy(), self.table.copy()
        one = (self.table[:, 0] == number) & (self.table[:, 1] == index)
        train[one, 3] = train[one, 3].clip(max=cut)
        held_rows[:, 2] = held_rows[:, 2].clip(min=cut)
        alone = sizes == 0
        return train[alone | (train[:, 2] < train[:, 3])], held_rows[one & (held_rows[:, 2] < held_rows[:, 3])]

    def held_out(self) -> Iterator[Document]:
        for row in self._held[np.random.default_rng(0).permutation(len(self._held))]:
            yield self._read(row)

    def everything(self) -> Iterator[Document]:
        for row in self.table[np.random.default_rng(0).permutation(len(self.table))]:
            yield self._read(row)

    def _read(self, row: np.ndarray) -> Document:
        number, index, start, stop = (int(value) for value in row)
        corpus = self.corpora[number]
        return Document(corpus.title(index), corpus.read(index, start, stop))

    def at_end(self) -> bool:
        return self.position == len(self.table)

    def next(self) -> Document:
        if self.at_end():
            self.load_state({"epoch": self.epoch + 1, "position": 0})
        self.position += 1
        return self._read(self.table[self.order[self.position - 1]])

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.order = np.random.default_rng([*self.seed, self.epoch]).permutation(len(self.table))


class HubFeed:
    """Documents of a streamed dataset, shuffled within blocks of `buffer`; a block is read again on resuming.

    So the saved position is that of the dataset at the block's beginning, and a place in the block.
    """

    def __init__(self, dataset: HubDataset, context: int, seed: Sequence[int], split: bool, buffer: int):
        self.dataset, self.seed, self.buffer = dataset, list(seed), buffer
        self.size = SECTION_ROWS * context
        self.fingerprint = dataset.fingerprint
        self._split = split
        self._held: int | None = None  # the one document that is held out where none is by its name
        if split:
            self._held = self._only_held()
        self._go({"epoch": 0, "number": 0, "dataset": None, "position": 0})

    def _only_held(self) -> int | None:
        """The document to hold out in a dataset so short that no name in it says so."""
        names = []
        for number, _ in zip(range(20 * _SHARE), self.dataset.documents(), strict=False):
            names.append(self._name(number))
            if is_held_out(names[-1]) and number:
                return None
        if len(names) < 2:
            raise DataError(
                f"{self.dataset.name} has {len(names)} document(s), of which nothing can be held out; give --held-out."
            )
        return len(names) - 1

    def _name(self, number: int) -> str:
        return f"{self.dataset.name}:{number}"

    def _is_held(self, number: int) -> bool:
        if not self._split:
            return False
        return number == self._held if self._held is not None else is_held_out(self._name(number))

    def held_out(self) -> Iterator[Document]:
        for number, content in enumerate(self.dataset.documents()):
            if self._is_held(number):
                yield from self._cut(Document(self._name(number), content))

    def everything(self) -> Iterator[Document]:
        for number, content in enumerate(self.dataset.documents()):
            yield from self._cut(Document(self._name(number), content))

    def _cut(self, document: Document) -> Iterator[Document]:
        text = document.content
        if not isinstance(text, str):
            yield document
            return
        step = 4 * self.size  # characters
        for start in range(0, len(text), step):
            yield Document(document.name, section(text, start, min(start + step, len(text))))

    def _read_block(self) -> None:
        """Take the block that begins where the dataset stands; empty at its end."""
        self.start = self.reading.position() if self.number else None, self.number
        block: list[Document] = []
        for content in self.reading:
            if not self._is_held(self.number):
                block += self._cut(Document(self._name(self.number), content))
            self.number += 1
            if self.number - self.start[1] == self.buffer:
                break
        order = np.random.default_rng([*self.seed, self.epoch, self.start[1]]).permutation(len(block))
        self.block = [block[at] for at in order]
        self.position = 0

    def at_end(self) -> bool:
        while self.position == len(self.block):
            before = self.number
            self._read_block()
            if self.number == before:
                return True
        return False

    def next(self) -> Document:
        if self.at_end():
            self._go({"epoch": self.epoch + 1, "number": 0, "dataset": None, "position": 0})
            if self.at_end():
                raise DataError(f"{self.dataset.name} holds no documents to train on; check the split's name.")
        self.position += 1
        return self.block[self.position - 1]

    def state(self) -> dict[str, Any]:
        position, number = self.start
        return {"epoch": self.epoch, "number": number, "dataset": position, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        self._go(state)

    def _go(self, state: dict[str, Any]) -> None:
        self.epoch, self.number = state["epoch"], state["number"]
        self.reading = self.dataset.read(state["dataset"])
        self._read_block()
        self.position = state["position"]


def is_held_out(name: str) -> bool:
    """Whether the document of that name is one of those that are held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _SHARE == 0


def _sections(number: int, corpus: Corpus, context: int) -> np.ndarray:
    """Rows of (corpus, document, start, stop), int64 [N, 4]: each document in sections of SECTION_ROWS rows."""
    size = SECTION_ROWS * context * corpus.per_token
    counts = np.maximum(1, -(-corpus.lengths // size))
    document = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    stop = np.minimum(start + size, corpus.lengths[document])
    return np.stack([np.full_like(document, number), document, start, stop], axis=1).astype(np.int64)
