"""A converted layer's place in the model's cache: a fixed-size state instead of keys and values.

Rollback (speculative decoding) keeps a checkpoint of the state and the mixer's inputs since then; going back n tokens
drops the last n inputs, and the next forward runs the rest from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from hybridize.errors import HybridizeError
from hybridize.mixers.tokens import State, TokenLayout

MAX_ROLLBACK = 128  # tokens that can be taken back; for an 8B model this costs about 40 % of a GKA layer's own state

Scan = Callable[[State, State | None, TokenLayout | None], tuple[Tensor, State]]
Piece = tuple[State, TokenLayout | None]


class RollbackError(HybridizeError, RuntimeError):
    """The cache cannot be taken back as far as asked."""


class StateLayer(CacheLayerMixin):
    """State of one converted layer; `anchor` is an attention layer of the same cache, which knows lengths and masks."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, anchor: CacheLayerMixin | None = None) -> None:
        super().__init__()
        self.anchor = anchor
        self.record_past = False  # transformers' name: it reads and clears this
        self.reach = MAX_ROLLBACK
        self._clear()

    def _clear(self) -> None:
        self._state: State | None = None
        self._checkpoint: State | None = None
        self._record: list[Piece] = []
        self._behind = False  # the state must be rebuilt from the checkpoint and the record
        self._length = 0
        self.document_start: Tensor | None = None  # [B] where each row's current document begins, once one was packed
        self.is_initialized = False

    # -- what a mixer calls ------------------------------------------------------------------------------------------

    def run(self, scan: Scan, inputs: State, layout: TokenLayout | None) -> Tensor:
        """Scan the inputs from the state kept here, keep the new state, and return the read-outs [B, T, H, D]."""
        device = inputs["q"].device
        self._place(device)
        if self._behind:
            self._state = self._replay(scan, self._checkpoint, self._record)
            self._behind = False
        tokens = inputs["q"].shape[1]
        self._length += tokens
        self.is_initialized = True
        if not self.record_past:
            self._checkpoint, self._record = None, []
            o, self._state = scan(inputs, self._state, layout)
            return o
        old = tokens - self.reach
        if old <= 0:
            o, self._state = scan(inputs, self._state, layout)
            self._record.append((inputs, layout))
            self._trim(scan)
            return o
        # A long prompt: only its end can be taken back, so the checkpoint stands just before that end.
        first, last = cut((inputs, layout), 0, old), cut((inputs, layout), old, tokens)
        o_first, self._checkpoint = scan(first[0], self._state, first[1])
        o_last, self._state = scan(last[0], self._checkpoint, last[1])
        self._record = [last]
        return torch.cat([o_first, o_last], dim=1)

    @property
    def state(self) -> State | None:
        """The named state tensors, None before the first token; not to be read between a crop and the next forward."""
        if self._behind:
            raise RollbackError(
                "The state is rebuilt at the next forward after a crop: run the model before reading it."
            )
        return self._state

    def fill(self, state: State, tokens: int) -> None:
        """Hold this state as if it came from a forward of `tokens` tokens."""
        self._clear()
        self._state, self._length, self.is_initialized = state, tokens, True

    def _trim(self, scan: Scan) -> None:
        """Move the checkpoint on, piece by piece, when much more is recorded than can be asked back."""
        if self._recorded() < 2 * self.reach:
            return
        keep = 0
        for first in range(len(self._record) - 1, -1, -1):
            keep += self._record[first][0]["q"].shape[1]
            if keep >= self.reach:
                self._checkpoint = self._replay(scan, self._checkpoint, self._record[:first])
                self._record = self._record[first:]
                return

    @staticmethod
    def _replay(scan: Scan, state: State | None, record: list[Piece]) -> State | None:
        for inputs, layout in record:
            _, state = scan(inputs, state, layout)
        return state

    def _recorded(self) -> int:
        return sum(inputs["q"].shape[1] for inputs, _ in self._record)

    # -- what transformers calls -------------------------------------------------------------------------------------

    def activate_past_recording(self, recurrent_states_to_keep: int | None = None, **kwargs: Any) -> None:
        """Record inputs from now on, so that `crop` can take back MAX_ROLLBACK tokens, or as many as are asked for.

        What releases of transformers pass beside that is for caches that keep other things.
        """
        self.reach = max(self.reach, recurrent_states_to_keep or 0)
        if not self.record_past:
            self.record_past = True
            if not self._behind:
                self._checkpoint, self._record = self._state, []

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens (transformers counts them as a negative number)."""
        count = -tokens_to_remove
        if count == 0:
            return
        if count < 0:
            raise RollbackError(
                f"crop({tokens_to_remove}): give the number of tokens to take back as a negative number."
            )
        if not self.record_past:
            raise RollbackError(
                "A state cannot forget tokens that were not recorded: call activate_past_recording() on the cache, "
                "once the model has seen it and before the tokens that may be taken back."
            )
        if count > self._recorded():
            raise RollbackError(f"crop asks back {count} tokens, but only the last {self._recorded()} are recorded.")
        kept, start = self._length - count, self.document_start
        if start is not None and bool(((start > 0) & (start >= kept)).any()):
            raise RollbackError("crop would go back behind the start of a packed document: run the prompt again.")
        self._length = kept
        while count:
            inputs, layout = self._record.pop()
            tokens = inputs["q"].shape[1]
            if tokens > count:
                self._record.append(cut((inputs, layout), 0, tokens - count))
            count = max(0, count - tokens)
        self._behind = True

    def get_seq_length(self) -> int:
        return self._length if self.anchor is None else self.anchor.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.anchor is not None:
            return self.anchor.get_mask_sizes(query_length)
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self._batch()).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch, in the order given."""
        self._map(lambda x: x[indices.to(x.device)])
        self._record = [(i, None if layout is None else layout.select(indices)) for i, layout in self._record]

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Nothing to do ahead of time: `run` moves the state, which is small, to where its inputs are."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RollbackError("A converted layer keeps no keys and values.")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RollbackError("A converted layer keeps no keys and values: this cache was made for a hybrid model.")

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _batch(self) -> int:
        state = self._state if self._state is not None else self._record[0][0]
        return next(iter(state.values())).shape[0]

    def _place(self, device: torch.device) -> None:
        if self._state is not None and next(iter(self._state.values())).device != device:
            self._map(lambda x: x.to(device))

    def _map(self, move: Callable[[Tensor], Tensor]) -> None:
        def each(state: State | None) -> State | None:
            return None if state is None else {name: move(x) for name, x in state.items()}

        same = self._checkpoint is self._state
        self._state = each(self._state)
        self._checkpoint = self._state if same else each(self._checkpoint)
        self._record = [({name: move(x) for name, x in inputs.items()}, layout) for inputs, layout in self._record]
        if self.document_start is not None:
            self.document_start = move(self.document_start)


def cut(piece: Piece, start: int, stop: int) -> Piece:
    """Tokens start to stop of recorded inputs."""
    inputs, layout = piece
    return {n: x[:, start:stop] for n, x in inputs.items()}, None if layout is None else layout.cut(start, stop)


def install_state_layers(cache: Cache, converted: list[int], num_layers: int) -> None:
    """Put a StateLayer at every converted layer of a transformers cache of whatever kind that has seen no token yet."""
    here = [i for i, layer in enumerate(cache.layers) if isinstance(layer, StateLayer)]
    if here == converted:
        return
    if here or any(layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)):
        raise HybridizeError("This cache was filled by another model: start this hybrid with an empty cache.")
    while len(cache.layers) < num_layers:
        cache.layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    kept: list[Any] = [layer for i, layer in enumerate(cache.layers) if i not in set(converted)]
    anchor = min(kept, key=lambda layer: bool(layer.is_sliding), default=None)
    for i in converted:
        cache.layers[i] = StateLayer(anchor)
