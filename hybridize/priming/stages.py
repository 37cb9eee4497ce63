"""The stages after align: distill (the hybrid learns the source's outputs, end to end) and adapt (it learns text)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridize.priming.align import DivergedError
from hybridize.priming.batches import Stream
from hybridize.priming.checkpoints import read_checkpoint, write_checkpoint
from hybridize.priming.objective import LossWeights, Objective
from hybridize.priming.roles import by_role, own_copies
from hybridize.priming.trainer import Trainer, TrainOptions, keep_activations
from hybridize.processes import world

BEST = "best.pt"


@dataclass(frozen=True)
class StageOptions:
    """What an end-to-end stage minimises, and how."""

    loss: LossWeights = field(default_factory=lambda: LossWeights(kl=1.0))
    train: TrainOptions = field(default_factory=TrainOptions)

    @staticmethod
    def read(raw: dict[str, Any]) -> StageOptions:
        """From what asdict made of it."""
        return StageOptions(LossWeights(**raw["loss"]), TrainOptions(**raw["train"]))


DISTILL = StageOptions()
ADAPT = StageOptions(LossWeights(cross_entropy=1.0), TrainOptions(role="all", lr=3e-4))


class Stage:
    """One end-to-end stage on a model: its trainer, and the best weights so far where it is evaluated on the way.

    The teacher is only needed where the loss asks for it. Without one, the model may move tensors that it shares with
    its source; with one, it gets its own copies of what trains.
    """

    def __init__(
        self,
        model: Any,
        teacher: Any,
        converted: Iterable[int],
        options: StageOptions,
        stream: Stream,
        steps: int,
        dtype: torch.dtype,
        folder: Path,
        evaluate: Callable[[Trainer], float],
        evaluate_steps: int,
    ):
        teacher = teacher if options.loss.needs_teacher else None
        trained = by_role(model, options.train.role, converted)
        if teacher is not None and options.train.role != "mixers":
            trained = own_copies(model, trained)
        model.requires_grad_(False)
        for p in trained.values():
            p.requires_grad_(True)
        objective = Objective(model, options.loss, teacher)
        self.sharding: Any = None
        if world() > 1:
            # Not every torch has what this needs.
            from hybridize.priming.sharded import ShardedTrainer, Sharding

            self.sharding = Sharding(objective, teacher, dtype)
            trained = by_role(objective.student, options.train.role, converted)
            self.trainer: Trainer = ShardedTrainer(objective, trained, stream, options.train, steps)
        else:
            self.trainer = Trainer(objective, trained, stream, options.train, steps, dtype, teacher)
        self.model, self.evaluate, self.evaluate_steps = model, evaluate, evaluate_steps
        self.best_file = folder / BEST
        self.best: dict[str, float] = {}

    def step(self) -> dict[str, Any]:
        """One update, and where one is due an evaluation; returns the line for the loss curve."""
        trainer = self.trainer
        line: dict[str, Any] = trainer.step()
        done = trainer.steps_done
        if self.evaluate_steps and (done % self.evaluate_steps == 0 or done == trainer.total_steps):
            line["held_out"] = loss = self.evaluate(trainer)
            if not math.isfinite(loss):
                raise DivergedError(f"The held-out loss became {loss} after step {done - 1}.")
            if loss < self.best.get("held_out", math.inf):
                self.best = {"held_out": loss, "step": done}
                write_checkpoint(self.best_file, {"weights": trainer.state()["weights"], **self.best})
        return line

    def state(self) -> dict[str, Any]:
        """What `load_state` goes on from."""
        return {**self.trainer.state(), "best": self.best}

    def load_state(self, state: dict[str, Any]) -> None:
        self.trainer.load_state(state)
        self.best = state["best"]

    def finish(self) -> int:
        """Leave the model in fp32 with the best evaluated weights, or else the last; returns the step they are of."""
        step = self.trainer.steps_done
        if self.best and self.best["step"] != step:
            best = read_checkpoint(self.best_file, self.trainer.device)
            if best is not None and best["step"] == self.best["step"]:
                self.trainer.load_weights(best["weights"])
                step = int(best["step"])
        if self.sharding is None:
            self.trainer.masters.restore()
        else:
            self.sharding.restore(self.trainer.state()["weights"])
        self.model.requires_grad_(False)
        keep_activations(self.model)
        return step
