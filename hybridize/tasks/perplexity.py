"""Next-token loss on held-out text, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGIT_ROWS = 1024  # positions whose logits are held at once: 1024 x a 152K vocabulary in fp32 is 0.6 GB


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits in fp32 (in fp64 of hidden states in fp64) [..., vocabulary] of what left the final norm [..., hidden]."""
    scale = getattr(model.config, "logits_scaling", None) or 1.0
    logits: Tensor = model.get_output_embeddings()(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if scale == 1.0 else logits / scale


@torch.no_grad()
def token_losses(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Negative log-likelihood in nats of tokens 1..T-1 of each row, fp32 [B, T-1]; ids [B, T].

    positions [B, T] start at 0 at every document of a row.
    """
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[:, :-1]
    targets = ids[:, 1:].flatten()
    losses = [
        F.cross_entropy(head_logits(model, rows), wanted, reduction="none")
        for rows, wanted in zip(hidden.flatten(0, 1).split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(losses).view(ids.shape[0], -1)


@torch.no_grad()
def mean_loss(
    model: Any,
    rows: Tensor,
    batch_size: int,
    advance: Callable[[int], None] | None = None,
    positions: Tensor | None = None,
    targets: Tensor | None = None,
) -> float:
    """Mean loss in nats per token over rows of token ids [N, T]; advance(tokens) is called after each batch.

    Of packed rows, positions [N, T] start at 0 at every document, and targets [N, T] are the tokens that count.
    """
    device = model.get_input_embeddings().weight.device
    targets = torch.ones_like(rows, dtype=torch.bool) if targets is None else targets
    total, count = 0.0, 0
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        ids, where = rows[part], None if positions is None else positions[part].to(device)
        losses = token_losses(model, ids.to(device), where)[targets[part, 1:].to(device)]
        total += losses.double().sum().item()
        count += losses.numel()
        if advance is not None:
            advance(ids.numel())
    return total / count
