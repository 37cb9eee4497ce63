"""A run that is killed, by SIGKILL and at random moments, ends as one that was never killed."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from data_case import SMOLLM2, make, tokenizer
from priming_case import save_source
from transformers import AutoModelForCausalLM

import hybridize

# Checkpoints come often, yet not at every step: steps that were logged are lost, and taken again.
CODE = """
import sys
import torch
from hybridize.cli import main
from hybridize.priming import loop
torch.set_num_threads(1)
loop.SAVE_AFTER = 0.1
sys.exit(main(sys.argv[1:]))
"""
STEPS = 12  # of each stage that trains and of the baseline
TARGETS = range(1, 3 * STEPS)  # the last stage is left to end the run in


def start(place: Path, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(hybridize.__file__).parent.parent)}
    command = [sys.executable, "-c", CODE, "prime", *arguments, "--workspace", str(folder), "--quiet"]
    with (place / "err").open("ab") as err:
        return subprocess.Popen(command, stderr=err, stdout=err, cwd=place, env=environment)


def lines(folder: Path) -> list[str]:
    found = list(folder.glob("*/log.jsonl"))
    return found[0].read_text().splitlines() if found else []


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_ends_with_the_same_weights(tmp_path, kills) -> None:
    tokenizer(SMOLLM2).save_pretrained(save_source(tmp_path / "source", vocab_size=264))
    data = ["--data", f"{make('folder', tmp_path)}=2", "--data", make("chat", tmp_path), "--context", "64"]
    sizes = ["--batch-size", "2", "--init-tokens", "256", "--held-out-tokens", "512", "--device", "cpu"]
    # Align gets a fifth of the tokens and the stages after it two fifths each, in steps of twice the size.
    budget = ["--stages", "init,align,distill,adapt", "--tokens", str(5 * STEPS * 128), "--accumulate", "2"]
    more = ["--layer", "gdn", "--baseline", "--evaluate-every", "1024", "--items", "0", "--prompts", "0"]
    command = [str(tmp_path / "source"), *data, *sizes, *budget, *more]
    whole = start(tmp_path, tmp_path / "whole", *command, "--output", str(tmp_path / "one"))
    assert whole.wait(240) == 0, (tmp_path / "err").read_text()
    assert len(lines(tmp_path / "whole")) == 4 * STEPS

    pick = random.Random(kills)
    places = []
    for target in sorted(pick.sample(TARGETS, kills)):
        again = ["--resume"] if (tmp_path / "killed").exists() else [*command, "--output", str(tmp_path / "two")]
        with start(tmp_path, tmp_path / "killed", *again) as run:
            until = time.monotonic() + 120
            while run.poll() is None and len(lines(tmp_path / "killed")) < target and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(pick.uniform(0, 0.05))
            run.kill()
        assert run.returncode < 0, (tmp_path / "err").read_text()
        places.append(len(lines(tmp_path / "killed")))
    print("killed after steps", places, "of", 4 * STEPS)
    assert start(tmp_path, tmp_path / "killed", "--resume").wait(240) == 0, (tmp_path / "err").read_text()

    logs = [[json.loads(line) for line in lines(tmp_path / name)] for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    reports = [json.loads((tmp_path / name / "prime.json").read_text()) for name in ("one", "two")]
    assert reports[0]["losses"] == reports[1]["losses"] and reports[0]["text"] == reports[1]["text"]
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
