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
        return {
            "g": self.decay() * self.timestep(hidden_states),
            "beta": self.b_proj(hidden_states).float().sigmoid(),
            "alpha": self.alpha_proj(hidden_states).float().sigmoid(),
        }

    def mix(
        self, inputs: State, state: State | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        q, k, v, new = self.convolve(inputs, state, lengths, cu_seqlens)
        kernel = recurrent_gka if q.shape[1] == 1 else chunk_gka
        o, (new["H"], new["U"]) = kernel(
            q,
            inert(k, lengths),  # beta = 0 is not enough: GKA scales by beta + 1e-6
            inert(v, lengths),
            inputs["g"],
            inputs["beta"],
            inputs["alpha"],
            ridge=self.settings["ridge"],
            num_iters=self.settings["num_iters"],
            initial_state=None if state is None else (state["H"], state["U"]),
            cu_seqlens=cu_seqlens,
        )
        return o, new

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        square = ((self.heads, self.head_dim, self.head_dim), torch.float32)
        return {**self.conv_shapes(), "H": square, "U": square}
