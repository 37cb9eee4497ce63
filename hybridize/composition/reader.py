"""Reads chunks of text independently of one another, each as if it followed the prefix."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hybridize.composition.growing import Buffer, GrowingLayer
from hybridize.composition.memory import Memory, layer_devices, windows
from hybridize.errors import UsageError
from hybridize.hybrid.cache import Scan, StateLayer
from hybridize.hybrid.model import CACHE, mixers
from hybridize.hybrid.walk import entry_device
from hybridize.mixers.tokens import State, TokenLayout

BATCH_TOKENS = 65_536  # in all rows of a batch together, the prefix and padding included
PIECE_TOKENS = 8192  # of all rows together in one forward: activations and masks grow with it
SHORTEST_PIECE = 64  # tokens of a row; less wastes the chunked kernels


class TransitionLayer(StateLayer):
    """A StateLayer that also keeps what all tokens since its start multiply the state by."""

    transition: State | None = None

    def run(self, scan: Scan, inputs: State, layout: TokenLayout | None) -> Tensor:
        before = self.state
        o = super().run(scan, inputs, layout)
        step: State = scan.__self__.transition(inputs, before, layout)  # type: ignore[attr-defined]
        self.transition = step if self.transition is None else then(self.transition, step)
        return o


def then(first: State, second: State) -> State:
    """The transition of two runs of tokens, one after the other."""
    return {name: x @ first[name] if name == "P" else first[name] + x for name, x in second.items()}


def feed(
    model: Any, cache: Any, ids: Tensor, positions: Tensor, past: int, lengths: Sequence[int] | None = None
) -> Iterator[Tensor]:
    """Read ids [B, T] at `positions` [B, T] behind the cache's `past` tokens, piece by piece: hidden states [B, t, C].

    lengths: each row's real tokens, where the rest are padding.
    """
    device = entry_device(model)
    rows, total = ids.shape
    size = max(SHORTEST_PIECE, PIECE_TOKENS // rows)
    shortest = total if lengths is None else min(lengths)
    for begin in range(0, total, size):
        end = min(begin + size, total)
        mask = None
        if lengths is not None and end > shortest:
            place = torch.arange(-past, end, device=device)
            mask = (place < torch.tensor(lengths, device=device)[:, None]).long()
        yield model.base_model(
            input_ids=ids[:, begin:end].to(device),
            attention_mask=mask,
            position_ids=positions[:, begin:end].to(device),
            use_cache=True,
            **{CACHE: cache},
        ).last_hidden_state


@torch.no_grad()
def read_prefix(model: Any, ids: Tensor) -> Memory:
    """Read what all chunks begin with: ids int64 [P], which may be empty. Everything it kept can be read on from."""
    empty = Memory(ids[:0].cpu(), 0, [{} for _ in model.base_model.layers], [])
    if not len(ids):
        return empty
    (prefix,) = _read(model, empty, [ids.cpu()], [0], whole=True)
    return prefix


def read_chunks(
    model: Any, prefix: Memory, chunks: Sequence[Tensor], starts: Sequence[int], batch_tokens: int = BATCH_TOKENS
) -> Iterator[Memory]:
    """Read chunks int64 [T], each from behind the prefix and at its start; they come in their order, as they are done.

    A batch is of as many consecutive chunks as fit `batch_tokens`, one at least, and of half as many each time that
    memory does not suffice; the results are equal. UsageError for an empty chunk, or one that starts in the prefix.
    """
    for number, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
        if not len(chunk):
            raise UsageError(f"Chunk {number} has no tokens; leave it out.")
        if start < prefix.tokens:
            raise UsageError(f"Chunk {number} starts at {start}, but the prefix takes {prefix.tokens} positions.")
    done, limit = 0, len(chunks)
    while done < len(chunks):
        count = _batch(prefix.tokens, chunks[done:], min(limit, len(chunks) - done), batch_tokens)
        part = slice(done, done + count)
        memories = _try(model, prefix, [chunk.cpu() for chunk in chunks[part]], starts[part])
        if memories is None:
            limit = count // 2
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        done += count
        while memories:
            yield memories.pop(0)


def _batch(prefix: int, chunks: Sequence[Tensor], limit: int, tokens: int) -> int:
    """How many of the first chunks, at most `limit`, make a batch of at most so many tokens."""
    longest, count = 0, 0
    for chunk in chunks[:limit]:
        longest = max(longest, len(chunk))
        if count and (count + 1) * (prefix + longest) > tokens:
            break
        count += 1
    return count


def _try(model: Any, prefix: Memory, chunks: list[Tensor], starts: Sequence[int]) -> list[Memory] | None:
    """The chunks read as one batch, None where memory does not suffice for several."""
    try:
        return _read(model, prefix, chunks, starts)
    except (MemoryError, RuntimeError) as error:
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if len(chunks) == 1 or not short:
            raise
    return None


@torch.no_grad()
def _read(model: Any, prefix: Memory, chunks: list[Tensor], starts: Sequence[int], whole: bool = False) -> list[Memory]:
    """whole: keep all keys at the source's own windows too, and not only those that can be seen from behind."""
    lengths = [len(chunk) for chunk in chunks]
    rows, longest, past = len(chunks), max(lengths), prefix.tokens
    ids = torch.nn.utils.rnn.pad_sequence(chunks, batch_first=True)
    positions = torch.tensor(list(starts))[:, None] + torch.arange(longest)
    cache = _reading_cache(model, prefix, rows, past + longest)
    for _ in feed(model, cache, ids, positions, past, lengths):
        pass
    own, short = mixers(model), windows(model)
    memories = [Memory(chunk, start, [], []) for chunk, start in zip(chunks, starts, strict=True)]
    for i, layer in enumerate(cache.layers):
        for row, memory in enumerate(memories):
            if i in own:
                state, transition = layer.state, layer.transition
            else:
                first = max(0, lengths[row] - short[i] + 1) if i in short and not whole else 0
                real = slice(past + first, past + lengths[row])
                state, transition = {"keys": layer.keys[:, :, real], "values": layer.values[:, :, real]}, {}
            memory.layers.append({name: x[row].clone() for name, x in state.items()})
            memory.transitions.append({name: x[row].clone() for name, x in transition.items()})
        cache.layers[i] = None  # its padded keys are not held while the next layer's are copied
    return memories


def _reading_cache(model: Any, prefix: Memory, rows: int, capacity: int) -> Any:
    """A cache that has read the prefix in every row, with room for `capacity` tokens.

    A source's sliding window is the mask's matter here: padding behind a row's end must not push its keys out.
    """
    own, devices = mixers(model), layer_devices(model)
    cache: Any = DynamicCache()
    for i, kept in enumerate(prefix.layers):
        if i in own:
            layer: Any = TransitionLayer()
            if kept:
                state = {name: x.to(devices[i]).expand(rows, *x.shape).contiguous() for name, x in kept.items()}
                layer.fill(state, prefix.tokens)
        elif kept:
            buffer = Buffer.empty(kept["keys"], rows, capacity, devices[i])
            buffer.append(kept["keys"], kept["values"])
            layer = GrowingLayer(buffer)
        else:
            layer = GrowingLayer(room=capacity)
        cache.layers.append(layer)
    anchor = next((layer for i, layer in enumerate(cache.layers) if i not in own), None)
    for i in own:
        cache.layers[i].anchor = anchor
    return cache
