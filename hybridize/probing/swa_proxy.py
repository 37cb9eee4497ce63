"""The one-layer sweep: what is lost when one layer alone is changed, for every layer in turn.

The hidden states that enter layer l are the same whatever is done to layer l, so they are computed once; each change
then costs the layers from l to the last, and the output head at the scored positions only. Over all L layers that is
about L / 2 forward passes per change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.errors import ConversionError, NonFiniteError
from hybridize.hybrid.walk import Arguments, capture_forward, entering_stream, entry_device, first
from hybridize.probing.finite import finite_activations
from hybridize.probing.windowed import SINKS, windowed, without_masks
from hybridize.tasks.perplexity import head_logits
from hybridize.tasks.scored import Scored

LOGITS = 2**26  # logits held at once per change, 0.27 GB in fp32: 1365 positions of a 49K vocabulary, 441 of 152K
# A change of one layer: given its number, a block within which it is in place.
Change = Callable[[int], AbstractContextManager[Any]]
Effect = dict[str, float]  # loss, kl, accuracy, tokens, rows
Effects = dict[str, Effect]  # by group


@dataclass(frozen=True)
class _Batch:
    """A batch on the device: ids [B, T]; the P scored targets' rows, ids, and places that predict them; base [P, h]."""

    ids: Tensor
    group: str
    row: Tensor
    place: Tensor
    wanted: Tensor
    base: Tensor

    def pick(self, hidden: Tensor) -> Tensor:
        """Hidden states [P, hidden] at the places that predict, from [B, T, hidden]."""
        return _pick(hidden, self.row, self.place)


class Sweep:
    """A model's own predictions at the scored positions, against which each layer's changes are then measured.

    `base` holds the unchanged model's loss (nats per scored token) and accuracy by group. advance(tokens) is told of
    every token that has passed a layer. Raises NonFiniteError, which names the layer, where activations are not finite.
    """

    def __init__(self, model: Any, batches: Sequence[Scored], advance: Callable[[int], None] | None = None):
        self.model, self.body = model, model.base_model
        self.layers: Sequence[Any] = self.body.layers
        self.advance = advance or (lambda tokens: None)
        self.arguments: dict[int, Arguments] = {}  # by tokens per row
        with without_masks(self.body), finite_activations(self.layers) as check:
            self.batches = [self._base(scored, check) for scored in batches]
        outcomes = [_compare(model, b, {"": b.base})[""] for b in self.batches]
        self.base: Effects = _effects(self.batches, outcomes)
        for group, effect in self.base.items():
            if not _finite(effect["loss"]):
                raise NonFiniteError(
                    f"The unchanged model's loss on {group} is no finite number; use --dtype float32 or bfloat16, or "
                    "check the model."
                )

    @torch.no_grad()
    def run(self, changes: dict[str, Change], skip: Collection[int] = ()) -> Iterator[tuple[int, dict[str, Effects]]]:
        """Yield (layer, effects by change and group) for every layer that is not to be skipped, first to last.

        An effect: loss, the increase in nats per scored token; kl, KL(base || changed) in nats per scored token;
        accuracy, the share of rows whose scored tokens are all the model's first choice. Other layers may be changed
        around this: then both runs of the comparison's right side have them, and its left side has not.
        """
        store = self._store()
        with without_masks(self.body):
            streams = [entering_stream(self.body, batch.ids).to(store) for batch in self.batches]
            for number, layer in enumerate(self.layers):
                if number not in skip:
                    yield number, self._measure(number, streams, changes)
                for index, batch in enumerate(self.batches):
                    streams[index] = self._layer(number, layer, streams[index].to(batch.ids.device)).to(store)

    def _base(self, scored: Scored, check: Callable[[], None]) -> _Batch:
        row, column = scored.targets.nonzero(as_tuple=True)
        ids, wanted = scored.ids.to(entry_device(self.model)), scored.ids[row, column]
        hidden, arguments = capture_forward(self.body, ids)
        check()
        self.arguments.setdefault(ids.shape[1], arguments)
        self.advance(ids.numel() * len(self.layers))
        base = _pick(hidden, row, column - 1)
        return _Batch(ids, scored.group, row, column - 1, wanted, base)

    def _store(self) -> torch.device:
        """Where the hidden states between layers are kept: where they arise if that leaves it half of its room."""
        device = self.batches[0].ids.device
        if device.type != "cuda":
            return device
        size = sum(batch.ids.numel() for batch in self.batches) * self.batches[0].base[0].nbytes
        free, _ = torch.cuda.mem_get_info(device)
        return device if size < free / 2 else torch.device("cpu")

    def _layer(self, number: int, layer: Any, hidden: Tensor) -> Tensor:
        self.advance(hidden.shape[0] * hidden.shape[1])
        return first(layer(hidden, **self.arguments[hidden.shape[1]][number]))

    def _measure(self, number: int, streams: list[Tensor], changes: dict[str, Change]) -> dict[str, Effects]:
        outcomes: dict[str, list[Tensor]] = {name: [] for name in changes}
        for batch, stream in zip(self.batches, streams, strict=True):
            ends = {}
            for name, change in changes.items():
                hidden = stream.to(batch.ids.device)
                with change(number):
                    hidden = self._layer(number, self.layers[number], hidden)
                for later in range(number + 1, len(self.layers)):
                    hidden = self._layer(later, self.layers[later], hidden)
                ends[name] = self.body.norm(batch.pick(hidden))
            for name, outcome in _compare(self.model, batch, ends).items():
                outcomes[name].append(outcome)
        effects = {name: _effects(self.batches, pieces) for name, pieces in outcomes.items()}
        for name, groups in effects.items():
            for group, effect in groups.items():
                if not all(map(_finite, effect.values())):
                    raise NonFiniteError(
                        f"With layer {number} changed ({name}), the loss on {group} is no finite number; use --dtype "
                        "float32 or bfloat16."
                    )
                effect["loss"] -= self.base[group]["loss"]
        return effects


def windows(model: Any, sizes: Sequence[int], sinks: int = SINKS) -> dict[str, Change]:
    """The changes of the SWA proxy, one per window size: the layer's attention sees that window and the sinks."""

    def change(size: int) -> Change:
        @contextmanager
        def windowed_layer(number: int) -> Iterator[None]:
            with windowed(model.base_model.layers[number].self_attn, size, sinks) as reach:
                yield
            if not reach.calls:
                raise ConversionError(
                    f"The attention of layer {number} computes its scores in a way of its own: it cannot be windowed."
                )

        return windowed_layer

    return {str(size): change(size) for size in sizes}


def _pick(hidden: Tensor, row: Tensor, place: Tensor) -> Tensor:
    return hidden[row.to(hidden.device), place.to(hidden.device)]


def _finite(x: float) -> bool:
    return x - x == 0


@torch.no_grad()
def _compare(model: Any, batch: _Batch, ends: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per change fp32 [3, P] on the CPU: loss, KL(base || changed), and whether the target is the first choice."""
    size = max(1, LOGITS // model.config.vocab_size)
    found: dict[str, list[Tensor]] = {name: [] for name in ends}
    for start in range(0, len(batch.wanted), size):
        rows = slice(start, start + size)
        base = head_logits(model, batch.base[rows]).log_softmax(-1)
        wanted = batch.wanted[rows].to(base.device)
        weights = base.exp()
        for name, end in ends.items():
            changed = head_logits(model, end[rows]).log_softmax(-1)
            loss = -changed.gather(-1, wanted[:, None])[:, 0]
            kl = (weights * (base - changed)).sum(-1)
            found[name].append(torch.stack([loss, kl, (changed.argmax(-1) == wanted).float()]).cpu())
    return {name: torch.cat(pieces, 1) for name, pieces in found.items()}


def _effects(batches: Sequence[_Batch], outcomes: Sequence[Tensor]) -> Effects:
    """Means over the scored tokens of each group, and over its rows for the accuracy."""
    effects: Effects = {}
    for group in dict.fromkeys(batch.group for batch in batches):
        pairs = [(b, o.double()) for b, o in zip(batches, outcomes, strict=True) if b.group == group]
        loss, kl = torch.cat([o[:2] for _, o in pairs], 1).mean(1).tolist()
        right = [torch.ones(len(b.ids)).scatter_reduce_(0, b.row, o[2].float(), "amin") for b, o in pairs]
        accuracy = torch.cat(right)
        effects[group] = {
            "loss": loss,
            "kl": kl,
            "accuracy": accuracy.mean().item(),
            "tokens": sum(len(b.wanted) for b, _ in pairs),
            "rows": len(accuracy),
        }
    return effects
