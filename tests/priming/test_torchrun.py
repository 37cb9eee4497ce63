"""`torchrun -m hybridize prime`: two processes do what one does, and one of them speaks and writes."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from data_case import SMOLLM2, make, tokenizer
from priming_case import SMALL, save_source, save_text
from transformers import AutoModelForCausalLM

from hybridize.cli import main
from hybridize.priming.trainer import Trainer

if not dist.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

STAGES = ["--stages", "init,align,distill,adapt", "--layer", "gdn", "--tokens", "1280", "--baseline"]
MORE = ["--evaluate-every", "128", "--kl", "0.2", "--recompute", "--prompts", "2", "--batch-size", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Texts and conversations, and a source for so few positions that little is written."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("prime")
    tokenizer(SMOLLM2).save_pretrained(save_source(folder / "source", vocab_size=264))
    config = folder / "source" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 48}))
    save_text(folder / "text")
    make("chat", folder)
    return folder


@pytest.fixture
def torchrun(place, tmp_path, python):
    def run(*arguments, workspace="runs", **variables):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hybridize", "prime"]
        words = [*arguments, "--workspace", str(tmp_path / workspace), "--json", "--device", "cpu"]
        return python(*launch, *words, timeout=300, OMP_NUM_THREADS="1", **variables)

    return run


def new(place, *arguments):
    return [str(place / "source"), *SMALL, *data(place), *STAGES, *MORE, *map(str, arguments)]


def data(place):
    return ["--data", str(place / "text"), "--data", str(place / "chat.jsonl")]


def log_of(report):
    return [json.loads(line) for line in (Path(report["run"]) / "log.jsonl").read_text().splitlines()]


def test_two_processes_do_what_one_does(place, tmp_path, torchrun, capfd):
    done = torchrun(*new(place, "--output", tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-4000:]
    two = json.loads(done.stdout)  # of one process
    assert done.stderr.count("Reading and tokenising") == done.stderr.count("Distill:") == 1
    assert main(["prime", *new(place, "--output", tmp_path / "one"), "--workspace", str(tmp_path / "w"), "--json"]) == 0
    one = json.loads(capfd.readouterr().out)
    ours, theirs = log_of(two), log_of(one)
    assert len(ours) == len(theirs) == 28
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys() and a["loss"] == pytest.approx(b["loss"], rel=2e-3), (a, b)
        assert a.get("held_out", 0) == pytest.approx(b.get("held_out", 0), rel=2e-3)
    for name, loss in one["losses"].items():
        assert two["losses"][name]["loss"] == pytest.approx(loss["loss"], rel=2e-3), name
    assert two["generation"]["models"]["source"] == one["generation"]["models"]["source"]
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-2, rtol=1e-1)
    (index,) = tmp_path.glob("runs/index.json")
    assert [entry["kind"] for entry in json.loads(index.read_text())["entries"]] == ["prime-run", "hybrid"]
    assert not list(tmp_path.glob("runs/*/*.pt"))


def test_a_run_of_one_process_goes_on_in_two(prime, place, tmp_path, torchrun, monkeypatch):
    words = [*data(place), *STAGES, *MORE]
    code, whole, err = prime(*words, "--output", tmp_path / "whole")
    assert code == 0, err
    step = Trainer.step

    def stopping(self):
        if self.steps_done == 3 and self.options.role == "all":
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "step", stopping)
    monkeypatch.setattr("hybridize.priming.loop.SAVE_AFTER", -1.0)
    assert prime(*words, "--output", tmp_path / "out")[0] == 130
    done = torchrun("--resume")
    assert done.returncode == 0, done.stderr[-4000:]
    resumed = json.loads(done.stdout)
    assert resumed["output"] == str(tmp_path / "out")
    for name, loss in whole["losses"].items():
        assert resumed["losses"][name]["loss"] == pytest.approx(loss["loss"], rel=5e-3), name


def test_what_is_wrong_is_said_once(place, torchrun):
    done = torchrun(*new(place, "--batch-size", "3"))
    assert done.returncode != 0
    assert done.stderr.count("3 rows a batch cannot be shared by 2 processes") == 1 and not done.stdout.strip()
    assert os.environ.get("WORLD_SIZE") is None
