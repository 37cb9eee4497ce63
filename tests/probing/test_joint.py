"""Fitted mixers in place of attention, and layers that are chosen together."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from probing_case import SMALL

import hybridize
from hybridize.errors import UsageError
from hybridize.hybrid.model import mixers
from hybridize.priming.align import DivergedError
from hybridize.priming.transfer import StartOptions, fit_start
from hybridize.probing import measure
from hybridize.probing.fitted import FIT_TOKENS, align_mixers, fitted_hybrid, in_place
from hybridize.probing.joint import greedy
from hybridize.probing.measure import fit_rows, rows_of, text_of
from hybridize.probing.options import make_options
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
    change = in_place(model, mixers(fitted_hybrid(model, kind, fit, 2 * CONTEXT)))
    sweep = Sweep(model, score_text(ids, "text", 2048))
    found = {layer: effects["mixer"]["text"]["kl"] for layer, effects in sweep.run({"mixer": change})}
    base = log_probabilities(model, ids)
    for layer in range(count):
        hybrid = hybridize.convert(model, hybridize.LayerPlan.from_layers(count, [layer], kind))
        fit_start(model, hybrid, list(fit.split(2)), StartOptions())
        assert found[layer] == pytest.approx(divergence(base, log_probabilities(hybrid, ids)), rel=1e-3, abs=1e-6)
    assert all(layer.self_attn is own for layer, own in zip(model.base_model.layers, attention, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alignment_brings_mixers_closer_and_leaves_the_model_alone(place, dtype):
    source, _ = hybridize.load(place / "source", dtype=dtype, device="cpu")
    source.base_model.layers[0].requires_grad_(False)
    weights = {name: (p.requires_grad, p.clone()) for name, p in source.named_parameters()}
    hybrid = fitted_hybrid(source, "gdn", rows(source, 4, 1), 2 * CONTEXT)
    formats, ids = [p.dtype for p in hybrid.parameters()], rows(source, 3, 2)
    sweep, change = Sweep(source, score_text(ids, "text", 2048)), in_place(source, mixers(hybrid))
    losses, steps = [], []
    for _ in range(2):
        losses.append([effects["mixer"]["text"]["kl"] for _, effects in sweep.run({"mixer": change})])
        if not steps:
            align_mixers(source, hybrid, rows(source, 300, 3), lambda tokens, message: steps.append(tokens))
    assert steps == [4096 // CONTEXT * CONTEXT] * (300 // (4096 // CONTEXT))
    assert sum(losses[1]) < 0.97 * sum(losses[0])
    assert [p.dtype for p in hybrid.parameters()] == formats
    assert all(p.grad is None and not p.requires_grad for m in mixers(hybrid).values() for p in m.parameters())
    for name, p in source.named_parameters():
        assert p.requires_grad == weights[name][0] and torch.equal(p, weights[name][1])


def test_an_alignment_that_diverges_names_the_layer(model):
    hybrid = fitted_hybrid(model, "gdn", rows(model, 4, 1), 2 * CONTEXT)
    with pytest.raises(DivergedError, match="of layer 0 became"):
        align_mixers(model, hybrid, rows(model, 200, 3), lr=1e30)
    assert all(p.requires_grad for p in model.parameters())


def test_mixers_learn_from_none_of_the_rows_that_are_measured(place, monkeypatch):
    monkeypatch.setattr(measure, "FIT_TOKENS", 1024)
    source, tokenizer = hybridize.load(place / "source", dtype="float32", device="cpu")
    settings = {"methods": ["mixer"], "context": 32, "sequences": 6, "data": place / "text"}
    options = [make_options(source.config, "m", **settings, align=tokens) for tokens in (0, 5000, 10**6)]
    groups = text_of(options[0], None)
    groups = {"some": groups["prose"][:3], "more": groups["prose"][3:]}
    measured = {tuple(row) for some in rows_of(groups, tokenizer, options[0]).values() for row in some.tolist()}
    found = [[tuple(row) for row in fit_rows(groups, tokenizer, chosen).tolist()] for chosen in options]
    assert [len(some) for some in found[:2]] == [32, 156]
    for some in found:
        assert len(set(some)) == len(some) and not measured & set(some)
    both = rows_of(groups, tokenizer, make_options(source.config, "m", **{**settings, "sequences": 10**6}))
    assert len(found[2]) + len(measured) == sum(map(len, both.values()))


def test_an_aligned_probe_resumes_to_the_same_numbers(probe, command, monkeypatch):
    words = ["--method", "mixer", "--layer", "gdn", "--align", "4096"]
    _, whole, _ = probe(*words)
    assert whole["layers"] != probe(*words, "--align", "0")[1]["layers"]
    run, measured = Sweep.run, []

    def stopped(sweep, changes, skip=()):
        for layer, effects in run(sweep, changes, skip):
            if layer == 2 and not skip:
                raise KeyboardInterrupt
            measured.append(layer)
            yield layer, effects

    monkeypatch.setattr(Sweep, "run", stopped)
    assert probe(*words)[0] == 130
    code, resumed, err = command("probe", "--resume", "--device", "cpu")
    assert code == 0, err
    assert measured == [0, 1, 2, 3] and resumed["layers"] == whole["layers"]


def test_too_little_text_to_align_on_is_said(probe):
    code, _, err = probe("--method", "mixer", "--sequences", "200")
    assert code == 0 and "which is all the text apart from what is measured on: fewer than 200,000" in err


def test_a_model_on_two_devices_is_refused(model):
    spread = hybridize.convert(model, hybridize.LayerPlan.from_layers(4, [0], "gka"))
    spread.base_model.layers[3].to("meta")
    with pytest.raises(UsageError, match="needs the whole model on one device"):
        fitted_hybrid(spread, "gka", rows(model, 1, 0), 64)


def test_from_the_command_line_to_prime(probe, command, place, tmp_path):
    words = ["--method", "swa,mixer", "--by", "mixer", "--layer", "gdn", "--select", "greedy", "--ratio", "0.75"]
    words += ["--align", "4096"]
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
    plain, mixed = passes("--method", "swa"), passes("--method", "mixer", "--align", "0")
    aligned = passes("--method", "mixer", "--align", "51200")
    assert aligned["forward_passes"] == pytest.approx(mixed["forward_passes"] + 4 * 51_200 / tokens, abs=0.1)
    assert mixed["forward_passes"] == plain["forward_passes"] + 2 * FIT_TOKENS / tokens
    assert mixed["weight_bytes"] > plain["weight_bytes"]
    steps = (1 + 4 / 2) + (1 + 3 / 2)  # two layers are chosen, of four and of three
    assert passes("--select", "greedy")["forward_passes"] == pytest.approx(plain["forward_passes"] + steps, abs=0.1)


@pytest.mark.parametrize(
    "words,message",
    [
        (["--select", "best"], "no selection 'best'"),
        (["--align", "5"], "none are measured"),
        (["--method", "mixer", "--align", "-1"], "--align is -1"),
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
