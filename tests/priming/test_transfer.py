"""Stage init: the fits are the least-squares solutions they claim to be, layer by layer."""

import pytest
import torch
from hybrid_cases import GKA, source, tokens

import hybridize
from hybridize.hybrid.model import mixers
from hybridize.priming.batches import Batch
from hybridize.priming.transfer import LeastSquares, StartOptions, fit_start

BATCHES = [tokens(4, 32, seed) for seed in range(3)]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def pair(case, pattern, **settings):
    teacher = source(case, pattern.count("-") + 1)
    return teacher, hybridize.convert(teacher, hybridize.LayerPlan.from_pattern(pattern), share=True, **settings)


def attention_of(model, ids, layer):
    """Stream before attention, its input, its output and its rotary tables, from transformers' own forward."""
    seen = {}
    block = model.model.layers[layer]

    def before(module, args, kwargs):
        seen["stream"] = args[0] if args else kwargs["hidden_states"]

    def after(module, args, kwargs, output):
        seen.update(given=kwargs["hidden_states"], out=output[0], rope=kwargs["position_embeddings"])

    hooks = [
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.self_attn.register_forward_hook(after, with_kwargs=True),
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def rows(teacher, hybrid, layer, follow):
    """Weighted rows of features [N, in] and of targets [N, out] of one mixer, fp64."""
    features, targets = [], []
    mixer = mixers(hybrid)[layer]
    bias = 0.0 if mixer.o_proj.bias is None else mixer.o_proj.bias
    for ids in BATCHES:
        theirs = attention_of(teacher, ids, layer)
        ours = attention_of(hybrid, ids, layer) if follow else theirs
        root = (theirs["stream"] + theirs["out"]).square().mean(-1, keepdim=True).rsqrt()
        features.append((mixer.features(ours["given"], ours["rope"]) * root).flatten(0, 1).double())
        target = theirs["out"] + theirs["stream"] - ours["stream"]
        targets.append(((target - bias) * root).flatten(0, 1).double())
    return torch.cat(features), torch.cat(targets)


def relative(z, y, weight):
    return ((z @ weight.double().T - y).square().sum() / y.square().sum()).item()


def ridge(z, y, prior, amount):
    """The ridge problem as one tall least-squares problem."""
    root = (amount * z.square().sum(0).mean()).sqrt()
    tall = torch.cat([z, root * torch.eye(z.shape[1], dtype=z.dtype)])
    return torch.linalg.lstsq(tall, torch.cat([y, root * prior.double().T])).solution.T


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3"])
def test_the_walk_solves_each_layer_given_the_layers_before(case, follow):
    options = StartOptions(calibrate=False, ridge=0.01, follow=follow)
    teacher, hybrid = pair(case, "GDN-M2-GKA", **GKA)
    _, slow = pair(case, "GDN-M2-GKA", **GKA)
    errors = fit_start(teacher, hybrid, BATCHES, options)
    for layer in (0, 1, 2):  # by hand: a whole forward for every layer, with what was solved so far
        z, y = rows(teacher, slow, layer, follow)
        projection = mixers(slow)[layer].o_proj
        wanted = ridge(z, y, projection.weight.detach(), 0.01)
        projection.weight.data.copy_(wanted)
        torch.testing.assert_close(
            mixers(hybrid)[layer].o_proj.weight.double(), wanted, rtol=2e-3, atol=2e-4, check_dtype=False
        )
        assert errors[layer] == pytest.approx(relative(z, y, wanted), rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("follow", [False, True])
def test_packed_and_padded_documents_are_fitted_as_they_are_alone(follow):
    apart, together = (pair("llama", "GDN-M2-GKA-SWA", **GKA) for _ in range(2))
    options = StartOptions(follow=follow)
    alone = fit_start(*apart, BATCHES, options)
    packed = []
    for ids in BATCHES:
        row = torch.cat([ids.reshape(2, 64), torch.zeros(2, 5, dtype=torch.long)], 1)
        positions = torch.cat([torch.arange(32), torch.arange(32), torch.arange(5)]).expand(row.shape)
        packed.append(Batch(row, positions, (positions > 0) & (torch.arange(69) < 64)))
    assert fit_start(*together, packed, options) == pytest.approx(alone, rel=1e-3)
    for layer, mixer in mixers(apart[1]).items():
        weight = mixers(together[1])[layer].o_proj.weight
        torch.testing.assert_close(weight, mixer.o_proj.weight, rtol=2e-3, atol=2e-4)


def test_calibration_alone_finds_the_best_scale_and_changes_nothing_else():
    teacher, hybrid = pair("llama", "*-GDN-M2")
    before = {name: x.clone() for name, x in hybrid.state_dict().items()}
    bare = {i: rows(teacher, hybrid, i, False) for i in (1, 2)}
    errors = fit_start(teacher, hybrid, BATCHES, StartOptions(solve=False))
    changed = {name for name, x in hybrid.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {f"model.layers.{i}.self_attn.o_norm.weight" for i in (1, 2)}
    for i, (z, y) in bare.items():
        mixer = mixers(hybrid)[i]
        guess = z @ mixer.o_proj.weight.double().T
        factor = (guess * y).sum() / guess.square().sum()
        scale = mixer.o_norm.weight.double()
        torch.testing.assert_close(scale, factor.clamp(min=1e-3).expand_as(scale), rtol=1e-4, atol=1e-6)
        assert errors[i] == pytest.approx(relative(z * scale[0, 0], y, mixer.o_proj.weight), rel=1e-3)


@pytest.mark.parametrize("kind", ["GKA", "GDN", "M2", "SWA"])
def test_init_is_closer_than_bare_conversion_and_leaves_the_source(kind):
    settings = {"GKA": GKA, "SWA": {"window": 8, "sinks": 0}}.get(kind, {})
    teacher, hybrid = pair("llama", f"{kind}-*-{kind}", **settings)
    own = {id(p) for mixer in mixers(hybrid).values() for p in mixer.parameters()}
    tensors = list(teacher.state_dict(keep_vars=True).values())
    tensors += [p for p in hybrid.state_dict(keep_vars=True).values() if id(p) not in own]
    before = [x.detach().clone() for x in tensors]
    bare = {i: relative(*rows(teacher, hybrid, i, False), mixers(hybrid)[i].o_proj.weight.detach()) for i in (0, 2)}
    errors = fit_start(teacher, hybrid, BATCHES, StartOptions())
    assert all(errors[i] < bare[i] for i in (0, 2)), (errors, bare)
    assert all(torch.equal(x, old) for x, old in zip(tensors, before, strict=True))
    again = fit_start(teacher, hybrid, BATCHES, StartOptions())
    assert all(again[i] <= errors[i] + 1e-6 for i in errors)


@pytest.mark.parametrize(("case", "kv_heads"), [("llama", 2), ("qwen3", 4), ("phi3", 2)])
def test_the_blended_gate(case, kv_heads):
    teacher, hybrid = pair(case, "*-GDN-*")
    fit_start(teacher, hybrid, BATCHES[:1], StartOptions(gate="blend", calibrate=False, solve=False))
    attention = teacher.model.layers[1].self_attn
    dim = attention.head_dim
    if case == "phi3":
        value = attention.qkv_proj.weight[(4 + kv_heads) * dim :]
    else:
        value = attention.v_proj.weight
    wanted = torch.stack(
        [
            0.5 * (attention.o_proj.weight[:, h * dim + c] + value[(h * kv_heads // 4) * dim + c])
            for h in range(4)
            for c in range(dim)
        ]
    )
    gate = mixers(hybrid)[1].g_proj
    torch.testing.assert_close(gate.weight, wanted)
    assert not gate.bias.any()


def test_random_convolutions_are_set_where_asked_for():
    torch.manual_seed(0)
    teacher, hybrid = pair("llama", "*-GDN-SWA", window=8)
    fit_start(teacher, hybrid, BATCHES[:1], StartOptions(conv="random", calibrate=False, solve=False))
    weight = mixers(hybrid)[1].k_conv.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.3)


def test_features_that_are_all_zero_keep_the_copied_weights():
    squares = LeastSquares(3, 2, torch.device("cpu"))
    squares.add(torch.zeros(1, 5, 3), torch.randn(1, 5, 2), torch.ones(1, 5, 1))
    prior = torch.randn(2, 3)
    torch.testing.assert_close(squares.solve(prior, 1e-3).float(), prior)
