"""What a probe will take, from a config alone, and where the weights go on GPUs of any memory."""

import os
import shutil

import pytest
import torch
from priming_case import save_source
from probing_case import SMALL
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

import hybridize
from hybridize.hybrid.memory import on_meta
from hybridize.hybrid.plan import LayerPlan
from hybridize.probing import estimate
from hybridize.probing.estimate import Placement, need
from hybridize.probing.measure import Amount
from hybridize.probing.options import make_options
from hybridize.sources import Source

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """Let torch find GPUs of so many free GiB."""

    def pretend(*free):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (int(free[index] * GIB), 0))
        monkeypatch.setattr(estimate, "_speed", lambda device, dtype: 1e14)
        monkeypatch.setattr(estimate, "_bytes_per_second", lambda device: 1e10)

    return pretend


@pytest.fixture(scope="module")
def qwen():
    """Qwen3-8B, without weights, and a probe of it."""
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=False,
    )
    options = make_options(config, "Qwen/Qwen3-8B", methods=["swa"])
    return on_meta(config, LayerPlan.from_layers(36, [0], "gka"), {})[0], options


def needed(qwen, device="cuda"):
    model, options = qwen
    return need(model, options, Amount.expected(options), torch.bfloat16, torch.device(device))


def test_dry_run_says_what_it_takes_and_writes_nothing(command, place, tmp_path):
    code, plan, err = command(
        "probe", place / "source", "--dry-run", *SMALL, "--window", "4,8", "--data", place / "text"
    )
    assert code == 0, err
    assert plan["tokens"] == 4 * 64 and plan["forward_passes"] == 2 + 2 * 2.5
    assert plan["weight_bytes"] == 4 * sum(
        x.numel() for x in load_file(place / "source" / "model.safetensors").values()
    )
    assert plan["work_bytes"] > 0 and plan["stream_bytes"] == 4 * 64 * 32 * 4 and plan["placement"] == "on cpu"
    assert plan["dtype"] == "float32" and plan["offloaded_bytes"] == plan["lacking_bytes"] == 0
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_counts_the_text_that_there_is(command, place):
    words = [place / "source", *SMALL, "--data", place / "text" / "1.txt", "--sequences", 500]
    code, plan, err = command("probe", *words, "--dry-run")
    assert code == 0, err
    assert plan["tokens"] == len((place / "text" / "1.txt").read_text()) // 64 * 64


@pytest.mark.parametrize("left", ["tokenizer and index", "tokenizer", "nothing"])
def test_a_dry_run_needs_no_weights(command, place, tmp_path, left):
    """A folder of the small files only, as the Hub gives them to a dry run; the run itself asks for the weights."""
    words = [*SMALL, "--data", place / "text", "--method", "swa,hankel"]
    _, want, _ = command("probe", place / "source", *words, "--dry-run")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ["config.json", *(["tokenizer.json", "tokenizer_config.json"] if "tokenizer" in left else [])]:
        shutil.copy(place / "source" / name, bare)
    if "index" in left:
        (bare / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    code, plan, err = command("probe", bare, *words, "--dry-run")
    assert code == 0, err
    assert "has no weights yet" in err and ("the text is not read" in err) == (left == "nothing")
    measured = {"model", "seconds"}
    assert {k: v for k, v in plan.items() if k not in measured} == {k: v for k, v in want.items() if k not in measured}
    code, _, err = command("probe", bare, *words)
    assert code == 1 and ("has no weights" in err or "is missing (shard 1 of 1)" in err)
    (tmp_path / "scores.csv").write_text("layer_num,recall\n0,0.1\n1,0.2\n2,0.3\n3,0.4\n")
    code, report, err = command("probe", bare, "--scores", tmp_path / "scores.csv")
    assert code == 0 and report["buys"]["contexts"], err


def test_damaged_weights_are_said_in_a_dry_run_too(command, tmp_path):
    folder = save_source(tmp_path / "source")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = command("probe", folder, "--dry-run", *SMALL)
    assert code == 1 and "where its header says" in err


def test_counts_the_blocks_of_the_hankel_rank():
    config = Qwen3Config(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=99
    )
    model, _ = on_meta(config, LayerPlan.from_layers(32, [0], "gka"), {})
    needs = {}
    for methods in (["swa"], ["swa", "hankel"]):
        for context in (16_384, 32_768):
            options = make_options(config, "m", methods=methods, context=context, sequences=4)
            needs[len(methods), context] = need(model, options, Amount.expected(options), torch.float32, CPU)
    assert needs[1, 32_768].work == pytest.approx(2 * needs[1, 16_384].work, rel=0.01)
    assert needs[2, 32_768].work > 3 * 4 * 16_384**2  # one head's block, and what is computed from it
    assert needs[2, 16_384].seconds > needs[1, 16_384].seconds


def test_counts_what_mixers_are_trained_in(qwen, gpus):
    gpus()
    model, _ = qwen
    options = [make_options(model.config, "m", methods=["mixer"], align=tokens) for tokens in (0, 200_000)]
    fitted, aligned = (need(model, some, Amount.expected(some), torch.bfloat16, CPU).work for some in options)
    # A weight, its gradient and two moments in fp32 of every attention matrix, less what is free by then.
    assert aligned - fitted > 36 * 4096 * 128 * (2 * 32 + 2 * 8) * 16 / 2


def test_what_fits_on_a_gpu_stays_there(qwen, gpus):
    gpus(23.5)
    need = needed(qwen)
    assert need.weights == pytest.approx(16.4e9, rel=0.01)
    where = Placement.of(need, torch.device("cuda"))
    assert (where.room, where.outside, where.lacking, str(where)) == (None, 0, 0, "on cuda")
    assert need.summary(where)["seconds"] == round(need.seconds) > 0


def test_what_does_not_fit_stays_in_main_memory_and_takes_time(qwen, gpus, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}[name])
    gpus(23.5)
    need = needed(qwen)
    where = Placement.of(need, torch.device("cuda"), gpu_memory=12)
    assert where.outside == need.weights - where.room[0] > 0 and where.room[0] + need.work == int(0.95 * 12 * GIB)
    assert "of the weights in main memory, brought to cuda:0 when needed" in str(where) and not where.lacking
    plan = need.summary(where)
    assert plan["offloaded_bytes"] == where.outside
    assert plan["seconds"] == round(need.seconds + need.passes * where.outside / 1e10)
    gpus(8, 11)
    where = Placement.of(needed(qwen), torch.device("cuda"))
    assert list(where.room) == [0, 1] and where.outside and "brought to cuda:0, cuda:1" in str(where)
    gpus(16, 16)
    assert str(Placement.of(needed(qwen), torch.device("cuda"))) == "layers spread over cuda:0, cuda:1"
    where = Placement.of(needed(qwen), torch.device("cuda:1"))
    assert list(where.room) == [1] and where.outside


def test_says_where_memory_is_lacking(qwen, gpus, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 * GIB // 4096}[name])
    gpus()
    where = Placement.of(needed(qwen, "cpu"), CPU)
    assert where.lacking > 8 * GIB and "on cpu, where " in str(where) and str(where).endswith("of memory are lacking")
    gpus(2)
    assert Placement.of(needed(qwen), torch.device("cuda")).lacking > 0  # not all can wait in main memory
    gpus(0.5)
    where = Placement.of(needed(qwen), torch.device("cuda"))
    assert where.room == {0: 0} and where.lacking > 0


def test_a_plan_for_a_gpu_that_is_not_here(command, place, tmp_path, qwen, gpus):
    gpus()
    qwen[0].config.save_pretrained(tmp_path / "qwen")
    words = [tmp_path / "qwen", "--gpu-memory", 24]
    code, plan, err = command("probe", *words, "--dry-run")
    assert code == 0, err
    assert plan["placement"] == "on cuda" and plan["dtype"] == "bfloat16" and plan["weight_bytes"] < 16.4e9
    assert plan["seconds"] is None and plan["operations"] > plan["tokens"] * plan["forward_passes"] * 2 * 6.9e9
    code, plan, err = command("probe", *words[:-1], 12, "--dry-run")
    assert code == 0 and "brought to cuda:0 when needed" in plan["placement"], err
    assert plan["offloaded_bytes"] > 4e9
    code, _, err = command("probe", *words[:-1], 12, "--dry-run", "--method", "mixer")
    assert code == 2 and "--method mixer needs the whole model on one device" in err
    code, _, err = command("probe", place / "source", "--gpu-memory", 24)
    assert code == 2 and "--gpu-memory is of a GPU, but the probe would run on cpu" in err


def test_what_does_not_fit_is_refused_or_said_before_anything_is_loaded(probe, gpus, monkeypatch):
    rooms = []

    def load(self, dtype, device, room):
        rooms.append(room)
        raise KeyboardInterrupt

    monkeypatch.setattr(Source, "load", load)
    gpus(1e-4, 1e-4)
    code, _, err = probe("--device", "cuda")
    assert code == 130 and rooms == [{0: 0, 1: 0}] and "Warning: The model will be " in err and "are lacking" in err
    code, _, err = probe("--device", "cuda", "--method", "mixer")
    assert code == 2 and len(rooms) == 1 and "needs the whole model on one device" in err


def test_a_model_of_which_a_part_is_offloaded_gets_the_same_scores(place, tmp_path):
    """Accelerate's own placement within a small memory, here of the CPU, and on a disk what does not fit."""
    texts = [path.read_text() for path in sorted((place / "text").iterdir())]
    model, tokenizer = hybridize.load(place / "source", dtype="float32", device="cpu")
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    embedding = model.model.embed_tokens.weight.numel() * 4
    part = AutoModelForCausalLM.from_pretrained(
        place / "source",
        dtype=torch.float32,
        device_map="auto",
        max_memory={"cpu": embedding + 4 * layer},
        offload_folder=tmp_path / "outside",
    ).eval()
    outside = [any(p.is_meta for p in layer.parameters()) for layer in part.model.layers]
    assert any(outside) and not all(outside)
    settings = {"context": 64, "sequences": 4, "windows": [8], "methods": ["swa", "hankel"]}
    want = hybridize.probe(model, tokenizer, texts, **settings)
    found = hybridize.probe(part, tokenizer, texts, **settings)
    assert found.layers == want.layers and found.base == want.base
    settings |= {"methods": ["swa"], "select": "greedy"}
    assert hybridize.probe(part, tokenizer, texts, **settings).order == (
        hybridize.probe(model, tokenizer, texts, **settings).order
    )
    with pytest.raises(hybridize.errors.UsageError, match="whole model on one device"):
        hybridize.probe(part, tokenizer, texts, **{**settings, "methods": ["mixer"], "select": "lowest"})
