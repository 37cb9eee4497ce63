"""The trainer: steps that add up, masters that keep what bf16 loses, and runs that end the same, killed or not."""

import errno
import itertools
import json
import random

import pytest
import torch
from training_case import RandomStream, pair

from hybridize.console import Console
from hybridize.errors import Interrupted, UsageError
from hybridize.priming.align import DivergedError
from hybridize.priming.checkpoints import read_checkpoint, write_checkpoint
from hybridize.priming.loop import Steps, run_steps
from hybridize.priming.objective import LossWeights, Objective
from hybridize.priming.roles import by_role, decays, own_copies
from hybridize.priming.trainer import Trainer, TrainOptions

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def trainer(weights=None, rows=2, steps=6, dtype=torch.float32, case="llama", role="mixers", **options):
    teacher, hybrid = pair(case)
    trained = by_role(hybrid, role, [1, 3])
    if role != "mixers":
        trained = own_copies(hybrid, trained)
    hybrid.requires_grad_(False)
    for p in trained.values():
        p.requires_grad_(True)
    objective = Objective(hybrid, weights or LossWeights(kl=1.0), teacher)
    return Trainer(objective, trained, RandomStream(60, rows), TrainOptions(role, **options), steps, dtype, teacher)


class Halves(RandomStream):
    """The same batches, row by row: two batches for one."""

    held = ()

    def batch(self):
        if not self.held:
            whole = super().batch()
            self.held = [
                type(whole)(whole.ids[i, None], whole.positions[i, None], whole.targets[i, None]) for i in (1, 0)
            ]
        return self.held.pop()


def weights_of(one):
    return {name: x.detach().clone() for name, x in one.masters.masters.items()}


def assert_close(a, b, **how):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **how)


def test_accumulated_batches_are_one_batch():
    whole, split = trainer(), trainer(accumulate=2)
    split.stream = Halves(60)
    for _ in range(3):
        a, b = whole.step(), split.step()
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["tokens"] == b["tokens"]
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-4)
    assert_close(weights_of(whole), weights_of(split), atol=1e-4, rtol=1e-3)


def test_recomputed_activations_change_nothing():
    plain, less = trainer(role="all"), trainer(role="all", recompute=True)
    runs = []
    less.objective.student.base_model.layers[2].input_layernorm.register_forward_hook(lambda *unused: runs.append(1))
    for _ in range(2):
        assert plain.step() == less.step()
    assert len(runs) == 4  # every step's forward, and once more for its backward
    assert_close(weights_of(plain), weights_of(less), atol=0, rtol=0)


def test_a_step_is_adamw_with_a_clipped_gradient_and_the_schedules_rate():
    one = trainer(lr=1e-2, clip=0.5, decay=0.1, warmup=0.5)
    name = "model.layers.1.self_attn.q_proj.weight"
    before = weights_of(one)
    batch = RandomStream(60).batch()
    (loss,) = [one.objective(batch)["loss"] / batch.targets[:, 1:].sum()]
    grads = dict(zip(before, torch.autograd.grad(loss, list(one.masters.trained.values())), strict=True))
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    got = one.step()
    assert got["norm"] == pytest.approx(norm.item(), rel=1e-5) and got["lr"] == pytest.approx(1e-2 / 3)
    lr, scale = got["lr"], min(1.0, 0.5 / norm)
    for name, x in before.items():
        g = grads[name] * scale
        x = x * (1 - lr * 0.1) if decays(name, one.masters.trained[name]) else x
        wanted = x - lr * g / (g.abs() + 1e-8)  # AdamW's first step
        torch.testing.assert_close(weights_of(one)[name], wanted, atol=1e-5, rtol=1e-4)
    assert decays("model.layers.1.self_attn.q_proj.weight", torch.nn.Parameter(before[name].new_zeros(2, 2)))
    for name in ("l.o_norm.weight", "l.q_conv.weight", "l.input_layernorm.weight"):
        assert not decays(name, torch.nn.Parameter(torch.zeros(2, 2)))


def test_bf16_masters_keep_small_updates_and_frozen_bits():
    one = trainer(LossWeights(cross_entropy=1.0, kl=0.1), dtype=torch.bfloat16, lr=1e-5, schedule="constant", warmup=0)
    model = one.objective.student
    exact = trainer().objective.student.state_dict()
    assert {p.dtype for n, p in model.named_parameters() if n.endswith(("A_log", "dt_bias"))} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if not n.endswith(("A_log", "dt_bias"))} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    before = weights_of(one)
    for _ in range(3):
        one.step()
    after = weights_of(one)
    assert all(x.dtype == torch.float32 and not torch.equal(x, before[n]) for n, x in after.items() if "bias" not in n)
    name = "model.layers.1.self_attn.q_proj.weight"
    same = (model.state_dict()[name] == before[name].bfloat16()).float().mean()
    assert same > 0.5  # updates of 1e-5 are below what bf16 resolves: only the masters see them
    one.masters.restore()
    for name, x in model.state_dict().items():
        assert x.dtype == torch.float32
        assert torch.equal(x, after[name] if name in after else exact[name]), name


def test_bf16_follows_fp32():
    exact, small = trainer(steps=20), trainer(steps=20, dtype=torch.bfloat16)
    for _ in range(20):
        a, b = exact.step()["loss"], small.step()["loss"]
        assert b == pytest.approx(a, rel=0.1)


def test_training_lowers_the_loss_and_leaves_the_source():
    one = trainer(steps=30, lr=1e-2, role="all")
    teacher = one.objective._teacher[0]
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    losses = [one.step()["loss"] for _ in range(30)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert all(torch.equal(p, before[name]) for name, p in teacher.named_parameters())


# -- stopping and going on ---------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def run(folder, steps=12, kill=None, monkeypatch=None, **options):
    """One process's share of a run: from the checkpoint, if there is one, to the end or to the `kill`."""
    from hybridize.priming import loop

    clock = itertools.count()
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(loop, "SAVE_AFTER", 1.5)  # the clock ticks twice a save: a checkpoint every other step
    one = trainer(steps=steps, role="mixers+norms+attention", lr=1e-2, **options)
    saved = read_checkpoint(folder / "checkpoint.pt", CPU)
    if saved:
        one.load_state(saved)

    def take(step):
        if kill == ("step", step):
            raise Killed
        assert step == one.steps_done
        return one.step()

    def save():
        if kill == ("save", one.steps_done):
            (folder / ".checkpoint.pt.partial").write_bytes(b"half")
            raise Killed
        write_checkpoint(folder / "checkpoint.pt", one.state())

    work = Steps("adapt", one.steps_done, steps, 48, take, save)
    run_steps(work, folder, folder / "log.jsonl", ["align"], Console(quiet=True), False)
    return one


def test_killed_at_random_steps_it_ends_with_the_same_weights(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run(tmp_path / "whole", 30, monkeypatch=monkeypatch)
    pick = random.Random(0)
    log = tmp_path / "killed" / "log.jsonl"
    log.write_text('{"stage": "align", "step": 40, "loss": 1.0}\n')
    for _ in range(10):
        saved = read_checkpoint(tmp_path / "killed" / "checkpoint.pt", CPU)
        done = saved["step"] if saved else 0
        kill = pick.choice([("save", done + 2), ("step", done + pick.randint(1, 5))])
        with pytest.raises(Killed):
            run(tmp_path / "killed", 30, kill, monkeypatch)
        with log.open("a") as file:
            file.write('{"stage": "adapt", "st')  # cut short
    last = run(tmp_path / "killed", 30, monkeypatch=monkeypatch)
    assert_close(weights_of(whole), weights_of(last), atol=0, rtol=0)
    first, *lines = log.read_text().splitlines(keepends=True)
    assert json.loads(first)["stage"] == "align"
    assert "".join(lines) == (tmp_path / "whole" / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in lines] == list(range(30))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, monkeypatch):
    import signal

    step = Trainer.step

    def pressed(self):
        if self.steps_done == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "step", pressed)
    with pytest.raises(Interrupted, match=r"Stopped after 3 of 12 steps.*--resume"):
        run(tmp_path, monkeypatch=monkeypatch)
    assert read_checkpoint(tmp_path / "checkpoint.pt", CPU)["step"] == 3


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    write_checkpoint(path, {"step": 1})
    save = torch.save

    def full(content, file):
        save({"step": 2}, file)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError):
        write_checkpoint(path, {"step": 2})
    assert read_checkpoint(path, CPU) == {"step": 1} and [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_divergence_names_step_layer_and_the_last_good_checkpoint(tmp_path, monkeypatch):
    step = Trainer.step

    def poisoned(self):
        if self.steps_done == 2:
            self.objective.student.model.layers[3].self_attn.o_proj.weight.data[0, 0] = float("nan")
        return step(self)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(DivergedError, match=r"loss became nan at step 2: layer 3 .* checkpoint, of step 2, is in"):
        run(tmp_path, monkeypatch=monkeypatch)
    assert all(x.isfinite().all() for x in read_checkpoint(tmp_path / "checkpoint.pt", CPU)["weights"].values())


def test_a_gradient_that_is_not_finite_is_found_and_not_applied():
    one = trainer()
    before = weights_of(one)
    one.masters.trained["model.layers.3.self_attn.A_log"].register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(DivergedError, match=r"gradient norm became .* at step 0: layer 3 is the first"):
        one.step()
    assert_close(weights_of(one), before, atol=0, rtol=0)


@pytest.mark.parametrize(
    "options",
    [{"role": "heads"}, {"schedule": "steps"}, {"lr": 0.0}, {"lr": float("nan")}, {"clip": 0}, {"accumulate": 0}],
)
def test_options_that_mean_nothing(options):
    with pytest.raises(UsageError):
        TrainOptions(**options)
