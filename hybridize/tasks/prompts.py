"""A question about a long text, in a model's own chat form, cut so that it takes exactly so many tokens.

Every candidate is tokenised whole, so the ids are what the tokenizer makes of that text and no seam is left in them.
The text around what is hidden is cut between words only; that the count comes out even is due to the choice of its
first word, which is moved until the last one fits.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import Any

from hybridize.errors import DataError

LEAST_FILLER = 16  # tokens; with less a depth means nothing
_PLACES, _STEP = 4, 0.382  # of the text that are tried, and how far they are apart
_ROOMY = 256  # tokens; some cut of so many comes out even, of any ordinary text
_CHARACTERS = 7  # per token, at first
_SPARE = 128  # tokens of text beyond what is needed, for the choice of the first word
_MARK, _REPLY = "hybridize-content", "hybridize-reply"
_ANSWER = "\n\nAnswer: "  # where a tokenizer has no form of its own for a reply


@dataclass(frozen=True)
class Question:
    """Sentences hidden in a text at depths from 0 to 1 (ascending), what is asked about them, and how a reply begins.

    lead: the reply's beginning, which is given; answer: the rest of it, which is scored.
    """

    intro: str
    hidden: Sequence[tuple[float, str]]
    question: str
    lead: str
    answer: str

    def content(self, pieces: Sequence[str]) -> str:
        """All but the reply, with pieces of text before, between and after what is hidden."""
        parts = [pieces[0]]
        for (_, sentence), piece in zip(self.hidden, pieces[1:], strict=True):
            parts += [sentence, piece]
        return "\n\n".join(part for part in [self.intro, *parts, self.question] if part)

    def body(self, content: str) -> tuple[int, int]:
        """[start, stop) of the text and what is hidden in it, in characters of the content."""
        return len(self.intro) + len("\n\n"), len(content) - len(self.question)


@dataclass(frozen=True)
class Filled:
    """A question with its text, as ids; [start, stop) of the text and what is hidden in it; where the answer begins."""

    ids: list[int]
    body: tuple[int, int]
    answer: int


class TooShort(DataError):
    """An item's length does not hold its question; needed: the tokens that it would take."""

    def __init__(self, needed: int):
        super().__init__(f"This question takes {needed} tokens; ask for longer items.")
        self.needed = needed


class Frame:
    """A tokenizer's own form of a user's message and the beginning of a reply; plain text where it has none.

    system: what the model is told first; by default what the tokenizer's chat template says, or nothing.
    """

    def __init__(self, tokenizer: Any, system: str | None = None):
        self.tokenizer = tokenizer
        self.prefix: list[int] = []
        if getattr(tokenizer, "chat_template", None):
            text = _opened(tokenizer, system)
            self.before, _, self.after = text.partition(_MARK)
            if not self.after and not text.endswith(_MARK):
                raise DataError("The tokenizer's chat template leaves out what the user says; give it another one.")
            if not self.after:
                self.after = _ANSWER
        else:
            self.before, self.after = f"{system}\n\n" if system else "", _ANSWER
            self.prefix = self._beginning()

    def encode(self, content: str, lead: str, answer: str) -> tuple[list[int], int]:
        """Ids of the whole, and the number of the first that belongs to the answer."""
        prompt = self.before + content + self.after + lead
        ids = self.prefix + self.ids(prompt + answer)
        for count in range(1, min(len(ids), len(answer) + 2)):
            if self.tokenizer.decode(ids[-count:]).strip() == answer.strip():
                return ids, len(ids) - count
        # A token that holds the end of the lead and the beginning of the answer cannot be scored: keep them apart.
        ids = self.prefix + self.ids(prompt)
        return ids + self.ids(answer), len(ids)

    def tokens(self, content: str, characters: Sequence[int]) -> list[int]:
        """The number of the first token that holds something of the content from each of these characters on."""
        text, borders = self.before + content + self.after, [len(self.before) + character for character in characters]
        if getattr(self.tokenizer, "is_fast", False):
            stops = [stop for _, stop in self._spans(text)]
            return [len(self.prefix) + bisect_right(stops, border) for border in borders]
        # Of the tokens that the text before has by itself, those that the whole text begins with too.
        ids = self.ids(text)
        return [len(self.prefix) + _agreeing(self.ids(text[:border]), ids) for border in borders]

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def words(self, text: str) -> dict[int, int]:
        """Places where the text can be cut: token number (ascending) to character number."""
        if getattr(self.tokenizer, "is_fast", False):
            spans = self._spans(text)
        else:  # as if every character were as many tokens; what is cut by it is counted afterwards
            share = len(self.ids(text)) / len(text)
            spans = [(int(n / share), int((n + 1) / share)) for n in range(int(len(text) * share))]
        places, last, end = {0: 0}, 0, 0
        for token, (start, stop) in enumerate(spans):
            # Not within a character of several tokens, and only once between two words.
            if start >= end and _between_words(text, start) and not text[last:start].isspace() and last < start:
                places[token] = last = start
            end = max(end, stop)
        return {**places, len(spans): len(text)}

    def special(self) -> re.Pattern[str] | None:
        """What would be read as a control token if it stood in a text."""
        tokens = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        words = [re.escape(token.content) for token in tokens if token.special]
        return re.compile("|".join(sorted(words, key=len, reverse=True))) if words else None

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """[start, stop) of each token in characters, by a fast tokenizer."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans: list[tuple[int, int]] = found["offset_mapping"]
        return spans

    def _beginning(self) -> list[int]:
        """The tokens that the tokenizer puts before any text."""
        plain, ids = self.ids("a"), self.tokenizer("a", verbose=False)["input_ids"]
        return next(ids[:n] for n in range(len(ids)) if ids[n : n + len(plain)] == plain)


def _agreeing(some: Sequence[int], others: Sequence[int]) -> int:
    """How many of both, from the first on, are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def _opened(tokenizer: Any, system: str | None) -> str:
    """A user's message and the beginning of a reply, as the chat template has them.

    DataError where it does not take a system message.
    """
    told = [{"role": "system", "content": system}] if system else []

    def render(messages: list[dict[str, str]], opened: bool) -> str:
        # The reply begins with the answer, not with a thought; and a template that shows the date shows the same one
        # every day.
        fixed = {"enable_thinking": False, "date_string": "1 January 2025"}
        try:
            text: str = tokenizer.apply_chat_template(
                [*told, *messages], tokenize=False, add_generation_prompt=opened, **fixed
            )
        except Exception as error:  # a template is a program, and raises what it likes
            if not told:
                raise
            raise DataError(f"The tokenizer's chat template takes no system message ({error}); leave it out.") from None
        return text

    user = {"role": "user", "content": _MARK}
    text = render([user], True)
    if text != render([user], False):
        return text
    # There is no beginning of a reply by itself, so it is taken from a whole one.
    beginning, reply, _ = render([user, {"role": "assistant", "content": _REPLY}], False).partition(_REPLY)
    return beginning if reply else text


def _between_words(text: str, place: int) -> bool:
    """Whether nothing is torn by a cut before this character; scripts from U+2E80 on put no spaces between words."""
    return text[place] >= "\u2e80" or text[place].isspace() or text[place - 1].isspace()


class Filler:
    """Real text to hide sentences in: all documents in a ring, each piece taken from a random place of it."""

    def __init__(self, frame: Frame, documents: Sequence[str]):
        self.frame = frame
        special = frame.special()
        clean = [special.sub("", text) for text in documents] if special else documents
        self.documents = [text.strip() for text in clean if text.strip()]
        self.ends = list(accumulate(len(text) for text in self.documents))
        if not self.documents:
            raise DataError("There is no text to hide anything in; give --data something to read.")

    def fill(self, question: Question, length: int, place: float) -> Filled:
        """The question about a text from `place` (0 to 1) on, `length` tokens in all.

        Raises TooShort, or DataError where there is too little text.
        """
        bare, _ = self.frame.encode(question.content([""] * (len(question.hidden) + 1)), question.lead, question.answer)
        room = length - len(bare)
        if room < LEAST_FILLER:
            raise TooShort(len(bare) + LEAST_FILLER)
        for _ in range(_PLACES):
            if found := self._cut(question, length, room, place):
                return found
            place = (place + _STEP) % 1
        if room < _ROOMY:
            raise TooShort(length + LEAST_FILLER)
        raise DataError(
            f"The text cannot be cut between words to make exactly {length:,} tokens; give other text with --data."
        )

    def _cut(self, question: Question, length: int, room: int, place: float) -> Filled | None:
        """The same with about `room` tokens of the text from `place` on, where that can be cut to fit."""
        text, words = self._text(place, room, length)
        tokens = list(words)
        # Where the text meets the rest, a token more or less is needed. One trial shows how many, and this holds for
        # the next as long as the inner cuts stay; that moves no depth by more than a hundredth or two.
        stay = 1 + room // 256
        for number, first in enumerate(tokens):
            if number % stay == 0:
                inner = [(depth, _nearest(tokens, first + depth * room)) for depth, _ in question.hidden]
            tried = set()
            while first + room in words and room not in tried:
                tried.add(room)
                cuts = [words[token] for token in (first, *_within(inner, first, first + room), first + room)]
                pieces = [text[a:b].strip() for a, b in pairwise(cuts)]
                content = question.content(pieces)
                ids, answer = self.frame.encode(content, question.lead, question.answer)
                if len(ids) == length:
                    start, stop = self.frame.tokens(content, question.body(content))
                    return Filled(ids, (start, stop), answer)
                room -= len(ids) - length
        return None

    def _text(self, place: float, room: int, length: int) -> tuple[str, dict[int, int]]:
        """More than `room` tokens of text, if there are as many, and its words."""
        size = _CHARACTERS * (room + _SPARE)
        while True:
            text = "\n\n".join(self._ring(place, size))
            words = self.frame.words(text)
            count = next(reversed(words))
            if count >= room + _SPARE:
                return text, words
            if size >= self.ends[-1]:
                break
            size *= 2
        if count < room:
            raise DataError(
                f"All text together is {count:,} tokens, but an item of {length:,} tokens needs {room:,} of it, and "
                "text is not repeated; give longer text with --data, or a smaller --context."
            )
        return text, words

    def _ring(self, place: float, size: int) -> Iterator[str]:
        """`size` characters from `place` on, by document, or all; after the last document comes the first."""
        start = min(int(place * self.ends[-1]), self.ends[-1] - 1)
        index = bisect_left(self.ends, start + 1)
        document = self.documents[index]
        skip = start - self.ends[index] + len(document)
        skip += re.search(r"\s|$", document[skip:]).start() if skip else 0  # type: ignore[union-attr]
        ring = [document[skip:], *self.documents[index + 1 :], *self.documents[:index], document[:skip]]
        for text in ring:
            if text.strip():
                yield text[:size].strip()
            size -= len(text)
            if size <= 0:
                return


def _within(cuts: Sequence[tuple[float, int]], first: int, last: int) -> list[int]:
    """Cuts, given as (depth, token), of a text from `first` to `last`: depths 0 and 1 are its very ends."""
    return [{0.0: first, 1.0: last}.get(depth, min(max(token, first), last)) for depth, token in cuts]


def _nearest(tokens: Sequence[int], wanted: float) -> int:
    after = bisect_left(tokens, wanted)
    return min(tokens[max(0, after - 1) : after + 1], key=lambda token: abs(token - wanted))
