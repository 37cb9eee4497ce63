"""Stage init: new mixers start as close to their attention layers as a few batches of text can bring them.

The weights are copied by `convert`. Here the scale of each mixer's read-out is fitted to its teacher's output, and the
output projection is solved by regularised least squares: this replaces the first million tokens of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.hybrid.model import mixers
from hybridize.hybrid.walk import attention_input, layer_inputs, run_layer, token_weights
from hybridize.mixers.base import Mixer, StateSpaceMixer
from hybridize.mixers.tokens import token_layout
from hybridize.priming.batches import Batch


@dataclass(frozen=True)
class StartOptions:
    """How a mixer starts.

    gate: 'one' (the gate lets everything pass, as `convert` set it) or 'blend' (the reference's 0.5 * (W_O^T + repeated
    W_V)). conv: 'identity' (as `convert` set it) or 'random' (normal, 0.02, as in the reference). calibrate: fit the
    scale of the read-out. solve: least squares for o_proj, with `ridge` towards the copied weights. follow: fit each
    layer on what the hybrid's earlier layers give it, and let it make good what they lost, instead of on the source's
    own hidden states.
    """

    gate: str = "one"
    conv: str = "identity"
    calibrate: bool = True
    solve: bool = True
    ridge: float = 1e-3
    follow: bool = False


class LeastSquares:
    """Normal equations of targets [N, out] on features [N, in], summed over batches in fp64."""

    def __init__(self, features: int, outputs: int, device: torch.device):
        # Apple's GPUs have no fp64.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.gram = torch.zeros(features, features, dtype=self.dtype, device=device)
        self.cross = torch.zeros(features, outputs, dtype=self.dtype, device=device)
        self.energy = 0.0

    def add(self, features: Tensor, targets: Tensor, weights: Tensor) -> None:
        """Add rows [B, T, ...] with weights [B, T, 1]; the products are taken in fp32."""
        root = weights.sqrt()
        z, y = (features * root).flatten(0, -2).float(), (targets * root).flatten(0, -2).float()
        self.energy += y.double().square().sum().item()
        self.gram += (z.T @ z).to(self.dtype)
        self.cross += (z.T @ y).to(self.dtype)

    def scale(self, weight: Tensor) -> float:
        """The factor c > 0 that brings c * features @ weight^T closest to the targets; weight [out, in]."""
        w = weight.to(self.dtype)
        explained, energy = (w.T * self.cross).sum(), ((w @ self.gram) * w).sum()
        return max(explained.item() / max(energy.item(), 1e-30), 1e-3)

    def solve(self, prior: Tensor, ridge: float) -> Tensor:
        """argmin over W [out, in] of |features W^T - targets|^2 + ridge * mean square feature * |W - prior|^2."""
        damping = (ridge * self.gram.diagonal().mean()).clamp(min=1e-30)  # features may all be zero
        a = self.gram + damping * torch.eye(len(self.gram), dtype=self.dtype, device=self.gram.device)
        return torch.linalg.solve(a, self.cross + damping * prior.to(self.dtype).T).T


@torch.no_grad()
def set_start(mixer: Mixer, options: StartOptions) -> None:
    """Set the gate and the convolutions where the options ask for something else than `convert` has set."""
    if not isinstance(mixer, StateSpaceMixer):
        return
    if options.gate == "blend":
        projection: Any = mixer.o_proj
        out = projection.weight.T
        groups = mixer.heads // mixer.kv_heads
        value = _value_weight(mixer).unflatten(0, (mixer.kv_heads, -1)).repeat_interleave(groups, dim=0).flatten(0, 1)
        mixer.g_proj.weight.copy_(0.5 * (out + value))
        mixer.g_proj.bias.zero_()
    if options.conv == "random":
        for conv in (mixer.q_conv, mixer.k_conv, mixer.v_conv):
            conv.weight.normal_(0.0, 0.02)


def _value_weight(mixer: Mixer) -> Tensor:
    own: Any = mixer
    if hasattr(mixer, "qkv_proj"):
        return own.qkv_proj.weight[-mixer.kv_heads * mixer.head_dim :]
    return own.v_proj.weight


@torch.no_grad()
def fit_start(
    source: Any,
    hybrid: Any,
    rows: Sequence[Tensor | Batch],
    options: StartOptions,
    advance: Callable[[int], None] | None = None,
) -> dict[int, float]:
    """Fit every mixer of `hybrid` to `source` on batches of token ids [B, T], layer by layer in one walk.

    Returns each converted layer's relative squared error after the fit. advance(tokens) is called as layers are done.
    """
    chosen = mixers(hybrid)
    for mixer in chosen.values():
        set_start(mixer, options)
    if not (options.calibrate or options.solve):
        return {}
    batches = [Batch.of(batch) for batch in rows]
    inputs = [layer_inputs(source.base_model, batch.ids, batch.positions) for batch in batches]
    layouts = [{"token_layout": token_layout(None, batch.positions, False)} for batch in batches]
    theirs = ours = [hidden for hidden, _ in inputs]
    apart = False  # whether a converted layer came before, so that the hybrid's hidden states differ from the source's
    errors: dict[int, float] = {}
    for i, layer in enumerate(source.base_model.layers[: max(chosen) + 1]):
        twin = hybrid.base_model.layers[i]
        kwargs = [arguments[i] | layout for (_, arguments), layout in zip(inputs, layouts, strict=True)]
        runs = [run_layer(layer, hidden, given) for hidden, given in zip(theirs, kwargs, strict=True)]
        if i in chosen:
            real = [batch.real[..., None] for batch in batches]
            pairs = _Pairs(chosen[i], twin, kwargs, real, theirs, ours, [output for _, output in runs])
            errors[i] = _fit(chosen[i], pairs, options)
            apart = options.follow
        theirs, before = [out for out, _ in runs], ours
        ours = theirs
        if apart:
            ours = [run_layer(twin, hidden, given)[0] for hidden, given in zip(before, kwargs, strict=True)]
        if advance is not None:
            advance(sum(batch.ids.numel() for batch in batches))
    return errors


@dataclass(frozen=True)
class _Pairs:
    """Features of one mixer, what its output should be, and how much each token counts, batch by batch."""

    mixer: Mixer
    twin: Any
    kwargs: list[dict[str, Any]]
    real: list[Tensor]
    theirs: list[Tensor]
    ours: list[Tensor]
    outputs: list[Tensor]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        batches = zip(self.kwargs, self.real, self.theirs, self.ours, self.outputs, strict=True)
        for kwargs, real, hidden_t, hidden_s, output in batches:
            given = attention_input(self.twin, hidden_s, kwargs)
            features = self.mixer.features(given, kwargs.get("position_embeddings"), kwargs["token_layout"])
            # The residual stream behind attention should stand where the source's stands.
            yield features, output + (hidden_t - hidden_s), token_weights(hidden_t, output) * real


def _fit(mixer: Mixer, pairs: _Pairs, options: StartOptions) -> float:
    projection: Any = mixer.o_proj
    squares = LeastSquares(projection.in_features, projection.out_features, projection.weight.device)
    bias = 0.0 if projection.bias is None else projection.bias
    for features, target, weights in pairs:
        squares.add(features, target - bias, weights)
    if options.calibrate and isinstance(mixer, StateSpaceMixer):
        factor = squares.scale(projection.weight)
        mixer.o_norm.weight.mul_(factor)
        squares.gram *= factor * factor
        squares.cross *= factor
    if options.solve:
        projection.weight.copy_(squares.solve(projection.weight, options.ridge))
    w = projection.weight.to(squares.dtype)
    residual = squares.energy - 2 * (w.T * squares.cross).sum().item() + ((w @ squares.gram) * w).sum().item()
    return residual / squares.energy if squares.energy and math.isfinite(residual) else math.inf
