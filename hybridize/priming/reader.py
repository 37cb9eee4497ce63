"""Documents of one source as tokens, tokenised a few rows ahead so that all cores take part."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from hybridize.priming.corpus import Content, Document
from hybridize.priming.encoding import Encoded, Encoder
from hybridize.priming.feeds import Feed

_AHEAD_ROWS = 16  # rows' worth of documents that are tokenised together


@dataclass(frozen=True)
class Read:
    """A document's digest, its tokens (None where it cannot be learnt from), and the feed's place behind it.

    opens: whether it is the first of a further epoch.
    """

    digest: bytes
    encoded: Encoded | None
    place: dict[str, Any]
    opens: bool


class Reader:
    """A feed, read ahead; its state is that of the documents handed out."""

    def __init__(self, feed: Feed, encoder: Encoder, context: int):
        self.feed, self.encoder = feed, encoder
        self.enough = 4 * _AHEAD_ROWS * context  # characters
        self.load_state(feed.state())

    def peek(self) -> Read:
        """The next document, which stays the next."""
        if not self.queue:
            self._read_ahead()
        return self.queue[0]

    def next(self) -> Read:
        """The next document."""
        self.peek()
        read = self.queue.popleft()
        self.place = read.place
        return read

    def _read_ahead(self) -> None:
        documents: list[Document] = []
        rest: list[tuple[dict[str, Any], bool]] = []
        size = 0
        while size < self.enough:
            opens = self.feed.at_end()
            if opens and documents:
                break
            document = self.feed.next()
            documents.append(document)
            rest.append((self.feed.state(), opens))
            content = document.content
            size += _characters(content)
        encoded = self.encoder.encode(documents)
        for document, tokens, (place, opens) in zip(documents, encoded, rest, strict=True):
            self.queue.append(Read(document.digest(), tokens, place, opens))

    def state(self) -> dict[str, Any]:
        """The feed's place behind the last document handed out."""
        return self.place

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a saved place."""
        self.place = state
        self.queue: deque[Read] = deque()
        self.feed.load_state(state)


def _characters(content: Content) -> int:
    """About how many characters of text a document is worth; no less than 100, so that few are read ahead."""
    if isinstance(content, list):
        return 1000
    return max(100, len(content) * (1 if isinstance(content, str) else 4))
