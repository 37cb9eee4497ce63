"""The choice of engine, and what it says when it cannot be had."""

import warnings

import pytest
import torch

from hybridize.kernels import engine


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch):
    monkeypatch.delenv("HYBRIDIZE_ENGINE", raising=False)
    monkeypatch.setattr(engine, "_warn", engine._warn.__wrapped__)


def no_obstacle(device):
    return None


def test_a_cpu_uses_torch_without_a_word(monkeypatch):
    monkeypatch.setattr(engine, "interpreted", lambda: False)
    monkeypatch.setattr(engine, "_machine_obstacle", engine._machine_obstacle.__wrapped__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not engine.uses_triton(torch.ones(1), 64)


def test_what_was_asked_for_is_done(monkeypatch):
    monkeypatch.setattr(engine, "_machine_obstacle", no_obstacle)
    assert engine.uses_triton(torch.ones(1), 64)
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "torch")
    assert not engine.uses_triton(torch.ones(1), 64)
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "cuda")
    with pytest.raises(ValueError, match="'cuda', but must be torch or triton"):
        engine.uses_triton(torch.ones(1), 64)


@pytest.mark.parametrize(
    "x,width,widest,reason",
    [
        (torch.ones(1).double(), 64, 128, "no fp64"),
        (torch.ones(1), 256, 128, "float32 heads of up to 128 channels, and these have 256"),
        (torch.ones(1), 96, 64, "float32 heads of up to 64 channels, and these have 96"),
    ],
)
def test_what_cannot_be_done_is_said(monkeypatch, x, width, widest, reason):
    monkeypatch.setattr(engine, "_machine_obstacle", no_obstacle)
    assert not engine.uses_triton(x, width, widest=widest)
    monkeypatch.setenv("HYBRIDIZE_ENGINE", "triton")
    with pytest.raises(ValueError, match=reason):
        engine.uses_triton(x, width, widest=widest)


def test_a_gpu_left_to_torch_says_why(monkeypatch):
    monkeypatch.setattr(engine, "_machine_obstacle", lambda device: "this is a test")
    with pytest.warns(UserWarning, match="slower torch engine: this is a test"):
        assert not engine.uses_triton(torch.ones(1, device="meta"), 64)


def test_old_gpus_and_other_devices(monkeypatch):
    obstacle = engine._machine_obstacle.__wrapped__
    monkeypatch.setattr(engine, "interpreted", lambda: False)
    monkeypatch.setattr(engine, "find_spec", lambda name: name)
    monkeypatch.setattr(engine, "capability", lambda device: (7, 5))
    assert "compute capability 8.0, and this GPU has 7.5" in obstacle(torch.device("cuda"))
    assert "and this is mps" in obstacle(torch.device("mps"))
    monkeypatch.setattr(engine, "capability", lambda device: (9, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(engine, "which", lambda name: None)
    assert "needs a C compiler" in obstacle(torch.device("cuda"))
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    assert "not installed" in obstacle(torch.device("cuda"))


def test_launch_takes_what_fits(monkeypatch):
    """A configuration that the GPU refuses is passed over, once."""
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not installed on this platform")
    ran = []

    class Kernel:
        def __getitem__(self, grid):
            def run(*args, TILE, num_warps):
                ran.append(TILE)
                if limit < TILE:
                    raise errors.OutOfResources(TILE, limit, "shared memory")

            return run

    monkeypatch.setattr(engine, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a small GPU")
    configs = [{"TILE": t, "num_warps": 4} for t in (128, 64, 32)]
    kernel, limit = Kernel(), 64
    for _ in range(2):
        engine.launch(kernel, lambda meta: (1,), configs, torch.ones(1))
    assert ran == [128, 64, 64]
    kernel, limit = Kernel(), 8
    with pytest.raises(RuntimeError, match=r"does not fit on a small GPU .* set HYBRIDIZE_ENGINE=torch"):
        engine.launch(kernel, lambda meta: (1,), configs, torch.ones(1))


def test_new_kinds_of_arguments_are_compiled_for_at_once(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from types import SimpleNamespace

    done = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, num_warps: done.append("run")

        def warmup(self, *args, grid, num_warps):
            done.append("compile")

    monkeypatch.setattr(engine, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    kernels = Kernel(), Kernel()

    @engine.compiled_together
    def both(context, x, iters):
        for kernel in kernels:
            engine.launch(kernel, lambda meta: (1,), [{"num_warps": 4}], x)
        return iters

    def called_with(saved, x, iters):
        done.clear()
        assert both(SimpleNamespace(saved_tensors=(saved,)), x, iters) == iters
        return done.copy()

    x, all_new = torch.ones(1, 5, 3), ["compile", "compile", "run", "run"]
    assert called_with(None, x, 30) == all_new
    assert called_with(None, torch.ones(2, 7, 3), 30) == ["run", "run"]
    assert called_with(None, x.half(), 30) == all_new
    assert called_with(x, x, 30) == all_new
    assert called_with(x, x, 10) == all_new
    assert called_with(x, x, 10) == ["run", "run"]
