"""Whole GKA and GDN layers rebuilt from recorded weights, against recorded fp64 outputs."""

from pathlib import Path

import pytest
import torch.nn.functional as F
from kernel_cases import error
from safetensors.torch import load_file

from hybridize.kernels import gdn, gka
from hybridize.kernels.short_conv import short_conv

DATA = Path(__file__).parents[1] / "data"
DIM = 64


def layer(kind, form, w, x):
    """Return the output of a mixer layer: projections, convolutions, gates, the operation, norm, gate, projection."""

    def project(name):
        return F.linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))

    def heads(name):
        y, _ = short_conv(project(name), w[f"{name}_conv1d.weight"][:, 0], activation="silu")
        return y.unflatten(-1, (-1, DIM))

    decay = project("a" if kind == "gka" else "gk") + w["dt_bias"]
    gates = {"g": -w["A_log"].exp() * F.softplus(decay), "beta": project("b").sigmoid()}
    if kind == "gka":
        gates["alpha"] = project("alpha").sigmoid()
    o, _ = form(heads("q"), heads("k"), heads("v"), **gates)
    o = o * (o.square().mean(-1, keepdim=True) + (1e-6 if kind == "gka" else 1e-5)).rsqrt() * w["o_norm.weight"]
    return F.linear(o.flatten(2) * F.silu(project("g")), w["o_proj.weight"])


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
@pytest.mark.parametrize("kind", ["gka", "gdn"])
def test_recorded_layer(kind, form, record_property):
    stored = load_file(DATA / f"layer_{kind}.safetensors")
    weights = {n[2:]: t for n, t in stored.items() if n.startswith("w.")}
    module, name = (gka, "gka") if kind == "gka" else (gdn, "gated_delta_rule")
    run = getattr(module, f"{form}_{name}")
    exact = layer(kind, run, {n: t.double() for n, t in weights.items()}, stored["x"].double())
    assert error(exact, stored["y_fp64"]) < 1e-6
    measured = error(layer(kind, run, weights, stored["x"]), stored["y_fp64"])
    record_property("error", measured)
    print(f"{kind} {form} layer, fp32 against fp64: {measured:.2e}")
    assert measured <= 1e-4
