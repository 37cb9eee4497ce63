"""Stage align: every mixer learns its attention layer's output, with no backward pass through the model's body."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridize.errors import HybridizeError
from hybridize.hybrid.model import mixers
from hybridize.hybrid.walk import first, token_weights
from hybridize.mixers.base import Mixer
from hybridize.mixers.tokens import token_layout
from hybridize.priming.batches import Batch
from hybridize.processes import total, world


@dataclass(frozen=True)
class AlignOptions:
    """lr: peak learning rate of AdamW; warmup: share of the steps; clip: largest gradient norm of one mixer.

    follow: mixers learn on the hybrid's own hidden states (and make good what earlier layers lost) instead of the
    source's; this costs a second forward.
    """

    lr: float = 4e-3
    warmup: float = 0.05
    clip: float = 1.0
    follow: bool = False


class DivergedError(HybridizeError):
    """The loss or a gradient is no longer a finite number."""


class _Done(Exception):
    """Ends the source's forward behind the last converted layer."""


class Aligner:
    """Holds the mixers' optimiser; `step` is one update on a batch of token ids."""

    def __init__(self, source: Any, hybrid: Any, options: AlignOptions, total_steps: int):
        self.source, self.hybrid, self.options, self.total_steps = source, hybrid, options, total_steps
        self.mixers = mixers(hybrid)
        self.last = max(self.mixers)
        parameters = [p for mixer in self.mixers.values() for p in mixer.parameters()]
        hybrid.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)
        fused = parameters[0].device.type == "cuda"
        self.optimiser = torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.steps_done = 0

    def learning_rate(self) -> float:
        """Linear warmup, then a cosine to a tenth of the peak."""
        warm = max(1, round(self.options.warmup * self.total_steps))
        if self.steps_done < warm:
            return self.options.lr * (self.steps_done + 1) / warm
        share = (self.steps_done - warm) / max(1, self.total_steps - warm)
        return self.options.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def step(self, rows: Tensor | Batch) -> dict[int, float]:
        """One update on token ids [B, T]; returns each converted layer's relative squared error before the update."""
        self.optimiser.zero_grad(set_to_none=True)
        batch = Batch.of(rows)
        losses = self._add_up(self._follow(batch) if self.options.follow else self._imitate(batch))
        norms = [torch.nn.utils.clip_grad_norm_(self.mixers[i].parameters(), self.options.clip) for i in losses]
        # One read from the device for both; checked before the update, so that a checkpoint never holds a broken one.
        values, sizes = torch.stack([torch.stack(list(losses.values())), torch.stack(norms).float()]).tolist()
        for layer, value, norm in zip(losses, values, sizes, strict=True):
            for what, number in (("alignment loss", value), ("gradient norm", norm)):
                if not math.isfinite(number):
                    raise DivergedError(f"The {what} of layer {layer} became {number} at step {self.steps_done}.")
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        self.optimiser.step()
        self.steps_done += 1
        return dict(zip(losses, values, strict=True))

    def _add_up(self, found: dict[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """Each layer's loss over the rows of all processes, and its gradients in all of them."""
        if world() == 1:
            return {layer: loss for layer, (loss, _) in found.items()}
        own = torch.stack([energy for _, energy in found.values()])
        losses = torch.stack([loss for loss, _ in found.values()])
        energies = total(own.clone())
        # A loss is a sum of errors over a sum of energies, so it counts as the energy that it is relative to.
        for layer, share in zip(found, own / energies, strict=True):
            for p in self.mixers[layer].parameters():
                if p.grad is not None:
                    total(p.grad.mul_(share))
        return dict(zip(found, total(losses * own / energies), strict=True))

    def _imitate(self, batch: Batch) -> dict[int, tuple[Tensor, Tensor]]:
        """Mixers see the source's hidden states: one forward of the source, each mixer's backward on the way."""
        losses: dict[int, tuple[Tensor, Tensor]] = {}
        learner = _Learner(self.mixers, batch)
        streams: dict[int, Tensor] = {}

        def learn(layer: int, given: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
            losses[layer] = learner.learn(layer, given, output, token_weights(streams[layer], output), kwargs)

        self._run(self.source, batch, streams, learn)
        return losses

    def _follow(self, batch: Batch) -> dict[int, tuple[Tensor, Tensor]]:
        """Mixers see the hybrid's hidden states and aim where the source's residual stream stands behind attention."""
        goals: dict[int, tuple[Tensor, Tensor]] = {}
        losses: dict[int, tuple[Tensor, Tensor]] = {}
        learner = _Learner(self.mixers, batch)
        theirs: dict[int, Tensor] = {}
        ours: dict[int, Tensor] = {}

        def remember(layer: int, given: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
            goals[layer] = (theirs.pop(layer), output)

        def learn(layer: int, given: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
            hidden, wanted = goals.pop(layer)
            target = wanted + (hidden - ours.pop(layer))
            losses[layer] = learner.learn(layer, given, target, token_weights(hidden, wanted), kwargs)

        self._run(self.source, batch, theirs, remember)
        self._run(self.hybrid, batch, ours, learn)
        return losses

    def _run(
        self,
        model: Any,
        batch: Batch,
        streams: dict[int, Tensor],
        see: Callable[[int, Tensor, Tensor, dict[str, Any]], None],
    ) -> None:
        """Forward up to the last converted layer; `streams` gets what enters each, `see` what its attention gave."""

        def enter(layer: int) -> Callable[..., None]:
            def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
                streams[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        def leave(layer: int) -> Callable[..., None]:
            def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
                see(layer, args[0] if args else kwargs["hidden_states"], first(output), kwargs)
                if layer == self.last:
                    raise _Done

            return hook

        hooks = []
        for i in self.mixers:
            layer = model.base_model.layers[i]
            hooks.append(layer.register_forward_pre_hook(enter(i), with_kwargs=True))
            hooks.append(layer.self_attn.register_forward_hook(leave(i), with_kwargs=True))
        try:
            with torch.no_grad():
                model.base_model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
        except _Done:
            pass
        finally:
            for hook in hooks:
                hook.remove()


class _Learner:
    """Backward passes of single mixers on one batch: where its documents begin, and which tokens are padding."""

    def __init__(self, mixers: dict[int, Mixer], batch: Batch):
        self.mixers, self.real = mixers, batch.real[..., None]
        self.layout = token_layout(None, batch.positions, False)

    def learn(
        self, layer: int, given: Tensor, target: Tensor, weights: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Backward of the weighted relative squared error of mixer(given) into the mixer's parameters.

        Returns it, and the weighted square of the target that it is relative to.
        """
        mixer, weights, target = self.mixers[layer], weights * self.real, target.detach().float()
        projection: Any = mixer.o_proj
        given = given.detach().to(projection.weight.dtype)  # mixers may be in fp32 beside a smaller source
        with torch.enable_grad():
            # Not mixer(...): that would run the hook that called us.
            output = projection(mixer.features(given, kwargs.get("position_embeddings"), self.layout))
            error = ((output.float() - target).square() * weights).sum()
            energy = (target.square() * weights).sum().clamp(min=1e-12)
            loss = error / energy
            loss.backward()
        return loss.detach(), energy
