"""The change that a conversion would make: a layer's attention gives way to a mixer that is fitted to it in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hybridize.errors import UsageError
from hybridize.hybrid.model import convert, mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.mixers.base import Mixer
from hybridize.priming.align import Aligner, AlignOptions
from hybridize.priming.transfer import StartOptions, fit_start
from hybridize.probing.swa_proxy import Change

ONE_DEVICE = "--method mixer needs the whole model on one device; leave it out, or take a larger device."
FIT_TOKENS = 16_384  # of text, apart from what is measured on: least squares have 576 unknowns in a small model's layer
ALIGN_TOKENS = 200_000  # more of it, for as many steps as bring mixers most of the way
STEP_TOKENS = 4096  # of one step of the alignment


def fitted_hybrid(
    model: Any, kind: str, rows: Tensor, batch_tokens: int, advance: Callable[[int], None] | None = None
) -> Any:
    """The model with `kind` mixers in place of all attention, started as `prime` starts them, on rows [N, T] of ids.

    All layers are fitted in one walk, each on the model's own hidden states, so that no fit depends on what else is
    changed. advance(tokens) is called after each layer. UsageError for a model that is spread over devices.
    """
    device = model.get_input_embeddings().weight.device
    if any(parameter.device != device or parameter.is_meta for parameter in model.parameters()):
        raise UsageError(ONE_DEVICE)
    size = max(1, batch_tokens // rows.shape[1])
    size = next(n for n in range(min(size, len(rows)), 0, -1) if len(rows) % n == 0)  # batches of one shape
    count = model.config.num_hidden_layers
    hybrid = convert(model, LayerPlan.from_layers(count, range(count), kind), share=True)
    fit_start(model, hybrid, [ids.to(device) for ids in rows.split(size)], StartOptions(), advance)
    return hybrid


def align_mixers(
    model: Any,
    hybrid: Any,
    rows: Tensor,
    advance: Callable[[int, str], None] = lambda tokens, message: None,
    lr: float = AlignOptions.lr,
) -> None:
    """Train the hybrid's mixers, each on the model's own hidden states of rows [N, T] of ids, read once.

    advance(tokens, message) is called after each step; DivergedError names a layer whose loss is not finite.
    """
    size = min(len(rows), max(1, STEP_TOKENS // rows.shape[1]))
    steps = len(rows) // size
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [
        parameter
        for mixer in mixers(hybrid).values()
        for name, parameter in mixer.named_parameters()
        if name.rsplit(".", 1)[-1] not in Mixer.fp32_names
    ]
    dtypes = [parameter.dtype for parameter in weights]
    for parameter in weights:  # steps of training are too small for the formats that models compute in
        parameter.data = parameter.data.float()
    aligner = Aligner(model, hybrid, AlignOptions(lr=lr), steps)
    try:
        for ids in rows[: steps * size].split(size):
            errors = aligner.step(ids.to(model.device))
            advance(ids.numel(), f"relative error {sum(errors.values()) / len(errors):.3f}")
    finally:
        aligner.optimiser.zero_grad(set_to_none=True)
        hybrid.requires_grad_(False)
        for parameter in learning:  # which the hybrid shares, and which are the caller's
            parameter.requires_grad_(True)
    for parameter, dtype in zip(weights, dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)


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
