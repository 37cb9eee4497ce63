"""End-to-end losses are the ones that plain forwards give, packed documents stay apart, and shared layers run once."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from training_case import RandomStream, pair

from hybridize.errors import UsageError
from hybridize.priming.batches import Batch
from hybridize.priming.objective import LossWeights, Objective
from hybridize.priming.roles import by_role, own_copies

ALL = LossWeights(cross_entropy=0.7, kl=0.5, hidden=0.3, temperature=1.5)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def train_only(hybrid, role="mixers", layers=(1, 3)):
    trained = by_role(hybrid, role, layers)
    hybrid.requires_grad_(False)
    for p in trained.values():
        p.requires_grad_(True)
    return trained


def documents(batch):
    """Each document of each row, alone: (ids [1, T], targets [1, T])."""
    for row in range(len(batch.ids)):
        starts = [*batch.positions[row].eq(0).nonzero().flatten().tolist(), batch.ids.shape[1]]
        for a, b in itertools.pairwise(starts):
            yield batch.ids[row : row + 1, a:b], batch.targets[row : row + 1, a:b]


def plain(teacher, hybrid, batch, w):
    """The weighted losses, document by document, from transformers' own forwards with all logits."""
    total = torch.zeros(())
    for ids, targets in documents(batch):
        with torch.no_grad():
            theirs, g = teacher(ids, use_cache=False), teacher.model(ids, use_cache=False)[0][:, :-1]
        ours, h = hybrid(ids, use_cache=False), hybrid.model(ids, use_cache=False)[0][:, :-1]
        mask = targets[:, 1:].float()
        nll = F.cross_entropy(ours.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        p = F.log_softmax(theirs.logits[:, :-1] / w.temperature, -1)
        q = F.log_softmax(ours.logits[:, :-1] / w.temperature, -1)
        kl = w.temperature**2 * (p.exp() * (p - q)).sum(-1)
        hidden = (h - g).square().sum(-1) / g.square().sum(-1)
        total = total + ((w.cross_entropy * nll + w.kl * kl + w.hidden * hidden) * mask).sum()
    return total


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "qwen3", "phi3", "mixtral"])
def test_packed_documents_give_what_each_gives_alone(case):
    teacher, hybrid = pair(case)
    trained = train_only(hybrid)
    batch = RandomStream(60).batch()
    assert (batch.positions[:, 1:] == 0).any()
    wanted = plain(teacher, hybrid, batch, ALL)
    gradients = torch.autograd.grad(wanted, list(trained.values()), allow_unused=True)
    objective = Objective(hybrid, ALL, teacher)
    assert objective.shared_layers == 1
    got = objective(batch)
    torch.testing.assert_close(got["loss"], wanted, atol=1e-3, rtol=1e-4)
    mine = torch.autograd.grad(got["loss"], list(trained.values()), allow_unused=True)
    for name, a, b in zip(trained, mine, gradients, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
    parts = ALL.cross_entropy * got["cross_entropy"] + ALL.kl * got["kl"] + ALL.hidden * got["hidden"]
    torch.testing.assert_close(got["loss"].detach(), parts)


def test_layers_before_the_first_converted_one_run_once_and_not_in_the_student():
    teacher, hybrid = pair(pattern="*-*-GDN-*")
    train_only(hybrid, layers=[2])
    runs = []
    for i, layer in enumerate(hybrid.base_model.layers):
        layer.mlp.register_forward_hook(lambda *unused, i=i: runs.append(i))
    Objective(hybrid, LossWeights(kl=1.0), teacher)(RandomStream(60).batch())["loss"].backward()
    # Layers 0, 1 and 3 are the very modules' tensors of both models, but hooks are on the hybrid's modules alone.
    assert runs == [2, 3]
    assert hybrid.base_model.layers[0].forward.__func__ is type(hybrid.base_model.layers[0]).forward


def test_nothing_is_shared_where_something_before_the_mixers_trains():
    teacher, hybrid = pair()
    own_copies(hybrid, by_role(hybrid, "mixers+norms+attention", [1, 3]))
    train_only(hybrid, "mixers+norms+attention")
    objective = Objective(hybrid, ALL, teacher)
    assert objective.shared_layers == 0
    batch = RandomStream(60).batch()
    torch.testing.assert_close(objective(batch)["loss"], plain(teacher, hybrid, batch, ALL), atol=1e-3, rtol=1e-4)


def test_no_teacher_is_kept_for_next_token_loss_alone():
    teacher, hybrid = pair()
    objective = Objective(hybrid, LossWeights(cross_entropy=1.0), teacher)
    teacher.register_forward_hook(lambda *unused: 1 / 0)
    teacher.base_model.register_forward_hook(lambda *unused: 1 / 0)
    assert sorted(objective(RandomStream(60).batch())) == ["cross_entropy", "loss"]
    assert not any(name.startswith("teacher") or "_teacher" in name for name, _ in objective.named_modules())


def test_a_batch_without_targets():
    teacher, hybrid = pair()
    train_only(hybrid)
    batch = RandomStream(60).batch()
    empty = Batch(batch.ids, batch.positions, torch.zeros_like(batch.targets))
    got = Objective(hybrid, ALL, teacher)(empty)
    got["loss"].backward()
    assert got["loss"] == 0 and not any(p.grad.any() for p in hybrid.parameters() if p.grad is not None)


@pytest.mark.parametrize("weights", [{}, {"kl": -1.0}, {"kl": float("nan")}, {"kl": 1.0, "temperature": 0.0}])
def test_weights_that_mean_nothing(weights):
    with pytest.raises(UsageError):
        LossWeights(**weights)


def test_roles_name_what_they_say():
    teacher, hybrid = pair("qwen3")
    mixers = by_role(hybrid, "mixers", [1, 3])
    assert {name.split(".")[2] for name in mixers} == {"1", "3"}
    assert all(".self_attn." in name for name in mixers) and "model.layers.1.self_attn.A_log" in mixers
    more = by_role(hybrid, "mixers+norms+attention", [1, 3])
    rest = set(dict(hybrid.named_parameters())) - set(more)
    assert set(mixers) < set(more) and {"model.norm.weight", "model.layers.0.input_layernorm.weight"} <= set(more)
    assert rest and all(".mlp." in name or "embed" in name or "lm_head" in name for name in rest)
    assert set(by_role(hybrid, "all", [1, 3])) == set(dict(hybrid.named_parameters()))
    assert sorted(by_role(teacher, "mixers", [1])) == sorted(
        f"model.layers.1.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    )


def test_own_copies_leave_the_source_alone_and_stay_tied():
    teacher, hybrid = pair("llama")  # its head is its embedding
    trained = own_copies(hybrid, by_role(hybrid, "all", [1, 3]))
    assert hybrid.lm_head.weight is hybrid.model.embed_tokens.weight is trained["model.embed_tokens.weight"]
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    with torch.no_grad():
        for p in trained.values():
            p.add_(1.0)
    assert all(torch.equal(p, before[name]) for name, p in teacher.named_parameters())
    assert all(p is trained[name] for name, p in hybrid.named_parameters())
