"""What each of two processes runs under torchrun: a few steps, sharded; the first one writes what they gave."""

import copy
import sys

import torch
import torch.distributed as dist
from training_case import RandomStream, pair

from hybridize.priming.objective import LossWeights, Objective
from hybridize.priming.roles import by_role, own_copies
from hybridize.priming.sharded import ShardedTrainer, shard
from hybridize.priming.trainer import Trainer, TrainOptions

ROLES = {"mixers": LossWeights(kl=1.0, hidden=0.2), "all": LossWeights(cross_entropy=1.0, kl=0.3)}


def trainer(role, sharded):
    teacher, hybrid = pair("llama")  # tied embeddings
    trained = by_role(hybrid, role, [1, 3])
    if role != "mixers":
        trained = own_copies(hybrid, trained)
    hybrid.requires_grad_(False)
    for p in trained.values():
        p.requires_grad_(True)
    objective = Objective(hybrid, ROLES[role], teacher)
    options = TrainOptions(role, lr=1e-2, accumulate=2, recompute=role == "all")
    if not sharded:
        return Trainer(objective, trained, RandomStream(60), options, 6)
    shard(objective)
    return ShardedTrainer(objective, by_role(hybrid, role, [1, 3]), RandomStream(60), options, 6)


def steps(one, count):
    return [one.step() for _ in range(count)]


def main(path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for role in ROLES:
        one = trainer(role, sharded=True)
        before = steps(one, 3)
        saved = copy.deepcopy(one.state())
        after = steps(one, 3)
        again = trainer(role, sharded=True)
        again.load_state(saved)
        results[role] = {"lines": before + after, "again": steps(again, 3), "state": one.state()}
        assert any(type(p).__name__ == "DTensor" for p in one.masters.trained.values())
    if dist.get_rank() == 0:
        torch.save(results, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
