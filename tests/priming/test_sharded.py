"""Two processes train as one does."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

import two_processes


def test_two_processes_have_the_loss_curve_of_one(python, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python(*launch, str(Path(two_processes.__file__)), str(tmp_path / "out.pt"), timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    results = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.set_num_threads(1)
    assert list(results) == ["mixers", "all"]
    for role, result in results.items():
        one = two_processes.trainer(role, sharded=False)
        for ours, theirs in zip(result["lines"], two_processes.steps(one, 6), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3), role
        assert result["again"] == result["lines"][3:]  # from a checkpoint, the same steps again
        for name, x in one.masters.masters.items():
            torch.testing.assert_close(result["state"]["weights"][name], x.detach(), atol=2e-3, rtol=1e-2)
