"""Chunked losses are the plain ones, gradients too, and no tensor is as large as all logits."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridize.priming.losses import predicted, vocabulary_loss
from hybridize.tasks import perplexity

VOCABULARY, HIDDEN = 50, 8


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setattr(perplexity, "LOGIT_ROWS", 7)


class Headed(nn.Module):
    """A model as the losses see one: a config and an output head."""

    def __init__(self, dtype, scale=1.0, bias=False, vocabulary=VOCABULARY):
        super().__init__()
        self.config = SimpleNamespace(logits_scaling=scale)
        self.head = nn.Linear(HIDDEN, vocabulary, bias=bias, dtype=dtype)

    def get_output_embeddings(self):
        return self.head


def case(dtype, shape=(3, 11), mask="ragged"):
    ids = torch.randint(0, VOCABULARY, shape)
    targets = {"ragged": torch.rand(shape) < 0.6, "all": torch.ones(shape).bool(), "none": torch.zeros(shape).bool()}
    hidden = torch.randn(*shape, HIDDEN, dtype=dtype, requires_grad=True)
    return ids, targets[mask], hidden, torch.randn(*shape, HIDDEN, dtype=dtype)


def plain(model, teacher, ids, targets, hidden, given, ce, kl, temperature):
    """The same, token by token, from all logits."""
    scale = model.config.logits_scaling
    ours = (model.head(hidden) / scale)[:, :-1]
    theirs = (teacher.head(given) / scale)[:, :-1].detach()
    mask = targets[:, 1:].to(ours.dtype)
    nll = -F.log_softmax(ours, -1).gather(-1, ids[:, 1:, None])[..., 0]
    p, q = F.softmax(theirs / temperature, -1), F.log_softmax(ours / temperature, -1)
    divergence = temperature**2 * (p * (p.log() - q)).sum(-1)
    return (ce * nll * mask + kl * divergence * mask).sum(), (nll * mask).sum(), (divergence * mask).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mask", ["ragged", "all", "none"])
@pytest.mark.parametrize(("ce", "kl", "temperature"), [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.7, 0.4, 2.5)])
@pytest.mark.parametrize("same_head", [True, False])
def test_equal_to_the_plain_form(dtype, mask, ce, kl, temperature, same_head):
    model = Headed(dtype, scale=3.0, bias=True)
    teacher = model if same_head else Headed(dtype, scale=3.0)
    ids, targets, hidden, given = case(dtype, mask=mask)
    leaves = [hidden, model.head.weight, model.head.bias]
    wanted = plain(model, teacher, ids, targets, hidden, given, ce, kl, temperature)
    wanted_grads = torch.autograd.grad(2.5 * wanted[0], leaves)
    got = vocabulary_loss(
        model,
        predicted(hidden, targets),
        ids[:, 1:][targets[:, 1:]],
        teacher,
        predicted(given, targets),
        cross_entropy=ce,
        kl=kl,
        temperature=temperature,
    )
    grads = torch.autograd.grad(2.5 * got.loss, leaves)
    close = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(got.loss, wanted[0], **close)
    if ce:
        torch.testing.assert_close(got.cross_entropy, wanted[1].detach(), **close)
    if kl:
        torch.testing.assert_close(got.kl, wanted[2].detach(), **close)
    for ours, theirs in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


def test_a_frozen_head_gets_no_gradient_and_no_grad_no_graph():
    model = Headed(torch.float64)
    ids, targets, hidden, _ = case(torch.float64)
    wanted = ids[:, 1:][targets[:, 1:]]
    whole = vocabulary_loss(model, predicted(hidden, targets), wanted)
    with torch.no_grad():
        bare = vocabulary_loss(model, predicted(hidden, targets), wanted)
    assert not bare.loss.requires_grad and not whole.cross_entropy.requires_grad
    torch.testing.assert_close(bare.loss, whole.loss.detach())
    model.requires_grad_(False)
    vocabulary_loss(model, predicted(hidden, targets), wanted).loss.backward()
    assert model.head.weight.grad is None and hidden.grad is not None
    assert not hidden.grad[:, :-1][~targets[:, 1:]].any() and not hidden.grad[:, -1].any()


def test_bf16_adds_up_chunks_in_fp32():
    model = Headed(torch.bfloat16)
    ids, targets, hidden, _ = case(torch.bfloat16, (8, 101), "all")
    wanted = ids[:, 1:].flatten()
    got = vocabulary_loss(model, predicted(hidden, targets), wanted)
    got.loss.backward()
    exact = Headed(torch.float64)
    exact.load_state_dict(model.state_dict())
    vocabulary_loss(exact, predicted(hidden, targets).double().detach(), wanted).loss.backward()
    assert got.loss.dtype == torch.float32 and model.head.weight.grad.dtype == torch.bfloat16
    error = (model.head.weight.grad.double() - exact.head.weight.grad).norm() / exact.head.weight.grad.norm()
    assert error < 5e-3, error  # in bf16, 115 chunks would add up to an error of 1e-2


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("trained_head", [True, False])
def test_no_tensor_is_as_large_as_all_logits(trained_head):
    vocabulary, rows = 5000, 200
    model = Headed(torch.float32, vocabulary=vocabulary).requires_grad_(trained_head)
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    wanted = torch.randint(0, vocabulary, (rows,))
    with Largest() as seen:
        loss = vocabulary_loss(model, hidden, wanted, model, torch.randn(rows, HIDDEN), kl=1.0).loss
        loss.backward()
    chunk = max(perplexity.LOGIT_ROWS * vocabulary, model.head.weight.numel())
    assert perplexity.LOGIT_ROWS * vocabulary <= seen.elements <= chunk < rows * vocabulary
