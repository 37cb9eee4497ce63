"""The change that a conversion would make: a layer's attention gives way to a mixer that is fitted to it in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hybridize.errors import UsageError
from hybridize.hybrid.model import convert, mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.priming.transfer import StartOptions, fit_start
from hybridize.probing.swa_proxy import Change

FIT_TOKENS = 16_384  # of text, apart from what is measured on: least squares have 576 unknowns in a small model's layer


def fitted_mixers(
    model: Any, kind: str, rows: Tensor, batch_tokens: int, advance: Callable[[int], None] | None = None
) -> Change:
    """A change for every layer: its attention is a `kind` mixer, started as `prime` starts one, on rows [N, T] of ids.

    All layers are fitted in one walk, each on the model's own hidden states, so that no fit depends on what else is
    changed. advance(tokens) is called after each layer. UsageError for a model that is spread over devices.
    """
    device = model.get_input_embeddings().weight.device
    if any(parameter.device != device or parameter.is_meta for parameter in model.parameters()):
        raise UsageError("--method mixer needs the whole model on one device; leave it out, or take a larger device.")
    size = max(1, batch_tokens // rows.shape[1])
    size = next(n for n in range(min(size, len(rows)), 0, -1) if len(rows) % n == 0)  # batches of one shape
    count = model.config.num_hidden_layers
    hybrid = convert(model, LayerPlan.from_layers(count, range(count), kind), share=True)
    fit_start(model, hybrid, [ids.to(device) for ids in rows.split(size)], StartOptions(), advance)
    return in_place(model, mixers(hybrid))


def in_place(model: Any, modules: Mapping[int, nn.Module]) -> Change:
    """The change that puts a layer's module of `modules` in place of what computes its attention."""

    @contextmanager
    def change(number: int) -> Iterator[None]:
        layer = model.base_model.layers[number]
        own, layer.self_attn = layer.self_attn, modules[number]
        try:
            yield
        finally:
            layer.self_attn = own

    return change
