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
def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Negative log-likelihood in nats of tokens 1..T-1 of each row, fp32 [B, T-1]; ids [B, T]."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = ids[:, 1:].flatten()
    losses = [
        F.cross_entropy(head_logits(model, rows), wanted, reduction="none")
        for rows, wanted in zip(hidden.flatten(0, 1).split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(losses).view(ids.shape[0], -1)


@torch.no_grad()
def mean_loss(model: Any, rows: Tensor, batch_size: int, advance: Callable[[int], None] | None = None) -> float:
    """Mean loss in nats per token over rows of token ids [N, T]; advance(tokens) is called after each batch."""
    device = model.get_input_embeddings().weight.device
    total, count = 0.0, 0
    for ids in rows.split(batch_size):
        losses = token_losses(model, ids.to(device))
        total += losses.double().sum().item()
        count += losses.numel()
        if advance is not None:
            advance(ids.numel())
    return total / count
