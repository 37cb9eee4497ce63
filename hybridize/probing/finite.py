"""Weights and activations that are not finite numbers, found before they spoil a score, and the layer they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridize.errors import NonFiniteError
from hybridize.hybrid.walk import first


def check_weights(model: Any) -> None:
    """NonFiniteError that names the first tensor with a value that is not finite, and its layer if it is in one."""
    layers = model.base_model.layers
    weights = [(f"Layer {n}", name, x) for n, layer in enumerate(layers) for name, x in layer.named_parameters()]
    inside = {id(x) for _, _, x in weights}
    weights += [("The model", name, x) for name, x in model.named_parameters() if id(x) not in inside]
    for where, name, weight in weights:
        # Weights that are offloaded are on no device here; what they compute is checked.
        if weight.numel() and not weight.is_meta and not is_finite(weight.detach()):
            raise NonFiniteError(
                f"{where} has weights that are not finite numbers ({name}): download or make the model again."
            )


def check_hidden(hidden: Tensor, number: int) -> None:
    """NonFiniteError where what layer `number` gave, [B, T, hidden] or its extremes, is not finite."""
    if not is_finite(hidden):
        raise NonFiniteError(
            f"Layer {number} gives hidden states that are not finite numbers; use --dtype float32 or bfloat16, or "
            "check the model."
        )


@contextmanager
def finite_activations(layers: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Within the block, calling what it yields raises NonFiniteError for the layer that first gave NaN or infinity."""
    seen: list[Tensor] = []
    with ExitStack() as stack:
        for layer in layers:
            handle = layer.register_forward_hook(
                lambda module, args, output: seen.append(torch.stack(torch.aminmax(first(output))).float().cpu())
            )
            stack.callback(handle.remove)

        def check() -> None:
            for number, extremes in enumerate(seen):
                check_hidden(extremes, number)
            seen.clear()

        yield check


def is_finite(x: Tensor) -> bool:
    return bool(torch.stack(torch.aminmax(x)).isfinite().all())  # unlike isfinite of x, this makes no copy of its size
