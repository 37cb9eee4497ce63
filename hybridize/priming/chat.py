"""Conversations in the model's own format, and which of their tokens the assistant has said.

A template that marks what the assistant says with {% generation %} is believed. For others, the conversation up to each
assistant turn is rendered with the header that asks for an answer: where that ends, in the whole conversation, the turn
begins; it ends with its end-of-turn token.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from hybridize.errors import DataError

Messages = list[dict[str, Any]]
Rendered = tuple[np.ndarray, np.ndarray]  # ids int64 [N], and bool [N]: true where the assistant speaks
_MARKED = re.compile(r"\{%-?\+?\s*generation\b")


class ChatFormat:
    """The chat template of a tokenizer; DataError where it has none."""

    def __init__(self, tokenizer: Any, data: str):
        try:
            template = tokenizer.get_chat_template()
        except (ValueError, AttributeError):
            raise DataError(
                f"{data} holds conversations, but the model's tokenizer has no chat template; use an instruct "
                "model, or data with plain text."
            ) from None
        self.tokenizer = tokenizer
        self.marked = bool(_MARKED.search(template)) and tokenizer.is_fast
        # all_special_ids are the named ones: Llama 3 has its end of turn among the others.
        others = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(number for number, token in others.items() if token.special)}

    def render(self, messages: Messages) -> Rendered | None:
        """Token ids and the assistant's tokens; None where nobody knows which they are, or there are none."""
        try:
            rendered = self._from_marks(messages) if self.marked else self._from_prefixes(messages)
        except Exception:
            # A template says what it cannot render (roles that do not alternate, a missing field) by an error of any
            # kind; one such conversation is skipped, and only data that hold nothing else are refused.
            return None
        return rendered if rendered is not None and rendered[1].any() else None

    def _from_marks(self, messages: Messages) -> Rendered:
        out = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, said = np.asarray(out["input_ids"]), np.asarray(out["assistant_masks"], dtype=bool)
        # Some templates close the mark before the end-of-turn token, which is to be learnt too.
        after = np.flatnonzero(said[:-1] & ~said[1:]) + 1
        said[[at for at in after if int(ids[at]) in self.special]] = True
        return ids, said

    def _from_prefixes(self, messages: Messages) -> Rendered | None:
        ids = self._ids(messages)
        # Nothing is before a first message, so that what the template puts in front of it could not be told from it.
        turns = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
        if not turns:
            return None
        end_of_turn = self._end_of_turn(messages[: turns[-1] + 1], turns[-1])
        said = np.zeros(len(ids), dtype=bool)
        starts = [self._start(messages, at, ids) for at in turns]
        for at, start, following in zip(turns, starts, [*starts[1:], len(ids)], strict=True):
            if start is None or following is None:
                return None
            until = self._ids(messages[: at + 1])
            if until == ids[: len(until)] and len(until) > start:
                stop = self._after_last_special(ids, start, len(until))
            else:  # what is said last may be rendered otherwise than what was said before, as reasoning is
                found = [i for i in range(start, following) if ids[i] == end_of_turn]
                if not found:
                    return None
                stop = found[0] + 1
            said[start:stop] = True
        return np.asarray(ids, dtype=np.int64), said

    def _start(self, messages: Messages, at: int, ids: list[int]) -> int | None:
        """Where turn `at` begins in the whole conversation; None where what is before it is rendered otherwise there.

        The header that asks for an answer may hold more than a finished conversation has (an opened thought), so it may
        differ from it behind what was said before. There, the last token may differ too, by merging with the next.
        """
        before = self._ids(messages[:at])
        shared = _shared(before, ids)
        return max(shared, _shared(self._ids(messages[:at], ask=True), ids)) if shared >= len(before) - 1 else None

    def _end_of_turn(self, messages: Messages, at: int) -> int | None:
        """The special token that ends the last turn, if there is one."""
        ids = self._ids(messages)
        start = self._start(messages, at, ids)
        if start is None:
            return None
        stop = self._after_last_special(ids, start, len(ids))
        return ids[stop - 1] if stop > start and ids[stop - 1] in self.special else None

    def _after_last_special(self, ids: list[int], start: int, stop: int) -> int:
        """Behind the last special token in ids[start:stop], or `stop` where there is none."""
        return next((i + 1 for i in range(stop - 1, start - 1, -1) if ids[i] in self.special), stop)

    def _ids(self, messages: Messages, ask: bool = False) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _shared(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common at their beginnings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
