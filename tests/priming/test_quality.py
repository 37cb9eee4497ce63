"""Retrieval and generation in the report of `prime`, before and after, beside the source and the source trained too."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from priming_case import save_text

from hybridize.console import Console
from hybridize.priming import quality
from hybridize.priming.align import Aligner
from hybridize.priming.quality import make_quality
from hybridize.priming.report import show_report
from hybridize.priming.stages import Stage

WORDS = ["--context", 512, "--held-out-tokens", 2048, "--init-tokens", 1024, "--layer", "gdn"]


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    return save_text(tmp_path_factory.mktemp("long") / "text", 12_000)


def test_before_and_after_beside_the_source_trained_too(prime, long_text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(quality, "NEW_TOKENS", 12)
    words = [*WORDS, "--data", long_text, "--items", 1, "--prompts", 3, "--tokens", 3072]
    words += ["--stages", "init,align,adapt", "--baseline"]
    code, whole, err = prime(*words, "--output", tmp_path / "whole")
    assert code == 0, err
    assert list(whole["retrieval"]) == ["source", "init", "adapt", "baseline"]
    assert {name: found["items"] for name, found in whole["retrieval"]["adapt"].items()} == {
        "passkey": 5,
        "recall": 5,
        "copy": 5,
    }
    written = whole["generation"]
    assert list(written["models"]) == ["source", "init", "adapt", "baseline"] and written["new_tokens"] == 12
    assert written["perplexity_bound"] == pytest.approx(2 * whole["losses"]["source"]["perplexity"])
    assert all(found["texts"] == 3 for of in written["models"].values() for found in of.values())
    assert set(whole["perplexity_above"]) == {"source", "baseline"}
    losses = {name: found["perplexity"] for name, found in whole["losses"].items()}
    assert whole["perplexity_above"]["baseline"] == pytest.approx(losses["adapt"] / losses["baseline"] - 1)

    show_report(Console(), whole)
    shown = capfd.readouterr().out
    assert "to source, same tokens" in shown and "passkey" in shown and "12 tokens written" in shown

    with monkeypatch.context() as patch:
        patch.setattr(Aligner, "step", lambda self, ids: 1 / 0)
        assert prime(*words, "--output", tmp_path / "out")[0] == 1
    code, resumed, err = prime("--resume", model=False)
    assert code == 0, err
    assert (resumed["retrieval"], resumed["generation"]) == (whole["retrieval"], whole["generation"])


def test_what_is_too_short_for_a_question_is_said_and_left_out(prime, tmp_path):
    code, report, err = prime("--items", 1, "--tokens", 128, "--output", tmp_path / "out")
    assert code == 0, err
    assert "Retrieval is not measured. Items of 32 tokens are too short" in err and "retrieval" not in report


def test_weights_are_chosen_on_rows_that_no_result_is_stated_on(prime, tmp_path, monkeypatch):
    chosen, init = [], Stage.__init__

    def watched(self, *args):
        *rest, evaluate, steps = args

        def seen(model):
            chosen.append(evaluate(model))
            return chosen[-1]

        init(self, *rest, seen, steps)

    monkeypatch.setattr(Stage, "__init__", watched)
    words = ["--stages", "init,adapt", "--tokens", 512, "--evaluate-every", 64, "--output", tmp_path / "out"]
    code, report, err = prime(*words)
    assert code == 0, err
    lines = [json.loads(line) for line in (Path(report["run"]) / "log.jsonl").read_text().splitlines()]
    assert [line["held_out"] for line in lines] == chosen
    assert report["losses"]["adapt"]["loss"] not in chosen


def test_a_model_of_few_positions_writes_less():
    rows = torch.ones(2, 40, dtype=torch.long)
    options = SimpleNamespace(items=0, prompts=2, batch_size=1, seed=0)
    of = lambda longest: SimpleNamespace(config=SimpleNamespace(max_position_embeddings=longest), tokenizer=None)
    assert make_quality(options, of(50), rows, Console()).new_tokens == 18
    assert not len(make_quality(options, of(32), rows, Console()).prompts)
