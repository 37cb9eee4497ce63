"""Gated DeltaNet: a decaying state that each token corrects by the delta rule (arXiv 2412.06464)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hybridize.kernels.gdn import chunk_gated_delta_rule, recurrent_gated_delta_rule
from hybridize.mixers.base import StateSpaceMixer
from hybridize.mixers.tokens import State, inert


class GDNMixer(StateSpaceMixer):
    """State: one key-value matrix S for every head."""

    kind = "gdn"
    recurrent: ClassVar[tuple[str, ...]] = ("S",)

    def __init__(self, config: Any, attention: nn.Module, layer_idx: int):
        super().__init__(config, attention, layer_idx)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.b_proj.weight.zero_()
        self.b_proj.bias.zero_()

    def gates(self, hidden_states: Tensor) -> State:
        return {**super().gates(hidden_states), "beta": self.b_proj(hidden_states)}

    def mix(
        self, inputs: State, state: State | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        q, k, v, new = self.convolve(inputs, state, lengths, cu_seqlens)
        options = {"initial_state": None if state is None else state["S"], "cu_seqlens": cu_seqlens}
        if q.shape[1] == 1 and lengths is None:
            a, beta = inputs["a"], inputs["beta"]
            o, new["S"] = recurrent_gated_delta_rule(q, k, v, a, beta, decay_gate=self.decay_gate, **options)
            return o, new
        kernel = recurrent_gated_delta_rule if q.shape[1] == 1 else chunk_gated_delta_rule
        beta = inert(inputs["beta"].float().sigmoid(), lengths)
        o, new["S"] = kernel(q, k, v, self.log_decay(inputs, lengths), beta, **options)
        return o, new

    def multiplier(self, inputs: State, state: State | None, lengths: Tensor | None) -> State:
        # With values of zero the kernel only transforms the state it starts from: here the identity.
        q, k, v, _ = self.convolve(inputs, state, lengths, None)
        rows, dim = q.shape[0], self.head_dim
        identity = torch.eye(dim, device=q.device).expand(rows, self.heads, dim, dim)
        beta = inert(inputs["beta"].float().sigmoid(), lengths)
        decay = self.log_decay(inputs, lengths)
        _, P = chunk_gated_delta_rule(q, k, torch.zeros_like(v), decay, beta, initial_state=identity.contiguous())
        assert P is not None
        return {"P": P}

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        return {**self.conv_shapes(), "S": ((self.heads, self.head_dim, self.head_dim), torch.float32)}
