"""What conversion keeps of its source, which sources and plans it refuses, and what settings do."""

import hashlib
import json

import pytest
import torch
import transformers
from hybrid_cases import CASES, GKA, PAIR, VOCAB, hybrid, make, run, source, tokens

import hybridize
from hybridize.errors import ConversionError, PlanError, SourceError
from hybridize.hybrid.model import mixers
from hybridize.mixers import MIXERS

LayerPlan = hybridize.LayerPlan


def digest(model):
    h = hashlib.sha256()
    for name, x in model.state_dict().items():
        h.update(name.encode())
        h.update(x.numpy().tobytes())
    return h.hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_a_pattern_without_conversion_is_the_source(case, tmp_path):
    plain = source(case, 4)
    before = digest(plain), type(plain), type(plain.config), plain.config.to_dict()
    same = hybridize.convert(plain, LayerPlan.from_pattern("*-*-*-*"))
    ids, mask = tokens(2, 64), torch.ones(2, 64, dtype=torch.long)
    mask[0, :9] = 0
    place = torch.cat([torch.arange(30), torch.arange(34)]).expand(2, -1)
    for more in ({}, {"attention_mask": mask}, {"position_ids": place, "use_cache": False}, {"position_ids": place}):
        assert torch.equal(run(same, ids, **more).logits, run(plain, ids, **more).logits), f"{case} {list(more)}"
    for more in ({}, {"num_beams": 2}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}):
        prompt = ids[:1] if "prompt_lookup_num_tokens" in more else ids
        got, want = (m.generate(prompt, max_new_tokens=5, do_sample=False, **more) for m in (same, plain))
        assert torch.equal(got, want), f"{case} {more}"
    same.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, ids).logits, run(plain, ids).logits), case
    hybridize.convert(plain, LayerPlan.from_pattern("GKA-GDN-M2-SWA"))
    assert (digest(plain), type(plain), type(plain.config), plain.config.to_dict()) == before, f"{case} was changed"


@pytest.mark.parametrize("case", CASES)
def test_sharing(case):
    plain = source(case, 4)
    ids = tokens(1, 20)
    want = run(plain, ids).logits
    theirs = {n: x.data_ptr() for n, x in [*plain.named_parameters(), *plain.named_buffers()]}
    for share in (True, False):
        model = hybridize.convert(plain, LayerPlan.from_pattern("*-GDN-*-SWA"), share=share)
        mine = {n: x.data_ptr() for n, x in [*model.named_parameters(), *model.named_buffers()]}
        shared = {n for n in theirs if mine[n] == theirs[n]}
        own = {n for n in theirs if ".1.self_attn." in n or ".3.self_attn." in n}
        assert shared == (theirs.keys() - own if share else set()), f"{case} share={share}"
    for mixer in mixers(model).values():
        for p in mixer.parameters():
            p.data.zero_()
    assert torch.equal(run(plain, ids).logits, want), case


def test_every_source_tensor_stays_and_is_used():
    """Biases and norms of a converted layer are the source's, and a change to any of its tensors changes the output."""
    for case in CASES:
        plain, model = source(case), make(case, "GDN-SWA-GKA", {"window": 8, **GKA})
        ours, ids = model.state_dict(), tokens(1, 20)
        fresh = hybridize.convert(plain, LayerPlan.from_pattern("GDN-SWA-GKA")).state_dict()
        want = run(model, ids).logits
        for name, x in plain.state_dict().items():
            assert torch.equal(fresh[name], x), f"{case} {name}"
            if "self_attn" in name:
                kept = ours[name].clone()
                ours[name].add_(0.05 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(3)))
                assert not torch.equal(run(model, ids).logits, want), f"{case}: {name} is not used"
                ours[name].copy_(kept)


def test_config_keeps_every_key_and_rope(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
    plain = source("qwen2-window", 4, rope_parameters=rope)
    model = hybridize.convert(plain, LayerPlan.from_pattern("GDN-*-SWA-*"), window=8)
    model.save_pretrained(tmp_path / "hybrid")
    plain.save_pretrained(tmp_path / "plain")
    mine, its = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hybrid", "plain"))
    assert {k: v for k, v in mine.items() if k not in {"hybrid", "model_type", "architectures"}} == {
        k: v for k, v in its.items() if k not in {"model_type", "architectures"}
    }
    assert mine["layer_types"] == its["layer_types"] and len(set(its["layer_types"])) == 2
    assert mine["rope_parameters"]["rope_theta"] == 1e6 and mine["rope_parameters"]["rope_type"] == "yarn"
    assert mine["hybrid"]["pattern"] == "GDN-*-SWA-*" and mine["hybrid"]["mixers"]["swa"]["window"] == 8
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")
    rotary, kept = plain.model.rotary_emb, loaded.model.rotary_emb
    assert torch.equal(rotary.inv_freq, kept.inv_freq) and rotary.attention_scaling == kept.attention_scaling != 1.0
    ids = tokens(1, 40)
    assert torch.equal(run(model, ids).logits, run(loaded, ids).logits)


def test_settings_change_a_loaded_model(tmp_path):
    make("llama", "*-GKA-SWA", {"num_iters": 20, "window": 8}).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(1, 40)
    want = run(model, ids).logits
    for kind, name, value in (
        ("gka", "num_iters", 1),
        ("gka", "ridge", 0.5),
        ("swa", "window", 3),
        ("gka", "rope", False),
    ):
        kept = model.config.hybrid["mixers"][kind][name]
        model.config.hybrid["mixers"][kind][name] = value
        assert (run(model, ids).logits - want).abs().max() > 1e-4, name
        model.config.hybrid["mixers"][kind][name] = kept
    assert torch.equal(run(model, ids).logits, want)


def test_patterns():
    plan = LayerPlan.from_pattern(" *-GKA-*-gdn-M2-SWA ")
    assert str(plan) == "*-GKA-*-GDN-M2-SWA" and plan.layers == [1, 3, 4, 5]
    assert LayerPlan.from_pattern(str(plan)) == plan
    assert str(LayerPlan.from_layers(4, [3, 1], "mamba2")) == "*-M2-*-M2"
    assert str(LayerPlan.evenly_spaced(4, 0.5, "gka")) == "*-GKA-*-GKA"
    assert str(LayerPlan.evenly_spaced(3, 1, "gdn")) == "GDN-GDN-GDN"
    for layers in range(1, 12):
        for ratio in (0.01, 0.3, 0.5, 0.75, 1.0):
            plan = LayerPlan.evenly_spaced(layers, ratio, "swa")
            assert len(plan.layers) == max(1, round(ratio * layers)) and len(plan.kinds) == layers
            gaps = [b - a for a, b in zip([-1, *plan.layers], plan.layers, strict=False)]
            assert max(gaps) - min(gaps) <= 1
    for wrong, message in (
        ("*-GKA-X-*", "'X' at position 2"),
        ("*--*", "'' at position 1"),
        ("", "'' at position 0"),
        ("*-mamba2", "'mamba2' at position 1"),
    ):
        with pytest.raises(PlanError, match=message):
            LayerPlan.from_pattern(wrong)
    for ratio in (0, -0.1, 1.1, float("nan")):
        with pytest.raises(PlanError, match="above 0 and at most 1"):
            LayerPlan.evenly_spaced(4, ratio, "gka")
    with pytest.raises(PlanError, match="Layer 4 does not exist"):
        LayerPlan.from_layers(4, [4], "gka")
    with pytest.raises(PlanError, match="Layer -1 does not exist"):
        LayerPlan.from_layers(4, [-1], "gka")
    with pytest.raises(PlanError, match="twice"):
        LayerPlan.from_layers(4, [1, 1], "gka")
    with pytest.raises(PlanError, match="'GKA'"):
        LayerPlan.from_layers(4, [1], "GKA")


def test_sources_and_plans_that_do_not_fit():
    plain, plan = source("llama", 4), LayerPlan.from_pattern("*-GKA-*-*")
    with pytest.raises(PlanError, match=r"2 entries .* 4 layers: nothing stands for layer 2"):
        hybridize.convert(plain, LayerPlan.from_pattern("*-GKA"))
    with pytest.raises(PlanError, match="position 4 stands for no layer"):
        hybridize.convert(plain, LayerPlan.from_pattern("*-GKA-*-*-*"))
    with pytest.raises(ConversionError, match=r"setting 'windw'.*num_iters"):
        hybridize.convert(plain, plan, windw=3)
    with pytest.raises(ConversionError, match="setting 'window'"):  # known, but to no mixer of this plan
        hybridize.convert(plain, plan, window=3)
    with pytest.raises(SourceError, match="already a hybrid"):
        hybridize.convert(hybrid("llama", "gka"), LayerPlan.from_pattern("*-GKA-*"))
    pico = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    two = LayerPlan.from_pattern("*-GKA")
    for config in (
        transformers.BertConfig(**pico, intermediate_size=32),
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2),
        transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    ):
        model = transformers.AutoModel.from_config(config)
        with pytest.raises(SourceError, match=rf"'{config.model_type}' cannot be converted; known are .*llama.*qwen3"):
            hybridize.convert(model, two)
    inner = source("llama", 2).model
    with pytest.raises(SourceError, match=r"LlamaModel.*LlamaForCausalLM"):
        hybridize.convert(inner, two)
    classifier = transformers.LlamaForSequenceClassification(source("llama", 2).config)
    with pytest.raises(SourceError, match="LlamaForSequenceClassification"):
        hybridize.convert(classifier, two)
    quantised = source("llama", 4)
    quantised.hf_quantizer = object()
    with pytest.raises(ConversionError, match="quantised"):
        hybridize.convert(quantised, plan)
    strange = source("llama", 4)
    strange.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ConversionError, match="layer 1 has sinks"):
        hybridize.convert(strange, plan)
    assert hybridize.convert(strange, LayerPlan.from_pattern("*-*-GKA-*")) is not None


def test_masks_that_cannot_be_read():
    model = make("llama", *PAIR)
    ids = tokens(1, 6)
    with pytest.raises(ConversionError, match="4-D"):
        run(model, ids, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(ConversionError, match="4-D"):
        run(model, ids, attention_mask={"full_attention": None})


def test_classes_and_training_mode():
    plain = source("qwen3").train()
    model = hybridize.convert(plain, LayerPlan.from_pattern("*-GKA-SWA"))
    assert isinstance(model, transformers.Qwen3ForCausalLM) and isinstance(model.model, transformers.Qwen3Model)
    assert model.training and all(m.training for m in mixers(model).values())
    assert type(model).__name__ == "HybridQwen3ForCausalLM" and type(model.config).__name__ == "HybridQwen3Config"
    assert set(mixers(model)) == {1, 2}
    assert {type(m) for m in mixers(model).values()} == {MIXERS["gka"], MIXERS["swa"]}
    frozen = source("qwen3").requires_grad_(False).to(torch.bfloat16)
    model = hybridize.convert(frozen, LayerPlan.from_pattern("*-GKA-M2"))
    for name, p in model.named_parameters():
        small = name.rsplit(".", 1)[-1] in {"A_log", "dt_bias", "D"}
        assert p.dtype == (torch.float32 if small else torch.bfloat16), name
    assert run(model, tokens(1, 9)).logits.isfinite().all()


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3_moe"])
@pytest.mark.parametrize("seen_before", [False, True])
def test_outputs_on_the_way_are_given_as_by_the_source(case, seen_before, tmp_path):
    plain, ids = source(case, 4), tokens(2, 9)
    plain.set_attn_implementation("eager")
    wanted = {"output_hidden_states": True, "output_attentions": True}
    if case == "qwen3_moe":
        wanted["output_router_logits"] = True
    if seen_before:
        run(plain, ids, **wanted)
    model = hybridize.convert(plain, LayerPlan.from_pattern("*-*-GDN-*"))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    want = run(plain, ids, **wanted)
    for ours in (model, loaded):
        got = run(ours, ids, **wanted)
        assert len(got.hidden_states) == len(want.hidden_states) == 5
        assert len(got.attentions) == 3  # of the layers that are attention
        for i in range(3):
            assert torch.equal(got.hidden_states[i], want.hidden_states[i])
        assert all(torch.equal(got.attentions[i], want.attentions[i]) for i in range(2))
        assert not torch.equal(got.hidden_states[3], want.hidden_states[3])
        assert torch.equal(ours.lm_head(got.hidden_states[-1]), got.logits)
        if case == "qwen3_moe":
            assert len(got.router_logits) == len(want.router_logits) == 4
        assert run(ours, ids).hidden_states is None
