"""The trainer on several devices: FSDP2 (fully_shard on each decoder layer), under torchrun, for the same loss curve.

Every process draws the same batches from its own stream and takes its share of the rows. A frozen teacher is not
sharded: each device holds it whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from hybridize.errors import UsageError
from hybridize.priming.batches import Batch
from hybridize.priming.objective import Objective
from hybridize.priming.trainer import Trainer


def shard(objective: Objective, dtype: torch.dtype = torch.float32) -> None:
    """Shard the student over the processes of the default group: fp32 masters stay on their shards, `dtype` computes.

    Which parameters train must be set before; collect them by name afterwards, since sharding puts others in place.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in objective.student.base_model.layers:
        fully_shard(layer, mp_policy=policy)
    # The objective is the root, so that embeddings, final norm and head are whole while the loss is made.
    fully_shard(objective, mp_policy=policy)


class ShardedTrainer(Trainer):
    """A trainer of a sharded objective; steps, checkpoints and results are those of one process."""

    def state(self) -> dict[str, Any]:
        """As one process has it, with whole tensors; every process must call, and one writes."""
        return _whole(super().state())

    def load_state(self, state: dict[str, Any]) -> None:
        masters = self.masters.masters
        weights = {name: _spread(state["weights"][name], like) for name, like in masters.items()}
        order = [p for group in self.optimiser.param_groups for p in group["params"]]
        moments = {
            i: {key: _spread(x, order[i]) if x.dim() else x for key, x in entry.items()}
            for i, entry in state["optimiser"]["state"].items()
        }
        optimiser = {**state["optimiser"], "state": moments}
        super().load_state({**state, "weights": weights, "optimiser": optimiser})

    def _next(self) -> Batch:
        batch = super()._next()
        rank, world = dist.get_rank(), dist.get_world_size()
        if len(batch.ids) % world:
            raise UsageError(f"{len(batch.ids)} rows a batch cannot be shared by {world} processes; give a multiple.")
        mine = slice(rank, None, world)
        return replace(batch, ids=batch.ids[mine], positions=batch.positions[mine], targets=batch.targets[mine])

    def _count(self, batches: list[Batch]) -> int:
        count = torch.stack([batch.targets[:, 1:].sum() for batch in batches]).sum()
        dist.all_reduce(count)
        return max(1, int(count))

    def _backward(self, loss: Tensor) -> None:
        (loss * dist.get_world_size()).backward()  # FSDP averages over the processes; a step is a sum over tokens

    def _totals(self, sums: dict[str, Tensor]) -> list[Tensor]:
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total)
        return list(total.unbind())

    def _norm(self) -> Tensor:
        norm: Tensor = _whole(super()._norm())
        return norm

    def _finite(self, grad: Tensor) -> bool:
        return super()._finite(_whole(grad))


def _whole(tree: Any) -> Any:
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def _spread(x: Tensor, like: Any) -> Tensor:
    return distribute_tensor(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x
