"""Walks a model layer by layer over a fixed set of batches, holding one hidden state per token and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


class _Stop(Exception):
    """Ends a forward early, from a hook."""


def first(output: Any) -> Tensor:
    """The hidden states in what a decoder layer or an attention module returned."""
    return output[0] if isinstance(output, tuple) else output


def entry_device(model: Any) -> torch.device:
    """Where token ids must be for a forward of the model, also when its weights are offloaded."""
    embedding = model.get_input_embeddings()
    if embedding.weight.is_meta:  # accelerate brings the weight in from outside
        return torch.device(embedding._hf_hook.execution_device)
    device: torch.device = embedding.weight.device
    return device


Arguments = list[dict[str, Any]]  # each layer's keyword arguments


@torch.no_grad()
def capture_forward(body: Any, ids: Tensor) -> tuple[Tensor, Arguments]:
    """The body's own forward of ids [B, T]: what leaves its final norm, [B, T, hidden], and every layer's arguments.

    The arguments (masks, positions) are those of any batch of as many tokens a row, without padding.
    """
    arguments: Arguments = []

    def keep_arguments(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        arguments.append(kwargs)

    hooks = [layer.register_forward_pre_hook(keep_arguments, with_kwargs=True) for layer in body.layers]
    try:
        return body(input_ids=ids, use_cache=False).last_hidden_state, arguments
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def entering_stream(body: Any, ids: Tensor) -> Tensor:
    """The hidden states of ids [B, T] that enter layer 0, [B, T, hidden]; no layer runs."""
    streams: list[Tensor] = []

    def keep_stream(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        streams.append(args[0] if args else kwargs["hidden_states"])
        raise _Stop

    hook = body.layers[0].register_forward_pre_hook(keep_stream, with_kwargs=True)
    try:
        with suppress(_Stop):
            body(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return streams[0]


@contextmanager
def passing_on(body: Any, count: int) -> Iterator[None]:
    """The first `count` layers pass on what they are given. The body still makes masks and positions for all."""
    layers = list(body.layers[:count])
    for layer in layers:
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@torch.no_grad()
def layer_inputs(body: Any, ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Arguments]:
    """The hidden states of ids [B, T] that enter layer 0, and every layer's keyword arguments; no layer runs.

    positions [B, T] start at 0 at every document of a row.
    """
    streams: list[Tensor] = []
    arguments: Arguments = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        streams.append(args[0] if args else kwargs["hidden_states"])
        arguments.append({name: value for name, value in kwargs.items() if name != "hidden_states"})

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in body.layers]
    try:
        with passing_on(body, len(body.layers)):
            body(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return streams[0], arguments


def capture_layer_inputs(body: Any, batches: list[Tensor]) -> tuple[list[Tensor], Arguments]:
    """Hidden states that enter layer 0, one [B, T, hidden] per batch of ids, and every layer's keyword arguments.

    The arguments are taken from the first batch: all batches have one shape and no padding.
    """
    inputs = [layer_inputs(body, ids) for ids in batches]
    return [hidden for hidden, _ in inputs], inputs[0][1]


@torch.no_grad()
def run_layer(layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """One decoder layer: its output, and the output of its attention module, both [B, T, hidden]."""
    seen: list[Tensor] = []
    hook = layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(first(output)))
    try:
        out = first(layer(hidden, **arguments))
    finally:
        hook.remove()
    return out, seen[0]


@torch.no_grad()
def attention_input(layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What the layer's attention module would be given (the normed hidden states), [B, T, hidden]."""
    seen: list[Tensor] = []

    def stop(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _Stop

    hook = layer.self_attn.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        layer(hidden, **arguments)
    except _Stop:
        pass
    finally:
        hook.remove()
    return seen[0]


def token_weights(hidden: Tensor, output: Tensor) -> Tensor:
    """How much an error at each token matters, fp32 [B, T, 1]: one over the mean square of the residual stream there.

    The next modules see the stream through an RMS norm, so an error counts relative to the stream's own size. Some
    tokens, the first above all, carry activations thousands of times larger than the rest and would rule any plain sum.
    """
    return 1.0 / (hidden + output).float().square().mean(-1, keepdim=True).clamp(min=1e-12)
