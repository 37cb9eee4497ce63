"""Hybrids in the format of awslabs/hybrid-model-factory load as ours and are saved in our format."""

import json
from pathlib import Path

import pytest
import torch
from hybrid_cases import CASES, MIXERS, WINDOWED, source, tokens
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch.nn.functional import silu, softplus
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import hybridize
from hybridize.cli import main
from hybridize.errors import SourceError

DATA = Path(__file__).parents[1] / "data"
FAMILIES = ("llama", "ministral3", "qwen2", "qwen3", "qwen3_moe")
LONG = {"swa_config": {"window_size": 64}}  # longer than any text here: full attention


def write(folder, model, pattern, layers, **blocks):
    """A folder in the other format: the model's own tensors, and `layers`, tensors by layer, for what is converted."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"model_type": f"hybrid_{raw['model_type']}", "architectures": ["HybridForCausalLM"], **blocks}
    raw |= {"hybrid_override_pattern": pattern, "layer_types": pattern.split("-")}
    path.write_text(json.dumps(raw))
    own = load_file(folder / "model.safetensors")
    for layer, added in layers.items():
        start = f"model.layers.{layer}."
        own = {name: x for name, x in own.items() if not name.startswith(f"{start}self_attn.")}
        own |= {start + name: x.contiguous() for name, x in added.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


def attention_as(model, layer, name):
    start = f"model.layers.{layer}.self_attn."
    found = {k.removeprefix(start): x for k, x in model.state_dict().items() if k.startswith(start)}
    return {f"{name}.{k}": x.clone() for k, x in found.items()}


@pytest.mark.parametrize("kind", ["gka", "gdn"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_recorded_layers(tmp_path, kind, family):
    """Biases and q/k norms of the family are no part of such a layer, and change nothing."""
    recorded = load_file(DATA / f"layer_{kind}.safetensors")
    weights = {f"{kind}.{n.removeprefix('w.')}": x for n, x in recorded.items() if n.startswith("w.")}
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = source(family, 2, **shape)
    settings = {"gka_config": {"num_iter": 30, "ridge_strength": 0.02, "norm_eps": 1e-6, "chunk_size": 64}}
    folder = write(tmp_path / "model", model, f"*-{kind.upper()}", {1: weights}, **settings)
    loaded, _ = hybridize.load(folder)
    with torch.no_grad():
        y, _ = loaded.model.layers[1].self_attn(recorded["x"].float())
        assert (y - recorded["y_fp64"]).norm() < 1e-4 * recorded["y_fp64"].norm()
        assert (y - recorded["y_fp64"]).abs().max() < 1e-4 * recorded["y_fp64"].abs().max()
        ids = tokens(2, 40)
        rotary = loaded.model.rotary_emb(recorded["x"].float(), torch.arange(128)[None])
        turned, _ = loaded.model.layers[1].self_attn(recorded["x"].float(), rotary)
        assert torch.equal(turned, y)  # no rotary embedding in these layers
        want = loaded(ids).logits
    loaded.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids).logits, want)
    assert str(hybridize.LayerPlan.from_pattern(again.config.hybrid["pattern"])) == f"*-{kind.upper()}"


def mamba(x, w, heads, kv_heads, dim, normed):
    """The other format's Mamba-2 layer, step by step in fp64."""
    w = {name: t.double() for name, t in w.items()}
    rows = x.double() @ w["in_proj.weight"].T
    z, v, b, c, dt = rows.split([heads * dim, kv_heads * dim, kv_heads * dim, heads * dim, heads], -1)
    if normed:

        def norm(t, weight):
            t = t.unflatten(-1, (-1, dim))
            return (t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight).flatten(-2)

        b, c = norm(b, w["B_norm.weight"]), norm(c, w["C_norm.weight"])
    before = torch.cat([v, b, c], -1).transpose(1, 2)
    weight, bias = w["conv1d.weight"], w["conv1d.bias"]
    conv = torch.nn.functional.conv1d(before, weight, bias, padding=3, groups=len(weight))[..., : x.shape[1]]
    v, b, c = silu(conv).transpose(1, 2).split([kv_heads * dim, kv_heads * dim, heads * dim], -1)
    v, b = (t.unflatten(-1, (-1, dim)).repeat_interleave(heads // kv_heads, 2) for t in (v, b))
    c, dt, rate = c.unflatten(-1, (-1, dim)), softplus(dt + w["dt_bias"]), -w["A_log"].exp()
    state, outputs = torch.zeros(len(x), heads, dim, dim, dtype=torch.float64), []
    for t in range(x.shape[1]):
        write = dt[:, t, :, None, None] * v[:, t, :, :, None] * b[:, t, :, None, :]
        state = (dt[:, t] * rate).exp()[..., None, None] * state + write
        outputs.append((state @ c[:, t, :, :, None])[..., 0] + w["D"][:, None] * v[:, t])
    o = (torch.stack(outputs, 1).flatten(-2) * silu(z)).unflatten(-1, (-1, dim))
    o = (o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * w["norm.weight"]
    return o @ w["out_proj.weight"].T


def mamba_weights(hidden, heads, kv_heads, dim, normed):
    generator = torch.Generator().manual_seed(5)
    channels = (heads + 2 * kv_heads) * dim
    shapes = {
        "in_proj.weight": (channels + heads * dim + heads, hidden),
        "conv1d.weight": (channels, 1, 4),
        "conv1d.bias": (channels,),
        "norm.weight": (heads * dim,),
        "out_proj.weight": (hidden, heads * dim),
        **{name: (heads,) for name in ("A_log", "dt_bias", "D")},
        **({"B_norm.weight": (dim,), "C_norm.weight": (dim,)} if normed else {}),
    }
    return {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(("family", "normed"), [("llama", False), ("qwen3", True), ("qwen3", False)])
def test_mamba2_layers(tmp_path, family, normed):
    model = source(family, 2)
    heads, kv_heads = CASES[family][1]
    dim = model.config.head_dim
    weights = mamba_weights(32, heads, kv_heads, dim, normed)
    block = {"ssm_cfg": {"expand": 1, "ngroups": heads, "d_state": dim}, "use_qk_norm": normed}
    layers = {0: {f"mamba.{name}": x for name, x in weights.items()}}
    loaded, _ = hybridize.load(write(tmp_path / "model", model, "M2-*", layers, mamba2_config=block))
    x = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        y, _ = loaded.model.layers[0].self_attn(x)
        want = loaded(tokens(1, 9)).logits
    assert (y - mamba(x, weights, heads, kv_heads, dim, normed)).abs().max() < 1e-4
    loaded.save_pretrained(tmp_path / "ours")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")(tokens(1, 9)).logits, want)
    text = loaded.generate(tokens(1, 9), max_new_tokens=5, do_sample=False)  # convolution's bias and gate, decoding
    step = tokens(1, 9)
    for _ in range(5):
        step = torch.cat([step, loaded(step, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(text, step)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_own_layers(tmp_path, family):
    """A window longer than the text is full attention, so that the logits are the source's."""
    model = source(family, 2)
    folder = write(tmp_path / "model", model, "SWA-*", {0: attention_as(model, 0, "swa")}, **LONG)
    loaded, tokenizer = hybridize.load(folder)
    assert type(loaded).__name__ == f"Hybrid{type(model).__name__}" and tokenizer("a")["input_ids"] == [0]
    ids = tokens(2, 33)
    with torch.no_grad():
        assert (loaded(ids).logits - model(ids).logits).abs().max() < 1e-5
    loaded.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert torch.equal(again(ids).logits, loaded(ids).logits)


def bad(tmp_path, **changes):
    """A folder of one GDN layer with some tensors (None: taken out) or settings changed."""
    recorded = load_file(DATA / "layer_gdn.safetensors")
    weights = {f"gdn.{n.removeprefix('w.')}": x for n, x in recorded.items() if n.startswith("w.")}
    tensors = {n: x for n, x in changes.items() if isinstance(x, torch.Tensor) or x is None}
    weights = {n: x for n, x in (weights | tensors).items() if x is not None}
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    pattern = changes.pop("pattern", "GDN-*")
    settings = {n: x for n, x in changes.items() if isinstance(x, dict)}
    return write(tmp_path / "model", source("llama", 2, **shape), pattern, {0: weights}, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gdn.gk_proj.weight": None}, r"lacks the tensor model\.layers\.0\.gdn\.gk_proj\.weight"),
        ({"gdn.extra.weight": torch.zeros(3)}, r"has the tensor model\.layers\.0\.gdn\.extra\.weight, which no layer"),
        ({"gdn.q_proj.weight": torch.zeros(7, 7)}, r"mismatched tensors.*layers\.0\.self_attn\.q_proj"),
        ({"mlp.gate_proj.weight": None, "mlp.new.weight": torch.zeros(2)}, "unexpected tensors.*mlp.new"),
        ({"pattern": "BMF-*"}, r"Layer 0 of .* is B'MOJO-F"),
        ({"pattern": "*DA-GDN"}, r"Layer 0 of .* is \*DA, a fused layer"),
        ({"pattern": "GDN>GKA-*"}, r"is GDN>GKA, a fused layer"),
        ({"pattern": "XYZ-*"}, "hybrid_override_pattern .* 'XYZ'"),
        ({"pattern": "GDN-*-*"}, "3 entries but the model has 2 layers"),
        ({"gdn_config": {"allow_neg_eigval": True}}, "sets allow_neg_eigval to True in gdn_config"),
        ({"pattern": "M2-*"}, r"lacks the tensor model\.layers\.0\.mamba\.in_proj\.weight"),
        ({"pattern": "SWA-*"}, "no window_size"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, changes, message):
    with pytest.raises(hybridize.errors.HybridizeError, match=message):
        hybridize.load(bad(tmp_path, **changes))


def test_mamba_of_other_widths_is_named(tmp_path):
    model = source("llama", 2)
    weights = mamba_weights(32, 4, 2, model.config.head_dim, False)
    weights["conv1d.bias"] = weights["conv1d.bias"][:-1].contiguous()
    folder = write(tmp_path / "model", model, "M2-*", {0: {f"mamba.{n}": x for n, x in weights.items()}})
    with pytest.raises(SourceError, match=r"mamba\.conv1d\.bias has 63 rows where 64 belong"):
        hybridize.load(folder)


def test_it_is_no_source(tmp_path, capsys):
    assert main(["probe", str(bad(tmp_path)), "--workspace", str(tmp_path / "runs")]) == 1
    assert "is a hybrid already" in capsys.readouterr().err


def test_all_settings_of_the_other_format_are_ours(tmp_path):
    """They are saved in our config, and a config without them means the defaults."""
    loaded, _ = hybridize.load(bad(tmp_path))
    loaded.save_pretrained(tmp_path / "ours")
    block = json.loads((tmp_path / "ours" / "config.json").read_text())["hybrid"]
    assert block["mixers"]["gdn"]["qk_norm"] is False and block["mixers"]["gdn"]["conv_activation"] == "silu"
    assert block["source"]["format"] == "hybrid_llama"
    plain = hybridize.convert(source("llama", 3), hybridize.LayerPlan.from_pattern(MIXERS["gdn"][0]))
    del plain.config.hybrid["mixers"]["gdn"]["qk_norm"]
    assert plain.model.layers[0].self_attn.settings["qk_norm"] is True
    assert isinstance(plain.config, LlamaConfig) and not WINDOWED & {"llama"}
