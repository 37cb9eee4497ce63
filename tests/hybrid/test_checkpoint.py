"""What is saved comes back bit by bit, in a fresh process too; a damaged checkpoint is refused by name."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hybrid_cases import CASES, GKA, PAIR, cache_of, check_equal, hybrid, make, run, source, states, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hybridize
from hybridize.errors import CheckpointError, PlanError

ROOT = Path(__file__).resolve().parents[2]
FP32 = {"A_log", "dt_bias", "D"}
MIXED = ("*-GKA-SWA-GDN-M2", {"window": 8, "sinks": 2, **GKA})


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def on_disk(folder):
    """Every tensor of the folder's safetensors files."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found.update(load_file(file))
    return found


def same(a, b, what):
    assert a.keys() == b.keys(), what
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), f"{what}: {name}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every family's mixed hybrid, saved; qwen2 also without tied embeddings, and in small shards."""
    made = {}
    for case in CASES:
        made[case] = (hybrid(case, "mixed"), {})
    made["untied"] = (make("qwen2", *MIXED, tie_word_embeddings=False), {})
    made["shards"] = (hybrid("qwen3_moe", "mixed"), {"max_shard_size": "20KB"})
    root = tmp_path_factory.mktemp("hybrids")
    for name, (model, options) in made.items():
        model.save_pretrained(root / name, **options)
    return {name: (root / name, model) for name, (model, _) in made.items()}


def fresh(out, folders, *options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "tests/hybrid/fresh.py"), *options, str(out), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


def test_fresh_process(folders, tmp_path):
    found = fresh(tmp_path / "found.pt", [folder for folder, _ in folders.values()])
    for name, (folder, model) in folders.items():
        got = found[str(folder)]
        same({n: x.data for n, x in got["tensors"].items()}, {n: x.data for n, x in tensors(model).items()}, name)
        assert torch.equal(got["logits"], run(model, torch.arange(1, 41)[None]).logits), name
        assert got["class"] == type(model).__name__
        assert got["tied"] == model.config.tie_word_embeddings == (name in {"llama", "qwen2"}), name
        for parameter, dtype in got["half"].items():
            small = parameter.rsplit(".", 1)[-1] in FP32
            cast = torch.bfloat16 if "moe" in name else torch.float32
            assert dtype == (torch.float32 if small else cast), f"{name} {parameter}"
        assert sum(parameter.rsplit(".", 1)[-1] in FP32 for parameter in got["half"]) == 7, name
        assert got["config"]["hybrid"] == model.config.hybrid
    assert len(list(folders["shards"][0].glob("*.safetensors"))) > 2
    first = folders["llama"][0]
    again = fresh(tmp_path / "again.pt", [first], "--hybridize-first")[str(first)]
    same(again["tensors"], found[str(first)]["tensors"], "hybridize imported first")


@pytest.mark.parametrize("case", CASES)
def test_names_on_disk_are_the_sources(case, folders, tmp_path):
    folder, _ = folders[case]
    plain = source(case, 5)
    plain.save_pretrained(tmp_path)
    mine, its = on_disk(folder), on_disk(tmp_path)
    new = {name.rsplit("self_attn.", 1)[-1].split(".")[0] for name in mine.keys() - its.keys()}
    known = {"q_conv", "k_conv", "v_conv", "a_proj", "b_proj", "alpha_proj", "g_proj", "o_norm", *FP32}
    assert its.keys() <= mine.keys(), f"{case} lost {sorted(its.keys() - mine.keys())[:3]}"
    assert new == known, case
    untouched = hybridize.convert(plain, hybridize.LayerPlan.from_pattern(MIXED[0]), window=8, share=True)
    untouched.save_pretrained(tmp_path / "hybrid")
    mine = on_disk(tmp_path / "hybrid")
    same({n: mine[n] for n in its}, its, case)
    config, its_config = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path))
    for key, value in its_config.items():
        if key not in {"model_type", "architectures"}:
            assert config[key] == value, f"{case} {key}"
    assert set(config) - set(its_config) == {"hybrid"}
    assert config["model_type"] == f"hybridize_{its_config['model_type']}"
    umask = os.umask(0)
    os.umask(umask)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_decays_and_states_stay_fp32(tmp_path):
    model = make("qwen3", *MIXED)
    want = {n: p.clone() for n, p in model.named_parameters() if n.rsplit(".", 1)[-1] in FP32}
    ids = tokens(2, 30)
    loaded = {}
    for how, cast in {
        "to": lambda m: m.to(torch.bfloat16),
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "part": lambda m: m.model.layers[1].self_attn.to(torch.bfloat16) and m.to(dtype=torch.bfloat16),
    }.items():
        small = cast(copy.deepcopy(model))
        same({n: p for n, p in small.named_parameters() if n in want}, want, how)
        cache = cache_of(run(small, ids))
        for name, x in states(cache, small).items():
            kept = name.split(".")[1] in {"H", "U", "S", "h"}
            assert x.dtype == (torch.float32 if kept else torch.int64 if "seen" in name else small.dtype), (how, name)
        small.save_pretrained(tmp_path / how)
        disk = on_disk(tmp_path / how)
        same({n: disk[n] for n in want}, want, f"{how} on disk")
        for dtype in ("auto", torch.bfloat16, torch.float32):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / how, dtype=dtype)
            same({n: p for n, p in loaded.named_parameters() if n in want}, want, f"{how} loaded as {dtype}")
    assert loaded.model.layers[0].self_attn.q_proj.weight.dtype == torch.float32


def test_damaged_checkpoints_are_refused(folders, tmp_path):
    folder, _ = folders["llama"]
    names = sorted(on_disk(folder))
    for lost in (
        "model.layers.1.self_attn.A_log",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ):
        assert lost in names
        kept = {n: x for n, x in on_disk(folder).items() if n != lost}
        _copy(folder, tmp_path, kept)
        with pytest.raises(CheckpointError, match=rf"missing tensors.*{lost}"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    _copy(folder, tmp_path, {**on_disk(folder), "model.layers.9.stray": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"unexpected tensors.*layers\.9\.stray"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    _copy(folder, tmp_path, {**on_disk(folder), "model.layers.1.self_attn.A_log": torch.zeros(9)})
    with pytest.raises((CheckpointError, RuntimeError), match="A_log"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def _copy(folder, to, weights):
    for file in folder.iterdir():
        if file.suffix == ".json":
            (to / file.name).write_bytes(file.read_bytes())
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})


def test_damaged_shards_are_refused(folders, tmp_path):
    folder, _ = folders["shards"]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=shards[1].name):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    shards[1].unlink()
    with pytest.raises((CheckpointError, OSError), match=shards[1].name):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    shards[1].write_bytes(whole)
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_missing_expert_is_named(folders, tmp_path):
    folder, _ = folders["qwen3_moe"]
    weights = on_disk(folder)
    lost = next(n for n in weights if "experts.1.down_proj" in n)
    _copy(folder, tmp_path, {n: x for n, x in weights.items() if n != lost})
    with pytest.raises((CheckpointError, RuntimeError), match="experts"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_map(folders, device_map):
    folder, model = folders["mistral"]
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
    same(tensors(loaded), tensors(model), str(device_map))
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :4] = 0
    want = run(model, ids, attention_mask=mask).logits
    assert torch.equal(run(loaded, ids, attention_mask=mask).logits, want)


def test_hooks_of_accelerate(folders):
    from accelerate import cpu_offload

    folder, model = folders["qwen3"]
    loaded = cpu_offload(AutoModelForCausalLM.from_pretrained(folder), torch.device("cpu"))
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :4] = 0
    assert torch.equal(run(loaded, ids, attention_mask=mask).logits, run(model, ids, attention_mask=mask).logits)


def test_copies(tmp_path):
    model = make("qwen3", *PAIR)
    ids = tokens(1, 20)
    want = run(model, ids).logits
    for name, twin in {
        "pickle": pickle.loads(pickle.dumps(model)),
        "deepcopy": copy.deepcopy(model),
        "config": type(model)(pickle.loads(pickle.dumps(model.config))),
        "copied config": type(model)(copy.deepcopy(model.config)),
    }.items():
        assert type(twin) is type(model) and type(twin.config) is type(model.config)
        if "config" in name:
            torch.save(model.state_dict(), tmp_path / "state.pt")
            twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        same(tensors(twin.eval()), tensors(model), name)
        assert torch.equal(run(twin, ids).logits, want), name
        twin.config.hybrid["mixers"]["swa"]["window"] = 3
        assert not torch.equal(run(twin, ids).logits, want), f"{name}: its settings are its own"
        assert torch.equal(run(model, ids).logits, want)


def test_initialisation_never_touches_loaded_values(folders):
    folder, model = folders["qwen2"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.init_weights()
    loaded.post_init()
    same(tensors(loaded), tensors(model), "after post_init")


@pytest.mark.parametrize("tied", [True, False])
def test_resize_token_embeddings(tied, tmp_path):
    model = make("llama", *MIXED, tie_word_embeddings=tied)
    ids = tokens(2, 20)
    want = run(model, ids).logits
    kept = {n: x.clone() for n, x in tensors(model).items() if "embed" not in n and "lm_head" not in n}
    model.resize_token_embeddings(80)
    got = run(model, ids).logits
    assert got.shape[-1] == 80 and torch.equal(got[..., :64], want)
    same({n: x for n, x in tensors(model).items() if n in kept}, kept, "resized")
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, ids).logits, got)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = make("qwen3", "*-GKA-SWA-GDN-M2", {"window": 8, **GKA}).train()
    ids = tokens(2, 40)
    place = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    gradients = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(ids, labels=ids, position_ids=place).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(g.abs().max() > 0 for n, g in gradients[0].items() if "k_proj.bias" not in n)
    check_equal(gradients[1], gradients[0], f"reentrant {reentrant}", 1e-6)


def test_tokenizer(folders, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    for file in folders["llama"][0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    base = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("two one three")["input_ids"] == [2, 1, 0]
    assert loaded.chat_template == tokenizer.chat_template


def test_configs_that_do_not_fit(folders, tmp_path):
    folder, _ = folders["llama"]
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"hybrid": None}, "no hybrid block"),
        ({"hybrid": {**config["hybrid"], "format": 99}}, "upgrade"),
        ({"hybrid": {**config["hybrid"], "pattern": "*-GKA"}}, "layer 2"),
        ({"hybrid": {**config["hybrid"], "pattern": "*-GKA-SWA-GDN-XX"}}, "position 4"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(PlanError, match=message):
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
