"""The Triton chunk forms take tensors of any strides: expanded gradients, transposed inputs, gaps between rows."""

import pytest
import torch
from kernel_cases import OPS, call, error, make_inputs, make_state

from hybridize.kernels.engine import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreted(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "triton")


def scattered(x: torch.Tensor) -> torch.Tensor:
    """Return x in memory that has its last axes swapped, with gaps between the rows."""
    wide = x.new_full((*x.shape[:-2], x.shape[-1], x.shape[-2] + 3), float("nan"))
    view = wide[..., : x.shape[-2]].mT
    view.copy_(x)
    return view


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("move", [lambda x: x, scattered], ids=["plain", "scattered"])
def test_strides(name, given, move, monkeypatch):
    def gradients(form, place):
        leaves = {n: place(x).requires_grad_() for n, x in make_inputs(name, 2, 65, (2, 1)).items()}
        state = tuple(place(x).requires_grad_() for x in make_state(name, 2, 2)) if given else None
        outputs = call(form, leaves, state)
        sum((x.sum() for x in outputs), torch.zeros((), device=outputs[0].device)).backward()
        found = {n: x.grad for n, x in leaves.items()}
        return {**found, **{f"state {n}": x.grad for n, x in enumerate(state or ())}}

    # gka's gradients are those of the exact solution, and naive's those of its iterations.
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "torch")
    expected = gradients(OPS[name].chunk, lambda x: x)
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "triton")
    found = gradients(OPS[name].chunk, lambda x: move(x.float().to(DEVICE)) if x.ndim > 1 else x.float().to(DEVICE))
    for n, x in expected.items():
        assert found[n] is not None, n
        assert error(found[n].cpu(), x) < 1e-3, n
