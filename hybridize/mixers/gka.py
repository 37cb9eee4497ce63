"""Gated KalmaNet: a ridge regression over all the past, solved by Chebyshev iteration (arXiv 2511.21016)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hybridize.kernels.gka import chunk_gka, recurrent_gka
from hybridize.mixers.base import StateSpaceMixer
from hybridize.mixers.tokens import State, inert


class GKAMixer(StateSpaceMixer):
    """State: the Gram matrix H and the key-value matrix U of every head; `num_iters` may be lowered at serving time."""

    kind = "gka"
    recurrent: ClassVar[tuple[str, ...]] = ("H", "U")
    defaults: ClassVar[dict[str, Any]] = {
        **StateSpaceMixer.defaults,
        "ridge": 0.02,
        "num_iters": 30,
    }

    def __init__(self, config: Any, attention: nn.Module, layer_idx: int):
        super().__init__(config, attention, layer_idx)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=True)
        self.alpha_proj = nn.Linear(config.hidden_size, self.heads, bias=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for gate in (self.b_proj, self.alpha_proj):
            gate.weight.zero_()
            gate.bias.zero_()

    def gates(self, hidden_states: Tensor) -> State:
        beta, alpha = self.b_proj(hidden_states), self.alpha_proj(hidden_states)
        return {**super().gates(hidden_states), "beta": beta, "alpha": alpha}

    def mix(
        self, inputs: State, state: State | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        q, k, v, new = self.convolve(inputs, state, lengths, cu_seqlens)
        options = {
            "ridge": self.settings["ridge"],
            "num_iters": self.settings["num_iters"],
            "initial_state": None if state is None else (state["H"], state["U"]),
            "cu_seqlens": cu_seqlens,
        }
        if q.shape[1] == 1 and lengths is None:
            a, beta, alpha = inputs["a"], inputs["beta"], inputs["alpha"]
            o, (new["H"], new["U"]) = recurrent_gka(q, k, v, a, beta, alpha, decay_gate=self.decay_gate, **options)
            return o, new
        kernel = recurrent_gka if q.shape[1] == 1 else chunk_gka
        o, (new["H"], new["U"]) = kernel(
            q,
            inert(k, lengths),  # a write gate of 0 is not enough: GKA scales by beta + 1e-6
            inert(v, lengths),
            self.log_decay(inputs, lengths),
            inputs["beta"].float().sigmoid(),
            inputs["alpha"].float().sigmoid(),
            **options,
        )
        return o, new

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        square = ((self.heads, self.head_dim, self.head_dim), torch.float32)
        return {**self.conv_shapes(), "H": square, "U": square}
