"""Losses over the vocabulary, and their gradients, without ever holding all logits.

Logits of a few positions at a time are made, turned into a loss and into gradients of that loss, and dropped: memory is
that of LOGIT_ROWS rows, and the head runs once. Sums over tokens are returned, so that the parts of a step add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.tasks import perplexity
from hybridize.tasks.perplexity import head_logits


class TokenSums(NamedTuple):
    """Sums over the predicted tokens, scalars; only `loss` (the weighted sum of the others) has gradients."""

    loss: Tensor
    cross_entropy: Tensor
    kl: Tensor


def predicted(x: Tensor, targets: Tensor) -> Tensor:
    """Of x [B, T, ...], what stands before each target, [N, ...]: the places that predict; targets bool [B, T]."""
    return x[:, :-1][targets[:, 1:]]


def vocabulary_loss(
    model: Any,
    hidden: Tensor,
    wanted: Tensor,
    teacher: Any = None,
    given: Tensor | None = None,
    *,
    cross_entropy: float = 1.0,
    kl: float = 0.0,
    temperature: float = 1.0,
) -> TokenSums:
    """cross_entropy * CE(wanted) + kl * temperature^2 * KL(teacher || student), summed over tokens, in nats.

    hidden [N, h]: what left the model's final norm; wanted int64 [N]: the tokens that come next; given [N, h']: what
    left the teacher's final norm (no gradient goes there). Both distributions of the KL are taken at `temperature`; the
    head is the model's own (`head_logits`), and gets gradients where its parameters ask for them.
    """

    def of_chunk(rows: Tensor, part: slice) -> TokenSums:
        logits = head_logits(model, rows)
        zero = logits.new_zeros(())
        ce = F.cross_entropy(logits, wanted[part], reduction="sum") if cross_entropy else zero
        divergence = zero
        if kl and given is not None:
            with torch.no_grad():
                theirs = F.log_softmax(head_logits(teacher, given[part]) / temperature, dim=-1)
            ours = F.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
            divergence = temperature**2 * F.kl_div(ours, theirs, log_target=True, reduction="sum")
        return TokenSums(cross_entropy * ce + kl * divergence, ce.detach(), divergence.detach())

    parameters = [p for p in model.get_output_embeddings().parameters() if p.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return TokenSums(*_ByChunk.apply(of_chunk, hidden, *parameters))
    sums = hidden.new_zeros(3, dtype=_at_least_fp32(hidden.dtype))
    for part in _chunks(hidden):
        sums += torch.stack(list(of_chunk(hidden[part], part)))
    return TokenSums(*sums.unbind())


class _ByChunk(torch.autograd.Function):
    """The sums of all chunks; the gradients are made on the way forward, and only scaled on the way back."""

    @staticmethod
    def forward(
        ctx: Any, of_chunk: Callable[[Tensor, slice], TokenSums], hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        needs_hidden = ctx.needs_input_grad[1]
        hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
        # Many chunks add up in the head's gradient: bf16 would lose the small ones.
        grads = [torch.zeros_like(p, dtype=_at_least_fp32(p.dtype)) for p in parameters]
        sums = hidden.new_zeros(3, dtype=_at_least_fp32(hidden.dtype))
        for part in _chunks(hidden):
            with torch.enable_grad():
                rows = hidden[part].detach().requires_grad_(needs_hidden)
                parts = of_chunk(rows, part)
                found = torch.autograd.grad(parts.loss, [*([rows] if needs_hidden else []), *parameters])
            sums += torch.stack([x.detach() for x in parts])
            if hidden_grad is not None:
                hidden_grad[part] = found[0]
            for total, grad in zip(grads, found[needs_hidden:], strict=True):
                total += grad
        ctx.save_for_backward(hidden_grad, *(total.to(p.dtype) for total, p in zip(grads, parameters, strict=True)))
        loss, ce, kl = sums.unbind()
        loss, ce, kl = loss.clone(), ce.clone(), kl.clone()
        ctx.mark_non_differentiable(ce, kl)
        return loss, ce, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)


def _chunks(hidden: Tensor) -> list[slice]:
    rows = perplexity.LOGIT_ROWS
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
