"""Stages distill and adapt in `prime`: what they read, what they change, and that a stopped run goes on the same."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridize.priming.align import Aligner
from hybridize.priming.options import PrimeOptions
from hybridize.priming.trainer import Trainer

ALL = ["--stages", "init,align,distill,adapt", "--layer", "gdn", "--tokens", 1280]


def log_of(report):
    return [json.loads(line) for line in (Path(report["run"]) / "log.jsonl").read_text().splitlines()]


def weights(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_all_stages_and_the_source_on_the_same_tokens(prime, place, tmp_path):
    code, report, err = prime(*ALL, "--baseline", "--evaluate-every", 256, "--output", tmp_path / "out")
    assert code == 0, err
    assert list(report["losses"]) == ["source", "converted", "init", "align", "distill", "adapt", "baseline"]
    # 1280 tokens in steps of 64: 4 of align, 8 of distill, 8 of adapt, and of the source as many.
    lines = log_of(report)
    assert [line["stage"] for line in lines] == ["align"] * 4 + ["distill"] * 8 + ["adapt"] * 8 + ["baseline"] * 8
    assert report["train_tokens"] == 1280
    losses = {name: value["loss"] for name, value in report["losses"].items()}
    assert losses["adapt"] < losses["distill"] and losses["baseline"] < losses["source"]
    distilled = [line["kl"] for line in lines if line["stage"] == "distill"]
    assert sum(distilled[4:]) < sum(distilled[:4])
    for name in ("distill", "adapt", "baseline"):
        measured = {line["step"]: line["held_out"] for line in lines if line["stage"] == name and "held_out" in line}
        assert sorted(measured) == [3, 7] and losses[name] == pytest.approx(min(measured.values()), abs=0.3)
    assert not (Path(report["run"]) / "best.pt").exists() and not (Path(report["run"]) / "checkpoint.pt").exists()
    ours, theirs = weights(tmp_path / "out"), weights(place / "source")
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], theirs["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_distill_moves_the_mixers_alone(prime, place, tmp_path, compute):
    words = ["--stages", "init,distill", "--layer", "gka", "--tokens", 512, "--compute", compute]
    code, report, err = prime(*words, "--output", tmp_path / "out")
    assert code == 0, err
    theirs, ours = weights(place / "source"), weights(tmp_path / "out")
    same = [name for name in theirs if torch.equal(theirs[name], ours[name])]
    assert sorted(same) == sorted(n for n in theirs if ".layers.1.self_attn" not in n and ".3.self_attn" not in n)
    assert abs(report["losses"]["distill"]["loss"] - report["losses"]["source"]["loss"]) < 1.0


def test_adapt_with_a_teacher_holds_on_to_the_source(prime, tmp_path):
    words = [*ALL, "--kl", "0.5", "--train", "mixers+norms+attention"]
    code, report, err = prime(*words, "--output", tmp_path / "out")
    assert code == 0, err
    adapt = [line for line in log_of(report) if line["stage"] == "adapt"]
    assert all(line["loss"] == pytest.approx(line["cross_entropy"] + 0.5 * line["kl"], rel=1e-4) for line in adapt)
    assert report["adapt"]["train"]["role"] == "mixers+norms+attention"


def test_the_best_weights_on_the_way_are_the_result(prime, tmp_path):
    words = ["--stages", "init,distill", "--layer", "gdn", "--tokens", 768, "--distill-lr", "0.5"]
    code, report, err = prime(*words, "--evaluate-every", 64, "--output", tmp_path / "out")
    assert code == 0, err
    measured = [line["held_out"] for line in log_of(report)]
    best = measured.index(min(measured))
    assert best < len(measured) - 1 and f"that of step {best + 1}: these weights are kept" in err
    # Stated on other rows, so only close.
    assert report["losses"]["distill"]["loss"] == pytest.approx(measured[best], abs=0.1)


@pytest.mark.parametrize("more", [[], ["--kl", "0.5", "--evaluate-every", 128, "--baseline"]])
def test_killed_in_any_stage_it_ends_with_the_same_weights(prime, place, tmp_path, monkeypatch, more):
    from hybridize.priming import loop

    code, whole, err = prime(*ALL, *more, "--output", tmp_path / "whole")
    assert code == 0, err
    monkeypatch.setattr(loop, "SAVE_AFTER", 0.0)
    pick = random.Random(1)
    left = [0]

    def fragile(step):
        def one(self, *arguments):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("power cut")
            return step(self, *arguments)

        return one

    monkeypatch.setattr(Aligner, "step", fragile(Aligner.step))
    monkeypatch.setattr(Trainer, "step", fragile(Trainer.step))
    left[0] = 2
    assert prime(*ALL, *more, "--output", tmp_path / "out")[0] == 1
    kills, code = 1, 1
    while code:
        left[0] = pick.randint(2, 6)
        code, report, err = prime("--resume", model=False)
        assert code == 0 or "power cut" in err
        kills += code
    assert kills >= 4
    assert report["losses"] == whole["losses"] and log_of(report) == log_of(whole)
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", 200], "of which align gets its share, is less than one step of 64 tokens"),
        (["--tokens", 640, "--accumulate", 8], "of which distill gets its share, is less than one step of 512"),
        (["--stages", "init", "--evaluate-every", 64], "for the stages distill and adapt"),
        (["--stages", "init,distill", "--baseline"], "name adapt in --stages"),
        (["--adapt-lr", "0"], "Learning rate 0.0"),
        (["--kl", "nan"], "--kl"),
    ],
)
def test_bad_budgets_and_options(prime, tmp_path, arguments, said):
    code, _, err = prime(*ALL, *arguments, "--output", tmp_path / "out")
    assert code == 2 and said in err, err
    assert not list(tmp_path.iterdir())


def test_every_stage_goes_on_in_the_text_where_the_last_one_stopped(prime, tmp_path, monkeypatch):
    """And baseline reads what adapt has read."""
    read = {"align": [], "train": []}

    def noting(kind, name, step):
        def one(self, *arguments):
            here = self.stream if name == "train" else arguments[0]
            read[name].append(here.ids.tolist() if name == "align" else here.state()["packer"]["rows"])
            return step(self, *arguments)

        monkeypatch.setattr(kind, "step", one)

    noting(Aligner, "align", Aligner.step)
    noting(Trainer, "train", Trainer.step)
    code, _, err = prime(*ALL, "--baseline")
    assert code == 0, err
    assert len({str(ids) for ids in read["align"]}) == 4
    assert read["train"] == [*range(8, 24, 2), *range(24, 40, 2), *range(24, 40, 2)]


def test_tokens_are_split():
    options = PrimeOptions("m", "*", "", ("init", "align", "distill", "adapt"), 1000, 8, 8, 10, 2, ("d",), 0, "o", None)
    assert [options.steps(name) for name in ("align", "distill", "adapt", "baseline")] == [10, 20, 20, 0]
