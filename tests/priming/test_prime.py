"""`hybridize prime` from the command line to a folder that loads, and everything that can stop it."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from priming_case import SMALL, save_text
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybridize
from hybridize.cli import main
from hybridize.hybrid.model import mixers
from hybridize.priming.align import Aligner
from hybridize.priming.transfer import LeastSquares, StartOptions, fit_start
from hybridize.tasks.perplexity import mean_loss, token_losses
from hybridize.tasks.text import first_rows, read_documents


def sources(place):
    model, tokenizer = hybridize.load(place / "source", dtype="float32", device="cpu")
    rows = first_rows(read_documents(place / "text"), tokenizer, 32, 64)
    return model, [ids for ids in rows.split(8) if len(ids) == 8]


@pytest.mark.parametrize("layer", ["gka", "gdn", "mamba2", "swa"])
def test_writes_a_hybrid_that_loads(prime, place, tmp_path, layer):
    code, report, err = prime("--layer", layer, "--tokens", 640, "--output", tmp_path / "out")
    assert code == 0, err
    assert "evenly spaced" in err
    assert report["pattern"].count("*") == 2 and report["train_tokens"] == 640
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (place / "source" / name).read_bytes(), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [7, 9]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert sorted(mixers(model)) == report["converted"] == [1, 3]
    losses = report["losses"]
    # The source is random, so only closeness to it means anything: its own loss is that of guessing.
    assert list(losses) == ["source", "converted", "init", "align"]
    assert abs(losses["align"]["loss"] - losses["source"]["loss"]) < 1.0
    if layer == "swa":  # a window of 512 over rows of 32 tokens is the source itself
        assert losses["converted"]["loss"] == pytest.approx(losses["source"]["loss"], abs=1e-4)
    index = json.loads((tmp_path / "runs" / "index.json").read_text())["entries"]
    assert index[-1]["kind"] == "hybrid" and index[-1]["value"] == str(tmp_path / "out")


def test_dry_run_accounts_for_every_tensor_and_writes_nothing(prime, place, tmp_path):
    code, report, err = prime("--dry-run", "--layers", "0,2")
    assert code == 0, err
    held = AutoModelForCausalLM.from_pretrained(place / "source").state_dict()
    fate = report["tensors"]
    assert fate["copied"] + fate["transformed"] + len(fate["dropped"]) == len(held)
    assert fate["transformed"] == 2
    assert not (tmp_path / "runs").exists()
    cache = report["cache"]
    assert cache["hybrid_bytes_per_token"] * 2 == cache["source_bytes_per_token"] == 4 * 2 * 2 * 8 * 4
    longest = cache["smaller_from_tokens"]
    grown = cache["source_bytes_per_token"] - cache["hybrid_bytes_per_token"]
    assert longest * grown >= cache["state_bytes_per_sequence"] > (longest - 1) * grown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--ratio", "0"], 1, "must be above 0 and at most 1"),
        (["--ratio", "1.5"], 1, "must be above 0 and at most 1"),
        (["--layers", "1,9"], 1, "Layer 9 does not exist"),
        (["--layers", "1,1"], 1, "named twice"),
        (["--layers", "x"], 2, "no list of numbers"),
        (["--pattern", "*-GKA-*"], 1, "nothing stands for layer 3"),
        (["--pattern", "*-GKA-*-GKA-*"], 1, "position 4 stands for no layer"),
        (["--pattern", "*-GKA-*-FOO"], 1, "'FOO' at position 3"),
        (["--pattern", "*-*-*-*"], 2, "converts no layer"),
        (["--layer", "foo"], 2, "'foo' is none of gka"),
        (["--layers", "1_0"], 2, "no list of numbers"),
        (["--dry-run", "--resume"], 2, "leave one out"),
        (["--ratio", "0.5", "--layers", "1"], 2, "give one of them"),
        (["--stages", "init,fly"], 2, "no stage 'fly'"),
        (["--tokens", "10"], 2, "less than one step"),
        (["--set", "foo=1"], 1, "setting 'foo'"),
        (["--set", "foo"], 2, "NAME=VALUE"),
        (["--set", "device=3"], 2, "no mixer setting"),
        (["--set", "num_iters=many"], 2, "setting num_iters is 'many'"),
        (["--set", "num_iters=2.5"], 2, "setting num_iters is 2.5"),
        (["--set", "ridge=0"], 2, "setting ridge is 0"),
        (["--set", "ridge=true"], 2, "setting ridge is True"),
        (["--set", "qk_norm=1"], 2, "setting qk_norm is 1"),
        (["--set", "conv_activation=relu"], 2, "conv_activation is 'relu'; it can be silu or null"),
        *((["--set", f"memory={value}"], 2, "give two numbers") for value in ("[64, 1]", "5", "[0, 9]", '[1, "9"]')),
        (["--layer", "swa", "--set", "window=0"], 2, "setting window is 0"),
        (["--seed", str(2**70)], 2, "below 2**63"),
        (["--context", "100000"], 2, "more than the"),
        (["--data", "/no/such/file"], 1, "no file or folder"),
        (["--resume"], 1, "no run"),
    ],
)
def test_bad_input(prime, tmp_path, arguments, code, said):
    got, report, err = prime(*arguments, "--output", tmp_path / "out")
    assert (got, report) == (code, None), err
    assert said in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_existing_output_is_left_alone(prime, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    code, _, err = prime("--output", tmp_path / "out")
    assert code == 1 and "exists already" in err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_output_that_cannot_be_made_is_said_before_the_work(prime, tmp_path):
    (tmp_path / "file").write_text("x")
    code, _, err = prime("--output", tmp_path / "file" / "out")
    assert code == 1 and "file is not a folder" in err and "loss" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_full_disk_leaves_nothing_under_the_final_name(prime, tmp_path, monkeypatch):
    from hybridize.priming import finish

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "out"))

    monkeypatch.setattr(finish, "copy_companions", full)
    code, _, err = prime("--tokens", 64, "--output", tmp_path / "out")
    assert code == 1 and "disk is full" in err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("how", ["ctrl-c", "crash"])
def test_a_stopped_run_resumes_to_the_same_numbers(prime, tmp_path, monkeypatch, how):
    arguments = ["--layer", "gdn", "--tokens", 640, "--output"]
    code, whole, err = prime(*arguments, tmp_path / "whole")
    assert code == 0, err
    step = Aligner.step

    def stopping(self, ids):
        if self.steps_done == 4:
            if how == "crash":
                raise RuntimeError("power cut")
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, ids)

    monkeypatch.setattr(Aligner, "step", stopping)
    code, _, err = prime(*arguments, tmp_path / "out")
    assert code == (130 if how == "ctrl-c" else 1) and not (tmp_path / "out").exists()
    if how == "ctrl-c":
        assert "after 5 of 10 steps" in err and "--resume" in err
    monkeypatch.setattr(Aligner, "step", step)
    code, resumed, err = prime("--resume", "--lr", "0.5", model=False)
    assert code == 0, err
    note = next(line for line in err.splitlines() if "keeps the settings it began with" in line)
    assert "--lr" in note and "--seed" not in note
    assert resumed["losses"] == whole["losses"] and resumed["output"] == str(tmp_path / "out")
    curves = [os.path.join(report["run"], "log.jsonl") for report in (whole, resumed)]
    first, second = ([json.loads(line) for line in Path(curve).read_text().splitlines()] for curve in curves)
    assert first == second and len(first) == 10
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "out"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_least_squares_is_the_direct_solution():
    torch.manual_seed(0)
    z, y, w, prior = torch.randn(2, 50, 6), torch.randn(2, 50, 4), torch.rand(2, 50, 1), torch.randn(4, 6)
    squares = LeastSquares(6, 4, torch.device("cpu"))
    squares.add(z, y, w)
    root = w.double().sqrt()
    a, b = (z.double() * root).flatten(0, 1), (y.double() * root).flatten(0, 1)
    damping = 0.1 * (a.T @ a).diagonal().mean()
    rows = torch.cat([a, damping.sqrt() * torch.eye(6).double()])
    wanted = torch.linalg.lstsq(rows, torch.cat([b, damping.sqrt() * prior.double().T])).solution.T
    torch.testing.assert_close(squares.solve(prior, 0.1), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("follow", [False, True])
def test_init_lowers_every_error_and_leaves_the_source(place, follow):
    source, batches = sources(place)
    before = {name: x.clone() for name, x in source.state_dict().items()}
    plan = hybridize.LayerPlan.from_pattern("*-GKA-GDN-M2")
    hybrid = hybridize.convert(source, plan, share=True)
    scaled = fit_start(source, hybrid, batches, StartOptions(solve=False))
    solved = fit_start(source, hybrid, batches, StartOptions(calibrate=False))
    assert all(solved[i] < scaled[i] < 1.2 for i in (1, 2, 3)), (scaled, solved)
    if follow:
        loss = mean_loss(hybrid, torch.cat(batches), 8)
        fit_start(source, hybrid, batches, StartOptions(calibrate=False, follow=True))
        assert mean_loss(hybrid, torch.cat(batches), 8) < loss + 0.05
    assert all(torch.equal(x, before[name]) for name, x in source.state_dict().items())


def test_mean_loss_is_the_models_own_loss(place, monkeypatch):
    from hybridize.tasks import perplexity

    monkeypatch.setattr(perplexity, "LOGIT_ROWS", 10)
    source, batches = sources(place)
    seen = []
    source.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    got = mean_loss(source, batches[0], 3)
    assert max(seen) <= 10
    with torch.no_grad():
        assert got == pytest.approx(source(batches[0], labels=batches[0]).loss.item(), abs=1e-5)


def test_mean_loss_of_packed_rows_counts_the_targets_of_each_document(place):
    source, batches = sources(place)
    one, two = batches[0][0, :20], batches[0][1, :12]
    positions = torch.cat([torch.arange(20), torch.arange(12)])[None]
    targets = (positions > 0) & (torch.arange(32) != 7)
    got = mean_loss(source, torch.cat([one, two])[None], 1, None, positions, targets)
    losses = [token_losses(source, ids[None])[0] for ids in (one, two)]
    wanted = torch.cat([losses[0][:6], losses[0][7:], losses[1]]).mean().item()
    assert got == pytest.approx(wanted, abs=1e-5)
    assert abs(mean_loss(source, torch.cat([one, two])[None], 1) - wanted) > 1e-3


def test_a_source_with_biases(prime, place, tmp_path):
    import shutil

    from hybrid_cases import source

    shutil.copytree(place / "source", tmp_path / "qwen2", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    kept = {path.name: path.read_bytes() for path in (tmp_path / "qwen2").iterdir()}
    source("qwen2", 4, vocab_size=256).save_pretrained(tmp_path / "qwen2")
    for name, content in kept.items():
        (tmp_path / "qwen2" / name).write_bytes(content)
    words = ["prime", str(tmp_path / "qwen2"), *SMALL, "--data", str(place / "text"), "--tokens", "128"]
    assert main([*words, "--output", str(tmp_path / "out"), "--workspace", str(tmp_path / "w"), "--quiet"]) == 0
    model, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("qwen2", "out"))
    theirs, ours = model.state_dict(), ours.state_dict()
    assert {"model.layers.1.self_attn.q_proj.bias"} <= set(theirs) <= set(ours)
    untouched = [name for name in theirs if ".1.self_attn" not in name and ".3.self_attn" not in name]
    assert all(torch.equal(theirs[name], ours[name]) for name in untouched)
    report = json.loads((tmp_path / "out" / "prime.json").read_text())
    assert report["pattern"] == "*-GKA-*-GKA" and report["train_tokens"] == 128


def test_dry_run_accounts_for_each_weight_by_name(place):
    from hybridize.priming.accounting import account
    from hybridize.sources import open_source

    plan = hybridize.LayerPlan.from_pattern("GKA-GDN-M2-SWA")
    got = account(open_source(place / "source").config, plan, torch.bfloat16, True, {})
    held = AutoModelForCausalLM.from_pretrained(place / "source")
    assert sorted([*got.copied, *got.transformed, *got.dropped]) == sorted(held.state_dict())
    hybrid = hybridize.convert(held, plan)
    assert sorted([*got.copied, *got.transformed, *got.new]) == sorted(hybrid.state_dict())
    assert got.parameters == sum(p.numel() for p in hybrid.parameters())
    assert got.trained_parameters == sum(p.numel() for m in mixers(hybrid).values() for p in m.parameters())


def test_too_small_a_disk_is_said_before_the_work(prime, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, _, err = prime("--output", tmp_path / "out")
    assert code == 1 and "free some space" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["checkpoint", "weights"])
def test_a_disk_that_fills_up(prime, tmp_path, monkeypatch, where):
    import transformers.modeling_utils
    from safetensors import SafetensorError

    def full(*args, **kwargs):
        if where == "checkpoint":
            raise OSError(errno.ENOSPC, "No space left on device")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    if where == "checkpoint":
        monkeypatch.setattr(torch, "save", full)
    else:
        monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    code, _, err = prime("--tokens", 64, "--output", tmp_path / "out")
    assert code == 1 and "The disk is full" in err and "damaged" not in err
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob("runs/*/.*"))
    if where == "weights":  # what was learned is kept
        monkeypatch.undo()
        code, report, err = prime("--resume", model=False)
        assert code == 0 and report["output"] == str(tmp_path / "out"), err


def test_a_killed_run_resumes_from_another_folder(prime, place, tmp_path, monkeypatch):
    """The model and the text are named by relative paths, and the log's last line is cut short."""
    step = Aligner.step

    def killed(self, ids):
        if self.steps_done == 3:
            raise RuntimeError("power cut")
        return step(self, ids)

    monkeypatch.setattr(Aligner, "step", killed)
    monkeypatch.chdir(place)
    words = ["prime", "source", *SMALL, "--data", "text", "--tokens", "320", "--output", str(tmp_path / "out")]
    assert main([*words, "--workspace", str(tmp_path / "runs"), "--json"]) == 1
    monkeypatch.setattr(Aligner, "step", step)
    (log,) = tmp_path.glob("runs/*/log.jsonl")
    with log.open("a") as file:
        file.write('{"step": 3, "lo')
    monkeypatch.chdir(tmp_path)
    code, _, err = prime("--resume", model=False)
    assert code == 0, err
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(5))
    code, _, err = prime("--resume", model=False)
    assert code == 2 and "is finished" in err


def test_a_run_that_diverges_says_so_and_writes_no_hybrid(prime, tmp_path, monkeypatch):
    code, _, err = prime("--tokens", 640, "--lr", "1e30", "--output", tmp_path / "out")
    assert code == 1 and "became" in err and "smaller --lr" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_text_that_changed_stops_a_resumed_run(prime, place, tmp_path, monkeypatch):
    save_text(tmp_path / "text")
    step = Aligner.step
    monkeypatch.setattr(Aligner, "step", lambda self, ids: 1 / 0)
    assert prime("--data", tmp_path / "text", "--tokens", 64)[0] == 1
    monkeypatch.setattr(Aligner, "step", step)
    for path in (tmp_path / "text").iterdir():
        path.write_text(path.read_text()[::-1])
    code, _, err = prime("--resume", model=False)
    assert code == 1 and "has changed since" in err


def test_a_damaged_checkpoint_is_named(prime, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Aligner, "step", lambda self, ids: 1 / 0)
        assert prime("--tokens", 64)[0] == 1
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    code, _, err = prime("--resume", model=False)
    assert code == 1 and "checkpoint.pt cannot be read" in err
    assert len(err.strip().splitlines()) <= 5, err
