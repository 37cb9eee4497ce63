"""Whole GKA and GDN layers rebuilt from recorded weights, against recorded fp64 outputs."""

from pathlib import Path

import pytest
from kernel_cases import error, layer
from safetensors.torch import load_file

from hybridize.kernels import gdn, gka

DATA = Path(__file__).parents[1] / "data"


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
