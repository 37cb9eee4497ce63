"""Mixers against their formulas written out, and against the source's own attention."""

import pytest
import torch
import torch.nn.functional as F
from hybrid_cases import CASES, GKA, WINDOWED, cache_of, make, perturb, run, source, states, tokens

import hybridize
from hybridize.hybrid.model import mixers
from hybridize.kernels.gdn import naive_gated_delta_rule
from hybridize.kernels.gka import naive_gka
from hybridize.kernels.ssd import naive_ssd
from hybridize.mixers.base import HeadNorm, rotate
from hybridize.mixers.tokens import inert

TOKENS = 30


@pytest.mark.parametrize("case", sorted(CASES.keys() - WINDOWED))
def test_a_window_as_long_as_the_text_is_the_attention(case):
    plain = source(case)
    for settings in ({"window": 64, "sinks": 0}, {"window": 64, "sinks": 3}, {"window": 20, "sinks": 20}):
        model = hybridize.convert(plain, hybridize.LayerPlan.from_pattern("SWA-SWA-SWA"), **settings)
        ids = tokens(2, 40)
        error = (run(model, ids).logits - run(plain, ids).logits).abs().max()
        assert error < 1e-5, f"{case} {settings} is off by {error:.1e}"
    short = hybridize.convert(plain, hybridize.LayerPlan.from_pattern("SWA-SWA-SWA"), window=5, sinks=0)
    assert (run(short, ids).logits - run(plain, ids).logits).abs().max() > 1e-3, case


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_window_is_the_sources_own_window(how):
    """Mistral with sliding_window w sees what a SWA mixer with window w sees."""
    plain = source("mistral-window", attn_implementation=how)
    model = hybridize.convert(plain, hybridize.LayerPlan.from_pattern("SWA-*-SWA"), window=11, sinks=0)
    ids = tokens(2, 50)
    assert (run(model, ids).logits - run(plain, ids).logits).abs().max() < 1e-5


def heads(mixer, x):
    """q, k, v of hidden states by the source's projections, biases and norms."""
    h, hk, d = mixer.heads, mixer.kv_heads, mixer.head_dim
    if hasattr(mixer, "qkv_proj"):
        q, k, v = mixer.qkv_proj(x).split([h * d, hk * d, hk * d], -1)
    else:
        q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    q, k, v = q.view(*x.shape[:2], h, d), k.view(*x.shape[:2], hk, d), v.view(*x.shape[:2], hk, d)
    if hasattr(mixer, "q_norm"):
        q, k = mixer.q_norm(q), mixer.k_norm(k)
    return q, k, v


def convolved(x, conv):
    """Depthwise causal convolution of [B, T, H, D], by torch's own."""
    weight, width = conv.weight[:, None], conv.weight.shape[1]
    flat = F.pad(x.flatten(2).transpose(1, 2), (width - 1, 0))
    return F.conv1d(flat, weight, groups=weight.shape[0]).transpose(1, 2).view_as(x)


@pytest.mark.parametrize("pattern", ["GKA-GKA-GKA", "GDN-GDN-GDN", "M2-M2-M2"])
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_the_formula(case, pattern):
    """Projection, convolution, rotary, gates, kernel, norm, gate, output projection; grouped heads by repetition."""
    model = make(case, pattern, GKA if "GKA" in pattern else {})
    mixer = mixers(model)[1]
    x = torch.randn(2, TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    cos, sin = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
    with torch.no_grad():
        got, none = mixer(x, position_embeddings=(cos, sin))
        q, k, v = heads(mixer, x)
        q, k, v = convolved(q, mixer.q_conv), convolved(k, mixer.k_conv), convolved(v, mixer.v_conv)
        half = mixer.head_dim // 2
        turn = lambda y: y * cos[:, :, None] + torch.cat([-y[..., half:], y[..., :half]], -1) * sin[:, :, None]
        q, k = turn(q), turn(k)
        k, v = (y.repeat_interleave(mixer.heads // mixer.kv_heads, 2) for y in (k, v))
        dt = F.softplus(mixer.a_proj(x) + mixer.dt_bias)
        g = -mixer.A_log.exp() * dt
        if mixer.kind == "mamba2":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            o, _ = naive_ssd(v, dt, -mixer.A_log.exp(), k, q, D=mixer.D)
        elif mixer.kind == "gdn":
            o, _ = naive_gated_delta_rule(q, k, v, g, mixer.b_proj(x).sigmoid())
        else:
            gates = mixer.b_proj(x).sigmoid(), mixer.alpha_proj(x).sigmoid()
            o, _ = naive_gka(q, k, v, g, *gates, ridge=GKA["ridge"], num_iters=GKA["num_iters"])
        o = o * (o.square().mean(-1, keepdim=True) + mixer.o_norm.eps).rsqrt() * mixer.o_norm.weight
        want = mixer.o_proj(o.flatten(2) * F.silu(mixer.g_proj(x)))
    assert none is None
    assert (got - want).abs().max() < 1e-4, f"{case} {pattern}"


@pytest.mark.parametrize("pattern", ["GKA-GDN-M2-SWA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_what_it_says(pattern, dtype):
    for case in ("qwen3", "phi3", "qwen2"):
        model = make(case, pattern, {"window": 8, "sinks": 2, **GKA}).to(dtype)
        cache = cache_of(run(model, tokens(3, 20)))
        for i, mixer in mixers(model).items():
            state = cache.layers[i].state
            shapes = mixer.state_shapes()
            assert {n: ((3, *s), t or dtype) for n, (s, t) in shapes.items()} == {
                n: (tuple(x.shape), x.dtype) for n, x in state.items()
            }, f"{case} {mixer.kind}"
            assert mixer.state_bytes(dtype) * 3 == sum(x.nbytes for x in state.values())


def test_a_fresh_mixer_has_no_unset_values():
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        model = hybridize.convert(source("qwen3", 4), hybridize.LayerPlan.from_pattern("GKA-GDN-M2-SWA"))
        built = type(model)(model.config)
    finally:
        torch.use_deterministic_algorithms(False)
    for m in (model, built):
        assert all(p.isfinite().all() for p in m.parameters())
        assert run(m, tokens(1, 9)).logits.isfinite().all()


def test_garbage_at_padding_stays_there():
    """Not even NaN at a masked token reaches a state or another token."""
    model = make("qwen3", "GKA-GDN-M2-SWA", {"window": 8, "sinks": 2, **GKA})
    x = model.get_input_embeddings()(tokens(2, 12)).detach()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    bad = x.clone()
    bad[1, :5] = float("nan")
    with torch.no_grad():
        want, got = (model(inputs_embeds=e, attention_mask=mask) for e in (x, bad))
    assert torch.equal(got.logits[0], want.logits[0]) and torch.equal(got.logits[1, 5:], want.logits[1, 5:])
    before, after = states(cache_of(want), model), states(cache_of(got), model)
    for name, state in before.items():
        assert torch.equal(after[name], state), name


def test_rotary_of_some_channels():
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = (f(torch.cat([angle, angle], -1))[None] for f in (torch.cos, torch.sin))
    y = rotate(x, cos, sin)
    assert torch.equal(y[..., 4:], x[..., 4:]) and torch.equal(y[:, 0], x[:, 0])
    pair = torch.complex(x[..., 0], x[..., 2]) * torch.exp(1j * angle[None, :, None, 0])
    assert torch.allclose(torch.complex(y[..., 0], y[..., 2]), pair, atol=1e-6)


def test_inert_and_norm():
    x = torch.tensor([[1.0, float("inf"), float("nan")], [1.0, 2.0, 3.0]])
    assert inert(x, torch.tensor([1, 3])).tolist() == [[1.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
    assert inert(x, None) is x
    norm = HeadNorm(2, 4, 1e-6)
    norm.reset_parameters()
    y = norm(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16())
    assert (y.float().square().mean(-1) - 1).abs().max() < 0.02
    assert torch.equal(norm(torch.zeros(1, 2, 4)), torch.zeros(1, 2, 4))


def test_phi3_with_partial_rotary():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    plain = source("phi3", rope_parameters=rope)
    model = hybridize.convert(plain, hybridize.LayerPlan.from_pattern("SWA-SWA-SWA"), window=64, sinks=0)
    ids = tokens(1, 30)
    assert (run(model, ids).logits - run(plain, ids).logits).abs().max() < 1e-5
    full = source("phi3")
    assert (run(full, ids).logits - run(plain, ids).logits).abs().max() > 1e-4
    perturb(model)
