"""Fitted mixers in place of attention, and layers that are chosen together."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from probing_case import SMALL

import hybridize
from hybridize.errors import UsageError
from hybridize.priming.transfer import StartOptions, fit_start
from hybridize.probing.fitted import FIT_TOKENS, fitted_mixers
from hybridize.probing.joint import greedy
from hybridize.probing.swa_proxy import Sweep, windows
from hybridize.probing.windowed import windowed
from hybridize.tasks.scored import score_text

CONTEXT = 48


@pytest.fixture(scope="module")
def model(place):
    source, _ = hybridize.load(place / "source", dtype="float32", device="cpu")
    with torch.no_grad():  # a random model's layers hardly matter; these do
        for layer in source.base_model.layers:
            layer.self_attn.o_proj.weight *= 8
    return source


def rows(model, count, seed):
    return torch.randint(0, model.config.vocab_size, (count, CONTEXT), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def log_probabilities(model, ids):
    """Of the later half of each row, from the whole model's own forward."""
    return model(input_ids=ids, use_cache=False).logits[:, CONTEXT // 2 - 1 : -1].log_softmax(-1)


def divergence(base, changed):
    return F.kl_div(changed, base, log_target=True, reduction="none").sum(-1).mean().item()


def test_greedy_takes_what_adds_least_to_those_before(model):
    ids = rows(model, 3, 0)
    base, expected, layers = log_probabilities(model, ids), [], model.base_model.layers
    while len(expected) < 3:
        losses = {}
        for layer in set(range(len(layers))) - {*expected, 1}:
            with ExitStack() as stack:
                for number in (*expected, layer):
                    stack.enter_context(windowed(layers[number].self_attn, 6, 0))
                losses[layer] = divergence(base, log_probabilities(model, ids))
        expected.append(min(losses, key=losses.get))
    sweep, steps = Sweep(model, score_text(ids, "text", 2048)), []
    change = windows(model, [6], 0)["6"]
    assert greedy(sweep, change, "kl", 3, [1], chosen=steps.append) == expected
    assert steps == [expected[:1], expected[:2], expected]
    assert greedy(sweep, change, "kl", 3, [1], expected[:2]) == expected
    assert divergence(base, log_probabilities(model, ids)) == 0  # nothing stays changed


@pytest.mark.parametrize("kind", ["gka", "gdn", "mamba2", "swa"])
def test_fitted_mixers_are_those_that_prime_starts_from(model, kind):
    fit, ids, count = rows(model, 4, 1), rows(model, 3, 2), model.config.num_hidden_layers
    attention = [layer.self_attn for layer in model.base_model.layers]
    change = fitted_mixers(model, kind, fit, 2 * CONTEXT)
    sweep = Sweep(model, score_text(ids, "text", 2048))
    found = {layer: effects["mixer"]["text"]["kl"] for layer, effects in sweep.run({"mixer": change})}
    base = log_probabilities(model, ids)
    for layer in range(count):
        hybrid = hybridize.convert(model, hybridize.LayerPlan.from_layers(count, [layer], kind))
        fit_start(model, hybrid, list(fit.split(2)), StartOptions())
        assert found[layer] == pytest.approx(divergence(base, log_probabilities(hybrid, ids)), rel=1e-3, abs=1e-6)
    assert all(layer.self_attn is own for layer, own in zip(model.base_model.layers, attention, strict=True))


def test_a_model_on_two_devices_is_refused(model):
    spread = hybridize.convert(model, hybridize.LayerPlan.from_layers(4, [0], "gka"))
    spread.base_model.layers[3].to("meta")
    with pytest.raises(UsageError, match="needs the whole model on one device"):
        fitted_mixers(spread, "gka", rows(model, 1, 0), 64)


def test_from_the_command_line_to_prime(probe, command, place, tmp_path):
    words = ["--method", "swa,mixer", "--by", "mixer", "--layer", "gdn", "--select", "greedy", "--ratio", "0.75"]
    code, report, err = probe(*words, "--keep", "2")
    assert code == 0, err
    selected = report["selected"]
    assert sorted(selected["order"]) == selected["layers"] == [0, 1, 3]
    for layer in report["layers"]:
        assert layer["score"] == layer["mixer"]["kl"] > 0
        assert list(layer["swa"]) == ["8"]
    # The first layer is the one that loses least alone, on the same text or a part of it.
    assert selected["order"][0] == min((0, 1, 3), key=lambda n: report["layers"][n]["score"])
    prime = ["prime", place / "source", "--device", "cpu", "--dry-run"]
    assert command(*prime, "--ratio", "0.5")[1]["converted"] == sorted(selected["order"][:2])
    code, _, err = command(*prime, "--ratio", "1")
    assert code == 2 and "chose 3 of them one after another" in err


def test_goes_on_with_the_layers_chosen_before_a_kill(probe, command, tmp_path, monkeypatch):
    words = ["--select", "greedy", "--ratio", "0.75"]
    _, whole, _ = probe(*words)
    runs, run = [], Sweep.run

    def counted(sweep, changes, skip=()):
        if len(skip) == 2:
            raise KeyboardInterrupt
        runs.append(len(skip))
        return run(sweep, changes, skip)

    monkeypatch.setattr(Sweep, "run", counted)
    code, _, err = probe(*words)
    assert code == 130 and "--resume" in err
    assert runs == [0, 0, 1]
    monkeypatch.setattr(
        Sweep, "run", lambda sweep, changes, skip=(): runs.append(len(skip)) or run(sweep, changes, skip)
    )
    runs.clear()
    code, resumed, err = command("probe", "--resume", "--device", "cpu")
    assert code == 0, err
    assert runs == [4, 2]  # no layer is measured again, and the third is chosen
    assert resumed["selected"] == whole["selected"]


def test_a_dry_run_counts_the_fit_and_the_steps(command, place):
    def passes(*words):
        code, plan, err = command("probe", place / "source", "--dry-run", *SMALL, *words)
        assert code == 0, err
        return plan

    tokens = 4 * 64
    plain, mixed = passes("--method", "swa"), passes("--method", "mixer")
    assert mixed["forward_passes"] == plain["forward_passes"] + 2 * FIT_TOKENS / tokens
    assert mixed["weight_bytes"] > plain["weight_bytes"]
    steps = (1 + 4 / 2) + (1 + 3 / 2)  # two layers are chosen, of four and of three
    assert passes("--select", "greedy")["forward_passes"] == pytest.approx(plain["forward_passes"] + steps, abs=0.1)


@pytest.mark.parametrize(
    "words,message",
    [
        (["--select", "best"], "no selection 'best'"),
        (["--method", "hankel", "--select", "greedy"], "--by hankel cannot"),
        (["--method", "swa,mixer", "--by", "swa+mixer", "--select", "greedy"], "swa+mixer cannot"),
        (["--method", "mixer", "--by", "mixer@8"], "mixer is not measured at windows"),
        (["--method", "mixer", "--by", "mixer.accuracy"], "mixer has the statistics kl, loss"),
    ],
)
def test_what_cannot_be_selected_by(probe, words, message):
    code, _, err = probe(*words)
    assert code == 2 and message in err


def test_text_for_measuring_alone_is_not_enough(probe):
    code, _, err = probe("--method", "mixer", "--sequences", "10000")
    assert code == 1 and "fits mixers on other text than it measures on" in err
