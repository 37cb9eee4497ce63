"""What a run reads: its text, where in it the stages begin, and the rows that it is measured on."""

from __future__ import annotations

from typing import Any

from hybridize.console import Console
from hybridize.errors import UsageError
from hybridize.priming.batches import Batch
from hybridize.priming.options import PrimeOptions
from hybridize.priming.stream import HeldOut, TokenStream, open_stream
from hybridize.sources import Source


class RunText:
    """The stream of a run and its held-out rows; every process of a run opens its own, and all give the same batches.

    held_out: what results are stated on; choosing: what weights are chosen on, None only where none are.
    """

    def __init__(self, stream: TokenStream, held_out: HeldOut):
        self.stream, self.held_out = stream, held_out.stated
        self.choosing: Any = held_out.choosing
        self._begin = stream.state()  # what init reads, and align after it
        self._adapt_begin = self._begin  # and what adapt reads, and baseline after it

    def first(self, count: int) -> list[Batch]:
        """The first batches of the text; the stream stays where it is."""
        here = self.stream.state()
        self.stream.load_state(self._begin)
        batches = [self.stream.batch() for _ in range(count)]
        self.stream.load_state(here)
        return batches

    def enter(self, stage: str) -> None:
        """Begin a stage: each goes on where the one before it stopped, but baseline reads what adapt has read."""
        if stage == "adapt":
            self._adapt_begin = self.stream.state()
        if stage == "baseline":
            self.stream.load_state(self._adapt_begin)

    def state(self) -> dict[str, Any]:
        """What `load_state` goes on from; CheckpointError there where the text has changed since."""
        return {"text": self.stream.state(), "adapt_begin": self._adapt_begin}

    def load_state(self, state: dict[str, Any]) -> None:
        self.stream.load_state(state["text"])
        self._adapt_begin = state["adapt_begin"]


def open_text(options: PrimeOptions, source: Source, console: Console) -> RunText:
    """The text that the options name; UsageError and DataError where it cannot be read, or is too little."""
    console.note(f"Reading and tokenising text ({', '.join(options.data)}).")
    stream, held_out = open_stream(
        options.data,
        source.tokenizer,
        vocabulary=source.config.vocab_size,
        context=options.context,
        batch_rows=options.batch_size,
        seed=options.seed,
        held_out=options.held_out,
        held_out_tokens=options.held_out_tokens,
        text_field=options.text_field,
        warn=console.warn,
    )
    if options.evaluate_every and held_out.choosing is None:
        raise UsageError("--evaluate-every needs held-out text of two rows at least; give longer text with --data.")
    return RunText(stream, held_out)
