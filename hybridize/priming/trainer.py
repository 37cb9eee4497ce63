"""One optimiser step after another on an objective: accumulate, clip, check, update, and say what it did."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.errors import UsageError
from hybridize.hybrid.walk import entry_device, first
from hybridize.priming.align import DivergedError
from hybridize.priming.batches import Batch, Stream
from hybridize.priming.masters import Masters
from hybridize.priming.objective import Objective
from hybridize.priming.roles import ROLES, decays, layer_of
from hybridize.priming.schedule import SCHEDULES, rate
from hybridize.tasks.perplexity import mean_loss


@dataclass(frozen=True)
class TrainOptions:
    """How a stage trains.

    role: what trains (ROLES); lr: peak learning rate of AdamW; schedule and warmup: see `rate`; decay: weight decay, of
    matrices only; clip: largest gradient norm; accumulate: batches a step; recompute: gradient checkpointing, which
    gives up activations and pays with a second forward.
    """

    role: str = "mixers"
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup: float = 0.05
    decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (("role", self.role, ROLES), ("schedule", self.schedule, SCHEDULES)):
            if value not in known:
                raise UsageError(f"There is no {what} {value!r}; there are {', '.join(known)}.")
        if not (0 < self.lr < math.inf and self.clip > 0 and 0 <= self.decay < math.inf and 0 <= self.warmup <= 1):
            raise UsageError(
                f"Learning rate {self.lr}, clip {self.clip}, weight decay {self.decay}, warmup {self.warmup}: the "
                "first two must be above 0, the third not below it, and the last a share from 0 to 1."
            )
        if self.accumulate < 1:
            raise UsageError(f"{self.accumulate} batches a step cannot be; it must be at least 1.")


class Trainer:
    """Masters, optimiser and stream of one stage; `step` is one update, `state` all that a resumed run needs."""

    def __init__(
        self,
        objective: Objective,
        trained: dict[str, nn.Parameter],
        stream: Stream,
        options: TrainOptions,
        total_steps: int,
        dtype: torch.dtype = torch.float32,
        teacher: Any = None,
    ):
        self.objective, self.stream, self.options, self.total_steps = objective, stream, options, total_steps
        self.device = entry_device(objective.student)
        self.masters = Masters(objective.student, trained, dtype, teacher)
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, master in self.masters.masters.items():
            groups[decays(name, trained[name])].append(master)
        self.optimiser = torch.optim.AdamW(
            [{"params": groups[True], "weight_decay": options.decay}, {"params": groups[False], "weight_decay": 0.0}],
            lr=options.lr,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.steps_done = 0
        if options.recompute:
            recompute_layers(objective.student)

    def step(self) -> dict[str, float]:
        """One update; returns means per predicted token of the loss and its parts, before it, and the gradient norm.

        Raises DivergedError, and leaves the weights as they are, when the loss or a gradient is not finite.
        """
        batches = [self._share(self.stream.batch()).to(self.device) for _ in range(self.options.accumulate)]
        # All of a step's tokens count the same, whatever batch they came in.
        count = self._count(batches)
        self.optimiser.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for batch in batches:
            parts = self.objective(batch)
            self._backward(parts["loss"] / count)
            self.masters.collect()
            for name, value in parts.items():
                sums[name] = sums.get(name, 0) + value.detach().float()
        norm = self._norm()
        values = torch.stack([*self._totals(sums), norm.float()]).tolist()
        result = {name: value / count for name, value in zip(sums, values, strict=False)}
        self._check(result["loss"], values[-1], batches)
        self._clip(norm)
        share = rate(self.options.schedule, self.steps_done, self.total_steps, self.options.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = share * self.options.lr
        self.optimiser.step()
        self.masters.publish()
        self.steps_done += 1
        return {**result, "tokens": count, "norm": values[-1], "lr": share * self.options.lr}

    def held_out(self, rows: Batch, batch_size: int) -> float:
        """The student's mean loss in nats over the targets of rows, as it is now."""
        return mean_loss(self.objective.student, rows.ids, batch_size, None, rows.positions, rows.targets)

    # -- what a resumed run needs --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Weights that train, optimiser, place in the stream, step, and the random numbers' state; not copied."""
        return {
            "step": self.steps_done,
            "weights": {name: x.detach() for name, x in self.masters.masters.items()},
            "optimiser": self.optimiser.state_dict(),
            "stream": self.stream.state(),
            "rng": torch.get_rng_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state()`: the next steps are the ones that would have followed."""
        self.load_weights(state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.stream.load_state(state["stream"])
        self.steps_done = state["step"]
        torch.set_rng_state(state["rng"].cpu())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over the `weights` of a `state()`."""
        self.masters.load(weights)

    # -- the parts of a step -------------------------------------------------------------------------------------------

    def _share(self, batch: Batch) -> Batch:
        """What this process computes on."""
        return batch

    def _count(self, batches: list[Batch]) -> int:
        """Predicted tokens of a step, at least 1 to divide by."""
        return max(1, sum(int(batch.targets[:, 1:].sum()) for batch in batches))

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _totals(self, sums: dict[str, Tensor]) -> list[Tensor]:
        return list(sums.values())

    def _gradients(self) -> dict[str, Tensor]:
        return {name: x.grad for name, x in self.masters.masters.items() if x.grad is not None}

    def _norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(list(self._gradients().values()))

    def _clip(self, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(list(self.masters.masters.values()), self.options.clip, norm)

    def _check(self, loss: float, norm: float, batches: list[Batch]) -> None:
        if not math.isfinite(loss):
            layer = self._first_broken(batches)
            where = "" if layer is None else f": layer {layer} is the first whose output is not finite"
            raise DivergedError(f"The loss became {loss} at step {self.steps_done}{where}.")
        if not math.isfinite(norm):
            broken = [name for name, grad in self._gradients().items() if not self._finite(grad)]
            # In every layer finite, and only the sum of squares too large: then there is no first one.
            name = min(broken, key=lambda name: (layer_of(name) is None, layer_of(name) or 0), default="")
            layer = layer_of(name)
            where = f": {name if layer is None else f'layer {layer}'} is the first whose gradient is not finite"
            raise DivergedError(f"The gradient norm became {norm} at step {self.steps_done}{where if name else ''}.")

    def _finite(self, grad: Tensor) -> bool:
        return bool(grad.isfinite().all())

    @torch.no_grad()
    def _first_broken(self, batches: list[Batch]) -> int | None:
        """The first layer that gives something not finite, in one more forward."""
        broken: list[int] = []
        hooks = [
            layer.register_forward_hook(
                lambda module, args, output, i=i: None if first(output).isfinite().all() else broken.append(i)
            )
            for i, layer in enumerate(self.objective.student.base_model.layers)
        ]
        try:
            for batch in batches:
                self.objective(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return min(broken, default=None)


def keep_activations(model: Any) -> None:
    """Undo `recompute_layers`: a model in that state cannot use a cache."""
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
    for layer in model.base_model.layers:
        layer.training = False


def recompute_layers(model: Any) -> None:
    """Switch gradient checkpointing on; the modules inside the layers stay in eval mode, so that nothing drops out."""
    # transformers 5.24 renamed the method.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in model.base_model.layers:
        layer.training = True
