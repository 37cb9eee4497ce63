"""What every sequence mixer shares: it takes over an attention module's projections and puts a fixed-size state in
place of the keys and values.

A mixer's forward is four steps, so that decoding, rollback and calibration can use the same pieces:
    project   hidden states -> per-token inputs (queries, keys, values, gates); no state involved
    scan      inputs + state -> read-outs + new state; knows of padding and of packed documents
    readout   read-outs -> features: per-head RMS norm, then a gate
    o_proj    features -> the layer's output, the source's own projection
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridize.kernels.common import decay_of
from hybridize.kernels.short_conv import short_conv
from hybridize.mixers.tokens import State, TokenLayout, inert

GATE_AT_ONE = 1.2784645427610738  # silu(x) = 1


class StateCache(Protocol):
    """One layer's slot of the model's cache, as a mixer sees it."""

    def run(self, scan: Any, inputs: State, layout: TokenLayout | None) -> Tensor: ...


class ShortConv(nn.Module):
    """Depthwise causal convolution over `width` tokens; the last tap is the current token. Starts as identity."""

    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.weight[:, -1] = 1.0
        if self.bias is not None:
            self.bias.zero_()

    # The weight is used in a forward of its own module, because offloading brings it in there.
    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """x [B, T, C] and short_conv's options -> y [B, T, C] and the new tail [B, width - 1, C]."""
        return short_conv(x, self.weight, self.bias, **options)


class HeadNorm(nn.Module):
    """RMS norm over each head's channels, with one weight per channel of every head: [..., H, D]."""

    def __init__(self, heads: int, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim))
        self.eps = eps

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, H, D] by cos, sin [B, T, R]; channels beyond R pass unchanged (Phi-3's partial)."""
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


def geometry(config: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and head dim of a source's config; older families leave out what follows."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


class Mixer(nn.Module):
    """Base of the mixers; stands where the source's attention stood and keeps its projections under their names."""

    kind: ClassVar[str]
    defaults: ClassVar[dict[str, Any]]
    fp32_names: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")
    recurrent: ClassVar[tuple[str, ...]] = ()  # the state tensors that `transition` multiplies
    # The source's modules; a family has qkv_proj or the three, and q/k norms or not.
    qkv_proj: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: Any, attention: nn.Module, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.heads, self.kv_heads, self.head_dim = geometry(config)
        # The source's own modules, under the source's own names: q/k/v_proj or qkv_proj, o_proj, q/k norms.
        for name, module in attention.named_children():
            if next(module.parameters(), None) is not None:
                setattr(self, name, module)

    @property
    def settings(self) -> dict[str, Any]:
        """This kind's settings in `config.hybrid`, read anew at every forward; by default what is not said there."""
        return {**self.defaults, **self.config.hybrid["mixers"][self.kind]}

    # -- what a mixer adds to the source's projections ---------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Set the parameters that the mixer adds (never the source's) to their start values."""
        raise NotImplementedError

    def mix(
        self, inputs: State, state: State | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State]:
        """Inputs -> read-outs [B, T, H, D] and the new state; behind each row's `lengths` tokens, inputs are 0."""
        raise NotImplementedError

    def gates(self, hidden_states: Tensor) -> State:
        """The logits [B, T, H] of the gates that `mix` opens."""
        raise NotImplementedError

    def readout(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        """Read-outs [B, T, H, D] -> features [B, T, H*D], the input of o_proj."""
        raise NotImplementedError

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Per sequence: each state tensor's shape and dtype (None: the model's)."""
        raise NotImplementedError

    # -- the shared path ---------------------------------------------------------------------------------------------

    def project(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> State:
        """Hidden states [B, T, hidden] -> q [B, T, H, D], k, v [B, T, Hk, D], gates; cos, sin where rotary is on."""
        if hasattr(self, "qkv_proj"):
            sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
            q, k, v = self.qkv_proj(hidden_states).split(sizes, dim=-1)
        else:
            q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        inputs = {"q": q, "k": k, "v": v, **self.gates(hidden_states)}
        if position_embeddings is not None and self.settings["rope"]:
            cos, sin = position_embeddings
            inputs["cos"] = cos.expand(q.shape[0], *cos.shape[1:])
            inputs["sin"] = sin.expand(q.shape[0], *sin.shape[1:])
        return inputs

    def scan(self, inputs: State, state: State | None, layout: TokenLayout | None) -> tuple[Tensor, State]:
        """Inputs [B, T, ...] and state -> read-outs [B, T, H, D] and new state, whatever the padding and packing."""
        if layout is None:
            return self.mix(inputs, state, None, None)
        layout = layout.to(inputs["q"].device)
        packed = {name: layout.pack(x) for name, x in inputs.items()}
        o, new = self.mix(packed, layout.states_in(state), layout.lengths, layout.cu_seqlens)
        return layout.unpack(o), layout.states_out(new, state)

    def transition(self, inputs: State, state: State | None, layout: TokenLayout | None) -> State:
        """What a scan of these inputs multiplies an older state's recurrent tensors by; inputs and state as for `scan`.

        {"log_decay": fp32 [B, H]} for a scalar per head, {"P": fp32 [B, H, Dk, Dk]} for a matrix from the left; nothing
        where keys are appended. ValueError for packed documents.
        """
        return {}

    def features(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        layout: TokenLayout | None = None,
        slot: StateCache | None = None,
    ) -> Tensor:
        """Everything before o_proj: [B, T, hidden] -> [B, T, H*D]. `slot` holds the state between calls."""
        inputs = self.project(hidden_states, position_embeddings)
        if slot is None:
            o, _ = self.scan(inputs, None, layout)
        else:
            o = slot.run(self.scan, inputs, layout)
        return self.readout(o.to(hidden_states.dtype), hidden_states)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        token_layout: TokenLayout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention's interface: [B, T, hidden] -> ([B, T, hidden], None). Padding comes by `token_layout`."""
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
        slot: Any = None if cache is None else cache.layers[self.layer_idx]
        features = self.features(hidden_states, position_embeddings, token_layout, slot)
        if getattr(cache, "offloading", False):
            # As Cache.update does for attention: the next layer's keys are fetched while this layer works.
            if hidden_states.is_cuda:
                cache.prefetch_stream.wait_stream(torch.cuda.default_stream(hidden_states.device))
                cache.prefetch(self.layer_idx + 1, cache.only_non_sliding)
            slot.offload()
        return self.o_proj(features), None

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of state per sequence, with the model in `dtype`."""
        total = 0
        for shape, own in self.state_shapes().values():
            total += torch.Size(shape).numel() * (own or dtype).itemsize
        return total

    def _apply(self, fn: Any, recurse: bool = True) -> Mixer:
        # Decay parameters stay fp32 when a model is cast: bf16 cannot resolve decays near one.
        keep = {id(getattr(self, name)) for name in self.fp32_names if hasattr(self, name)}

        def guarded(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in keep and moved.dtype != tensor.dtype else moved

        return super()._apply(guarded, recurse)


class StateSpaceMixer(Mixer):
    """What GKA, GDN and Mamba-2 share: convolutions on q, k, v, a decay gate, a normed and gated read-out.

    Settings: conv_size, conv_activation (None or silu), conv_bias; rope, and qk_norm, whether the source's are kept;
    memory, time constants in tokens of the first and the last head at the start; norm_eps, of the read-out's norm.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "conv_size": 4,
        "conv_activation": None,
        "conv_bias": False,
        "qk_norm": True,
        "rope": True,
        "memory": (1.0, 64.0),
        "norm_eps": 1e-3,
    }

    def __init__(self, config: Any, attention: nn.Module, layer_idx: int):
        super().__init__(config, attention, layer_idx)
        settings, hidden = self.settings, config.hidden_size
        if not settings["qk_norm"]:
            for name in {"q_norm", "k_norm"} & self._modules.keys():
                delattr(self, name)
        width, bias = settings["conv_size"], settings["conv_bias"]
        self.q_conv = ShortConv(self.heads * self.head_dim, width, bias)
        self.k_conv = ShortConv(self.kv_heads * self.head_dim, width, bias)
        self.v_conv = ShortConv(self.kv_heads * self.head_dim, width, bias)
        self.a_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.g_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=True)
        self.o_norm = HeadNorm(self.heads, self.head_dim, self.settings["norm_eps"])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for conv in (self.q_conv, self.k_conv, self.v_conv):
            conv.reset_parameters()
        self.o_norm.reset_parameters()
        self.g_proj.weight.zero_()
        self.g_proj.bias.fill_(GATE_AT_ONE)
        self.a_proj.weight.zero_()
        # Time constants spread evenly in log scale over the heads: exp(-exp(A_log) * dt) per step.
        shortest, longest = self.settings["memory"]
        span = (torch.arange(self.heads, device=self.A_log.device) + 0.5) / self.heads
        rate = 1.0 / (shortest * (longest / shortest) ** span)
        dt = 0.05  # softplus is nearly linear in its weight here, so that the gate can learn both ways
        self.A_log.copy_((rate / dt).log())
        self.dt_bias.fill_(dt + math.log(-math.expm1(-dt)))  # softplus inverse

    def gates(self, hidden_states: Tensor) -> State:
        return {"a": self.a_proj(hidden_states)}

    @property
    def decay_gate(self) -> tuple[Tensor, Tensor]:
        """(A_log, dt_bias) [H]: what turns the logit `a` into a log decay, -exp(A_log) softplus(a + dt_bias)."""
        return self.A_log, self.dt_bias

    def timestep(self, inputs: State, lengths: Tensor | None) -> Tensor:
        """softplus(a + dt_bias), fp32 [B, T, H]; 0 behind each row's `lengths` tokens, so that they decay nothing."""
        return inert(F.softplus(inputs["a"].float() + self.dt_bias), lengths)

    def log_decay(self, inputs: State, lengths: Tensor | None) -> Tensor:
        """What `decay_gate` makes of the logits, fp32 [B, T, H]; 0 behind each row's `lengths` tokens."""
        return inert(decay_of(inputs["a"], self.decay_gate), lengths)

    def transition(self, inputs: State, state: State | None, layout: TokenLayout | None) -> State:
        if layout is None:
            return self.multiplier(inputs, state, None)
        if layout.lengths is None:
            raise ValueError("packed documents have no transition: each document starts from an empty state")
        layout = layout.to(inputs["q"].device)
        packed = {name: layout.pack(x) for name, x in inputs.items()}
        return self.multiplier(packed, state, layout.lengths)

    def multiplier(self, inputs: State, state: State | None, lengths: Tensor | None) -> State:
        """The transition over each row's first `lengths` tokens."""
        return {"log_decay": self.log_decay(inputs, lengths).sum(1)}

    def convolve(
        self, inputs: State, state: State | None, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """Short convolutions on q, k, v, then rotary on q and k; also the convolutions' new tails."""
        out, tails = {}, {}
        for name in ("q", "k", "v"):
            y, tails[f"conv_{name}"] = getattr(self, f"{name}_conv")(
                inputs[name].flatten(-2),
                activation=self.settings["conv_activation"],
                initial_state=None if state is None else state[f"conv_{name}"],
                lengths=lengths,
                cu_seqlens=cu_seqlens,
            )
            out[name] = y.unflatten(-1, (-1, self.head_dim))
        if "cos" in inputs:
            out["q"], out["k"] = (rotate(out[n], inputs["cos"], inputs["sin"]) for n in ("q", "k"))
        return out["q"], out["k"], out["v"], tails

    def readout(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        return self.o_norm(o).flatten(-2) * F.silu(self.g_proj(hidden_states))

    def conv_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        tail = self.settings["conv_size"] - 1
        widths = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        return {f"conv_{n}": ((tail, w * self.head_dim), None) for n, w in widths.items()}
