"""Stage align: the gradients are those of the stated loss, and nothing but the mixers moves."""

import math

import pytest
import torch
from hybrid_cases import GKA, source, tokens

import hybridize
from hybridize.hybrid.model import mixers
from hybridize.priming.align import Aligner, AlignOptions, DivergedError
from hybridize.priming.batches import Batch

PATTERN = "GDN-*-GKA"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def pair(case="llama", pattern=PATTERN, **settings):
    teacher = source(case, pattern.count("-") + 1)
    settings = settings or (GKA if "GKA" in pattern else {})
    return teacher, hybridize.convert(teacher, hybridize.LayerPlan.from_pattern(pattern), share=True, **settings)


def trace(model, ids):
    """Per layer: residual stream before attention, input of attention, its output, from transformers' own forward."""
    seen = [{} for _ in model.model.layers]
    hooks = []
    for record, layer in zip(seen, model.model.layers, strict=True):

        def before(module, args, kwargs, record=record):
            record["stream"] = args[0] if args else kwargs["hidden_states"]

        def after(module, args, kwargs, output, record=record):
            record.update(given=kwargs["hidden_states"], out=output[0], rope=kwargs["position_embeddings"])

        hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(layer.self_attn.register_forward_hook(after, with_kwargs=True))
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def stated_loss(teacher, hybrid, ids, layer, follow):
    """sum_t w_t |mixer(x_t) - y_t|^2 / sum_t w_t |y_t|^2, w_t = 1 / mean square of the source's stream at t."""
    theirs = trace(teacher, ids)[layer]
    ours = trace(hybrid, ids)[layer] if follow else theirs
    target = theirs["out"] + (theirs["stream"] - ours["stream"])
    weights = 1 / (theirs["stream"] + theirs["out"]).square().mean(-1, keepdim=True)
    output, _ = mixers(hybrid)[layer](ours["given"], position_embeddings=ours["rope"])
    return ((output - target).square() * weights).sum() / (target.square() * weights).sum()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("case", ["llama", "qwen3", "phi3"])
def test_one_step_has_the_gradients_of_the_stated_loss(case, follow):
    teacher, hybrid = pair(case)
    aligner = Aligner(teacher, hybrid, AlignOptions(follow=follow, clip=math.inf), 10)
    ids = tokens(2, 24)
    wanted, losses = {}, {}
    for layer, mixer in mixers(hybrid).items():
        loss = stated_loss(teacher, hybrid, ids, layer, follow)
        names = [name for name, _ in mixer.named_parameters()]
        grads = torch.autograd.grad(loss, list(mixer.parameters()), allow_unused=True)
        wanted[layer], losses[layer] = dict(zip(names, grads, strict=True)), loss.item()
    got = aligner.step(ids)
    assert got == pytest.approx(losses, rel=1e-4)
    for layer, mixer in mixers(hybrid).items():
        for name, p in mixer.named_parameters():
            grad = wanted[layer][name]
            assert (p.grad is None) == (grad is None), name
            if grad is not None:
                torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("pattern", ["GKA-*-GDN-*", "M2-*-SWA-*"])
def test_packed_and_padded_documents_count_as_they_do_alone(pattern, follow):
    apart, together = (pair(pattern=pattern) for _ in range(2))
    ids = tokens(2, 24)
    first = Aligner(*apart, AlignOptions(follow=follow), 10)
    second = Aligner(*together, AlignOptions(follow=follow), 10)
    place = torch.arange(24)
    padding = torch.arange(6)
    row = torch.cat([*ids, torch.zeros_like(padding)])[None]
    positions = torch.cat([place, place, padding])[None]
    batch = Batch(row, positions, (positions > 0) & (torch.arange(54) < 48))
    assert second.step(batch) == pytest.approx(first.step(ids), rel=1e-4)
    for layer, mixer in mixers(apart[1]).items():
        for (name, p), other in zip(mixer.named_parameters(), mixers(together[1])[layer].parameters(), strict=True):
            assert (p.grad is None) == (other.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(other.grad, p.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("follow", [False, True])
def test_steps_lower_the_loss_and_move_the_mixers_alone(follow):
    teacher, hybrid = pair()
    own = {id(p) for mixer in mixers(hybrid).values() for p in mixer.parameters()}
    tensors = [*teacher.state_dict(keep_vars=True).values()]
    tensors += [p for p in hybrid.state_dict(keep_vars=True).values() if id(p) not in own]
    before = [x.detach().clone() for x in tensors]
    aligner = Aligner(teacher, hybrid, AlignOptions(follow=follow), 20)
    ids = tokens(4, 32)
    history = [aligner.step(ids) for _ in range(20)]
    assert all(history[-1][layer] < 0.8 * history[0][layer] for layer in (0, 2)), (history[0], history[-1])
    assert all(torch.equal(x, old) for x, old in zip(tensors, before, strict=True))
    assert not any(p.grad is not None for p in teacher.parameters())


def test_the_learning_rate_warms_up_and_ends_at_a_tenth():
    teacher, hybrid = pair()
    aligner = Aligner(teacher, hybrid, AlignOptions(lr=1.0, warmup=0.1), 100)
    rates = []
    for aligner.steps_done in range(101):
        rates.append(aligner.learning_rate())
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == max(rates) == 1.0 and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5) and rates[100] == pytest.approx(0.1)


def hooks_of(*models):
    modules = [m for model in models for m in model.modules()]
    return [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


@pytest.mark.parametrize("follow", [False, True])
def test_a_loss_that_is_no_number_names_layer_and_step(follow):
    teacher, hybrid = pair()
    aligner = Aligner(teacher, hybrid, AlignOptions(follow=follow), 10)
    aligner.step(tokens(2, 16))
    mixers(hybrid)[2].o_proj.weight.data.fill_(math.nan)
    kept = mixers(hybrid)[0].q_proj.weight.clone()
    with pytest.raises(DivergedError, match="loss of layer 2 became nan at step 1"):
        aligner.step(tokens(2, 16))
    assert torch.equal(kept, mixers(hybrid)[0].q_proj.weight) and aligner.steps_done == 1
    assert not hooks_of(teacher, hybrid)


def test_a_gradient_that_is_no_number_never_reaches_the_weights():
    teacher, hybrid = pair()
    aligner = Aligner(teacher, hybrid, AlignOptions(), 10)
    aligner.step(tokens(2, 16))
    weight = mixers(hybrid)[0].q_proj.weight
    weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(DivergedError, match=r"gradient norm of layer 0 became .* at step 1"):
        aligner.step(tokens(2, 16))
    assert all(p.isfinite().all() for mixer in mixers(hybrid).values() for p in mixer.parameters())


@pytest.mark.parametrize("follow", [False, True])
def test_an_error_in_a_mixer_leaves_no_hook_behind(monkeypatch, follow):
    teacher, hybrid = pair()
    aligner = Aligner(teacher, hybrid, AlignOptions(follow=follow), 10)
    monkeypatch.setattr(type(mixers(hybrid)[2]), "features", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        aligner.step(tokens(2, 16))
    assert not hooks_of(teacher, hybrid)
