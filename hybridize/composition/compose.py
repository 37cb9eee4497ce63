"""One cache from the memories of many chunks, to ask questions of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hybridize.composition.growing import Buffer, GrowingLayer
from hybridize.composition.memory import Memory, layer_devices, windows
from hybridize.composition.reader import feed, read_prefix
from hybridize.composition.states import check_method, compose_states
from hybridize.errors import UsageError
from hybridize.hybrid.cache import StateLayer
from hybridize.hybrid.model import CACHE, mixers
from hybridize.hybrid.walk import entry_device
from hybridize.mixers.tokens import State

KEYS = {
    "concat": "the prefix's keys and values once, then every chunk's",
    "window": "the prefix's and the last chunk's",
    "full": "those of one plain pass over everything",
}
ROOM = 1024  # tokens of a question and its answer for which no key is copied


@dataclass
class Composed:
    """What a model remembers of the prefix and all chunks together; any number of questions can be asked of it.

    ids, positions int64 [T]: the tokens whose keys are kept, on the device of the model's embedding. layers: a Buffer
    at an attention layer; keys and values [Hk, at most window - 1, D] at a source's own window (`windows`: its size by
    layer); a state at a converted layer. position: that of the next token.
    """

    ids: Tensor
    positions: Tensor
    position: int
    layers: list[Buffer | State]
    windows: dict[int, int]

    @property
    def tokens(self) -> int:
        """Tokens whose keys are kept: the length of the cache."""
        return len(self.ids)

    def cache(self, rows: int = 1) -> DynamicCache:
        """A fresh cache for generate() or a forward, with this many equal rows.

        One row shares the kept keys, which nothing changes; while several such caches exist, all but the first that is
        appended to copy them at their first token. More rows are a copy.
        """
        cache: Any = DynamicCache()
        states: list[StateLayer] = []
        for i, kept in enumerate(self.layers):
            if isinstance(kept, Buffer):
                layer: Any = GrowingLayer(kept if rows == 1 else kept.rows(rows))
            elif i in self.windows:
                layer = DynamicSlidingWindowLayer(self.windows[i])
                layer.lazy_initialization(kept["keys"], kept["values"])
                layer.keys, layer.values = (kept[name].expand(rows, -1, -1, -1) for name in ("keys", "values"))
                layer.cumulative_length = self.tokens
            else:
                layer = StateLayer()
                layer.fill({name: x.expand(rows, *x.shape).contiguous() for name, x in kept.items()}, self.tokens)
                states.append(layer)
            cache.layers.append(layer)
        attention = [layer for layer in cache.layers if not isinstance(layer, StateLayer)]
        for state in states:
            state.anchor = min(attention, key=lambda layer: bool(layer.is_sliding), default=None)
        return cache

    def inputs(self, question: Tensor, rows: int = 1) -> dict[str, Any]:
        """The arguments of model.generate() for a question int64 [Q], or for several of one length [B, Q].

        rows: how many rows generate() will make of each, its num_beams or num_return_sequences. The text it returns
        begins with all of input_ids.
        """
        question = torch.atleast_2d(question).to(self.ids.device)
        batch, tokens = question.shape
        if not tokens:
            raise UsageError("The question has no tokens; ask something.")
        ids = torch.cat([self.ids.expand(batch, -1), question], dim=1)
        positions = torch.cat([self.positions, self._next(tokens)])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": positions.expand(batch, -1),
            CACHE: self.cache(batch * rows),
        }

    @torch.no_grad()
    def read(self, model: Any, ids: Tensor) -> Tensor:
        """Read tokens ids int64 [B, Q] behind what is kept: their hidden states [B, Q, C] behind the final norm."""
        positions = self._next(ids.shape[1]).expand(len(ids), -1)
        return torch.cat(list(feed(model, self.cache(len(ids)), ids, positions, self.tokens)), dim=1)

    def _next(self, tokens: int) -> Tensor:
        return torch.arange(self.position, self.position + tokens, device=self.ids.device)


@torch.no_grad()
def compose(
    model: Any,
    prefix: Memory,
    chunks: Sequence[Memory],
    method: str = "picaso",
    kv: str = "concat",
    *,
    release: bool = False,
) -> Composed:
    """Compose chunks that were read behind the prefix: states by a method of METHODS, keys and values by one of KEYS.

    The next position is behind the furthest token; with kv="full", which has the model read everything once more, it
    is behind all tokens. release=True empties the chunks layer by layer, so that no key is ever held twice.
    """
    check_method(method)
    if kv not in KEYS:
        raise UsageError(f"There is no key and value strategy {kv!r}; choose from {', '.join(KEYS)}.")
    if not chunks:
        raise UsageError("There is no chunk to compose; read at least one.")
    parts, position = [prefix, *chunks], max(chunk.stop for chunk in chunks)
    if kv == "window":
        parts = [prefix, chunks[-1]]
    elif kv == "full":
        parts = [read_prefix(model, torch.cat([part.ids for part in parts]))]
        position = parts[0].stop
    own, short = mixers(model), windows(model)
    layers: list[Buffer | State] = []
    for i, device in enumerate(layer_devices(model)):
        kept = [part.layers[i] for part in parts if part.layers[i]]
        if i in own:
            before = {name: x.to(device) for name, x in prefix.layers[i].items()} or None
            states, transitions = (
                [{name: x.to(device) for name, x in tensors.items()} for tensors in every]
                for every in ([c.layers[i] for c in chunks], [c.transitions[i] for c in chunks])
            )
            layers.append(compose_states(before, states, transitions, own[i].recurrent, method))
        elif i in short:
            layers.append({name: _tail([x[name] for x in kept], short[i] - 1, device) for name in ("keys", "values")})
        else:
            tokens = sum(x["keys"].shape[1] for x in kept)
            buffer = Buffer.empty(kept[0]["keys"], 1, tokens + ROOM, device)
            for x in kept:
                buffer.append(x["keys"], x["values"])
            layers.append(buffer)
        if release:
            for chunk in chunks:
                chunk.layers[i], chunk.transitions[i] = {}, {}
        if kv == "full":
            parts[0].layers[i] = {}
    entry = entry_device(model)
    ids = torch.cat([part.ids for part in parts]).to(entry)
    positions = torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(entry)
    return Composed(ids, positions, position, layers, short)


def _tail(parts: Sequence[Tensor], tokens: int, device: torch.device) -> Tensor:
    """The last tokens of keys or values [Hk, T, D] in a row, fewer where there are not so many."""
    joined = torch.cat([part[:, max(0, part.shape[1] - tokens) :].to(device) for part in parts], dim=1)
    return joined[:, max(0, joined.shape[1] - tokens) :]
