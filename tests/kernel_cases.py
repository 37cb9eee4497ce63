"""Inputs and calls that treat gka, gdn and ssd alike, for the tests of their forms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.kernels import gdn, gka, ssd
from hybridize.kernels.short_conv import short_conv

Inputs = dict[str, Tensor]
LAYER_DIM = 64  # head width of the recorded layers
GATES = ("zero", "slow", "fast", "infinite", "mixed", "usual")


class Op(NamedTuple):
    """One operation: its three forms, and how exact they are in fp32 (relative, norm-wise)."""

    naive: Callable[..., Any]
    chunk: Callable[..., Any]
    recurrent: Callable[..., Any]
    fp32: float


OPS = {
    "gka": Op(gka.naive_gka, gka.chunk_gka, gka.recurrent_gka, 1e-4),
    "gdn": Op(gdn.naive_gated_delta_rule, gdn.chunk_gated_delta_rule, gdn.recurrent_gated_delta_rule, 1e-5),
    "ssd": Op(ssd.naive_ssd, ssd.chunk_ssd, ssd.recurrent_ssd, 1e-5),
}


def log_decay(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return gates <= 0 of one kind."""
    if kind == "usual":
        return -torch.rand(shape, generator=generator, dtype=torch.float64).square()
    levels = {"zero": [0.0], "slow": [-1e-6], "fast": [-100.0], "infinite": [-float("inf")]}
    values = torch.tensor(levels.get(kind, [0.0, -1e-6, -0.3, -100.0, -1e4, -float("inf")]), dtype=torch.float64)
    return values[torch.randint(len(values), shape, generator=generator)]


def make_inputs(
    name: str,
    batch: int,
    tokens: int,
    heads: tuple[int, int] = (4, 2),
    gate: str = "usual",
    seed: int = 0,
    dim: int = 8,
) -> Inputs:
    """Return fp64 inputs by argument name; values are dim - 3 wide, so that no two sizes can be mixed up."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    h, hk = heads
    g = log_decay(gate, (batch, tokens, h), generator)
    beta, alpha = normal(batch, tokens, h).sigmoid(), normal(batch, tokens, h).sigmoid()
    b, c = normal(batch, tokens, hk, dim), normal(batch, tokens, hk, dim)
    if name == "ssd":
        g = g.clamp_min(-1e4)
        dt, a = -g / 5.0, torch.full((h,), -5.0, dtype=torch.float64)
        if gate == "usual":
            dt, a = beta, -torch.linspace(0.01, 3, h, dtype=torch.float64)
        return {"x": normal(batch, tokens, h, dim - 3), "dt": dt, "A": a, "B": b, "C": c, "D": normal(h)}
    inputs = {"q": normal(batch, tokens, h, dim), "k": b, "v": normal(batch, tokens, hk, dim - 3), "g": g, "beta": beta}
    return {**inputs, "alpha": alpha} if name == "gka" else inputs


def make_state(name: str, rows: int, h: int = 4, seed: int = 1, dim: int = 8) -> tuple[Tensor, ...]:
    """Return fp64 states; gka's Gram state is positive semi-definite, as any sum of k k^T is."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, h, dim, dim - 3, generator=generator, dtype=torch.float64)
    if name == "ssd":
        return (wide.mT.contiguous(),)
    return (wide @ wide.mT, wide) if name == "gka" else (wide,)


def is_per_token(name: str) -> bool:
    """Say whether an argument has a token axis."""
    return name not in ("A", "D")


def slice_tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Return the inputs of some tokens."""
    return {n: x[:, start:stop] if is_per_token(n) else x for n, x in inputs.items()}


def call(
    form: Callable[..., Any], inputs: Inputs, state: tuple[Tensor, ...] | None = None, **kwargs: Any
) -> list[Tensor]:
    """Return [output, *states]."""
    single = "gka" not in form.__name__
    o, final = form(**inputs, initial_state=state[0] if single and state is not None else state, **kwargs)
    return [o, final] if single else [o, *final]


def cast(tensors: Any, dtype: torch.dtype) -> Any:
    """Cast a dict or tuple of tensors."""
    if isinstance(tensors, dict):
        return {n: x.to(dtype) for n, x in tensors.items()}
    return None if tensors is None else tuple(x.to(dtype) for x in tensors)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative norm-wise error; NaN and infinities count as infinite."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape
    if not bool(actual.isfinite().all()):
        return float("inf")
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(actual: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Require every tensor to be within the relative bound."""
    errors = [error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) <= bound, errors


def gradients(form, inputs, state, **kwargs):
    """Return gradients of a fixed weighting of all outputs, with respect to all inputs and states."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    states = None if state is None else tuple(s.detach().clone().requires_grad_() for s in state)
    outputs = call(form, leaves, states, **kwargs)
    generator = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)).sum() for x in outputs)
    loss.backward()
    return {**{n: x.grad for n, x in leaves.items()}, **{f"state {i}": s.grad for i, s in enumerate(states or ())}}


def layer(kind, form, w, x):
    """Return the output of a mixer layer: projections, convolutions, gates, the operation, norm, gate, projection."""

    def project(name):
        return F.linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))

    def heads(name):
        y, _ = short_conv(project(name), w[f"{name}_conv1d.weight"][:, 0], activation="silu")
        return y.unflatten(-1, (-1, LAYER_DIM))

    decay = project("a" if kind == "gka" else "gk") + w["dt_bias"]
    gates = {"g": -w["A_log"].exp() * F.softplus(decay), "beta": project("b").sigmoid()}
    if kind == "gka":
        gates["alpha"] = project("alpha").sigmoid()
    o, _ = form(heads("q"), heads("k"), heads("v"), **gates)
    o = o * (o.square().mean(-1, keepdim=True) + (1e-6 if kind == "gka" else 1e-5)).rsqrt() * w["o_norm.weight"]
    return F.linear(o.flatten(2) * F.silu(project("g")), w["o_proj.weight"])
