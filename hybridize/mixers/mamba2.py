"""Mamba-2: a state with one scalar decay per head and step (arXiv 2405.21060); C is the query, B the key, x a value."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridize.kernels.common import expand_heads
from hybridize.kernels.ssd import chunk_ssd, recurrent_ssd
from hybridize.mixers.base import StateSpaceMixer
from hybridize.mixers.tokens import State


class Mamba2Mixer(StateSpaceMixer):
    """State: one matrix h [P, N] for every head. B and C are normalised per head unless `qk_l2norm` is off.

    gate_first: the read-out is gated before its norm, as Mamba-2 does by itself, and not behind it, as the others do.
    """

    kind = "mamba2"
    recurrent: ClassVar[tuple[str, ...]] = ("h",)
    defaults: ClassVar[dict[str, Any]] = {
        **StateSpaceMixer.defaults,
        "qk_l2norm": True,
        "gate_first": False,
    }

    def __init__(self, config: Any, attention: nn.Module, layer_idx: int):
        super().__init__(config, attention, layer_idx)
        self.D = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        # The published start, 1, drowns the state: attention has no such direct path from a value to its own output.
        self.D.zero_()

    def mix(
        self, inputs: State, state: State | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        q, k, v, new = self.convolve(inputs, state, lengths, cu_seqlens)
        if self.settings["qk_l2norm"]:
            q, k = (F.normalize(x.float(), dim=-1, eps=1e-6).to(x.dtype) for x in (q, k))
        x, B, rate = expand_heads(v, self.heads), expand_heads(k, self.heads), -self.A_log.float().exp()
        options = {
            "D": self.D.float(),
            "initial_state": None if state is None else state["h"],
            "cu_seqlens": cu_seqlens,
        }
        if q.shape[1] == 1 and lengths is None:
            o, new["h"] = recurrent_ssd(x, inputs["a"], rate, B, q, dt_bias=self.dt_bias, **options)
            return o, new
        kernel = recurrent_ssd if q.shape[1] == 1 else chunk_ssd
        o, new["h"] = kernel(x, self.timestep(inputs, lengths), rate, B, q, **options)
        return o, new

    def readout(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        if not self.settings["gate_first"]:
            return super().readout(o, hidden_states)
        gate = F.silu(self.g_proj(hidden_states)).unflatten(-1, (self.heads, self.head_dim))
        return self.o_norm(o * gate).flatten(-2)

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        return {**self.conv_shapes(), "h": ((self.heads, self.head_dim, self.head_dim), torch.float32)}
