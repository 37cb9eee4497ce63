"""Documents as token ids, checked, with the tokens that are to be predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hybridize.errors import DataError
from hybridize.priming.chat import ChatFormat
from hybridize.priming.corpus import Document

Encoded = tuple[np.ndarray, np.ndarray, bool]  # ids int64 [N], targets bool [N], whether it is a conversation


class Encoder:
    """A tokenizer, its chat template, and the number of ids that the model knows."""

    def __init__(self, tokenizer: Any, vocabulary: int):
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._chat: ChatFormat | None = None

    def check_chat(self, data: str) -> ChatFormat:
        """The chat format; DataError, naming the data that need it, where the tokenizer has none."""
        if self._chat is None:
            self._chat = ChatFormat(self.tokenizer, data)
        return self._chat

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """Ids and targets of documents; None for a conversation that cannot be learnt from."""
        texts = [document.content for document in documents if isinstance(document.content, str)]
        # All together, because the tokenizer then works on several at once.
        out = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        tokens = iter(out)
        return [self._encoded(document, tokens) for document in documents]

    def _encoded(self, document: Document, tokens: Iterator[list[int]]) -> Encoded | None:
        content = document.content
        if isinstance(content, np.ndarray):
            return content, np.ones(len(content), dtype=bool), False  # checked when its file was opened
        if isinstance(content, str):
            ids = np.asarray(next(tokens), dtype=np.int64)
            said = np.ones(len(ids), dtype=bool)
        else:
            rendered = self.check_chat(document.name).render(content)
            if rendered is None:
                return None
            ids, said = rendered
        if len(ids) and ids.max() >= self.vocabulary:
            at = int(np.argmax(ids >= self.vocabulary))
            raise DataError(
                f"The tokenizer gives the id {ids[at]} for token {at} of {document.name}, but the model has ids from 0 "
                f"to {self.vocabulary - 1}; use the tokenizer that the model was made with."
            )
        return ids, said, not isinstance(content, str)
