"""Kernel tests run on one thread, and fresh memory holds NaN, so that nothing may read what it has not written."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _strict_memory(request):
    if request.node.get_closest_marker("gpu"):  # cumsum has no deterministic form there
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # this is what makes torch fill new tensors
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
