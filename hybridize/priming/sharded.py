"""The trainer on several devices: FSDP2 (fully_shard on each decoder layer), under torchrun, for the same loss curve.

Every process draws the same batches from its own stream and takes its share of the rows. A frozen teacher is not
sharded: each device holds it whole. A sharded model cannot be made whole again, so a stage shards another one that
holds the same tensors, and takes over what that has learned.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from hybridize.hybrid.walk import entry_device
from hybridize.mixers.base import Mixer
from hybridize.priming.batches import Batch, check_shares
from hybridize.priming.masters import Masters
from hybridize.priming.objective import Objective
from hybridize.priming.trainer import Trainer
from hybridize.processes import share, world


def shard(objective: Objective, dtype: torch.dtype = torch.float32) -> None:
    """Shard the student over the processes of the default group: fp32 masters stay on their shards, `dtype` computes.

    Which parameters train must be set before; collect them by name afterwards, since sharding puts others in place.
    """
    mesh = init_device_mesh(entry_device(objective.student).type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Decays are computed in fp32, as everywhere: rounded to bf16, long memories would be lost.
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in objective.student.base_model.layers:
        parameters = dict(layer.named_parameters())
        decays = {p for name, p in parameters.items() if name.rsplit(".", 1)[-1] in Mixer.fp32_names}
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=decays)
        if decays:
            rest = set(layer.parameters()) - decays
            fully_shard(layer.self_attn, mesh=mesh, mp_policy=exact, ignored_params=rest)
    # The objective is the root, so that embeddings, final norm and head are whole while the loss is made.
    fully_shard(objective, mesh=mesh, mp_policy=policy)


class Sharding:
    """A whole model's stay in shards: made before its training, and undone by `restore` with the weights it gave.

    Meanwhile the whole model is on the CPU, but for what it shares with a teacher.
    """

    def __init__(self, objective: Objective, teacher: Any, dtype: torch.dtype):
        self.model, self.device = objective.student, entry_device(objective.student)
        objective.student = _twin(self.model)
        shard(objective, dtype)
        shared = set() if teacher is None else {id(p) for p in teacher.parameters()}
        self.away = [p for p in self.model.parameters() if id(p) not in shared]
        for p in self.away:
            p.data = p.data.cpu()
        self.teacher = None if teacher is None else Masters(teacher, {}, dtype)

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Make the model whole again, with these in place of its own."""
        if self.teacher is not None:
            self.teacher.restore()
        for p in self.away:
            p.data = p.data.to(self.device)
        for name, p in self.model.named_parameters():
            if name in weights:
                p.data = weights[name].detach().to(self.device)


def _twin(model: Any) -> Any:
    """Another model of the same tensors."""
    return copy.deepcopy(model, {id(x): x for x in [*model.parameters(), *model.buffers()]})


class ShardedTrainer(Trainer):
    """A trainer of a sharded objective; steps, checkpoints and results are those of one process."""

    def state(self) -> dict[str, Any]:
        """As one process has it, with whole tensors; every process must call, and one writes."""
        return _whole(super().state())

    @torch.no_grad()
    def held_out(self, rows: Batch, batch_size: int) -> float:
        sums = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, len(rows.ids), batch_size):
            batch = rows.part(slice(start, start + batch_size))
            mine = self._share(_filled(batch, -len(batch.ids) % world())).to(self.device)
            sums += self.objective(mine, score=True)["loss"].double()
        dist.all_reduce(sums)
        return sums.item() / int(rows.targets[:, 1:].sum())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        super().load_weights({name: _spread(weights[name], like) for name, like in self.masters.masters.items()})

    def load_state(self, state: dict[str, Any]) -> None:
        order = [p for group in self.optimiser.param_groups for p in group["params"]]
        moments = {
            i: {key: _spread(x, order[i]) if x.dim() else x for key, x in entry.items()}
            for i, entry in state["optimiser"]["state"].items()
        }
        optimiser = {**state["optimiser"], "state": moments}
        super().load_state({**state, "optimiser": optimiser})

    def _share(self, batch: Batch) -> Batch:
        check_shares(len(batch.ids))
        return batch.part(share())

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


def _filled(batch: Batch, missing: int) -> Batch:
    """The batch with `missing` more rows, in which nothing is to be predicted."""
    more = batch.part(slice(0, 1))
    return Batch(
        torch.cat([batch.ids, more.ids.expand(missing, -1)]),
        torch.cat([batch.positions, more.positions.expand(missing, -1)]),
        torch.cat([batch.targets, torch.zeros_like(more.targets).expand(missing, -1)]),
    )


def _whole(tree: Any) -> Any:
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def _spread(x: Tensor, like: Any) -> Tensor:
    return distribute_tensor(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x
