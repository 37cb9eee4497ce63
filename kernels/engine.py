"""Which engine runs an operation: Triton where it is fast and right, torch everywhere."""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

ENGINES = ("torch", "triton")
LARGEST_HEAD = 128  # the widest head whose tiles fit the registers and shared memory of a program


def interpreted() -> bool:
    """Say whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(x: Tensor, *widths: int) -> bool:
    """Say whether Triton runs an operation on x, whose heads have these widths; a GPU left to torch warns once.

    HYBRIDIZE_ENGINE=torch or =triton overrides the choice. ValueError when it names neither, or Triton cannot run.
    """
    wanted = os.environ.get("HYBRIDIZE_ENGINE")
    if wanted not in (None, "", *ENGINES):
        raise ValueError(f"HYBRIDIZE_ENGINE is {wanted!r}, but must be torch or triton")
    if wanted == "torch" or x.numel() == 0:
        return False
    reason = _obstacle(x.device, x.dtype, widths)
    if wanted == "triton" and reason:
        raise ValueError(f"HYBRIDIZE_ENGINE is triton, but {reason}")
    if reason and x.device.type != "cpu":
        _warn(reason)
    return reason is None


def _obstacle(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str | None:
    """Return why Triton cannot run here, or None."""
    if dtype == torch.float64:
        return "the Triton kernels have no fp64"
    if max(widths) > LARGEST_HEAD:
        return f"the Triton kernels take heads of up to {LARGEST_HEAD} channels, and these have {max(widths)}"
    return _machine_obstacle(device)


@cache
def _machine_obstacle(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"the Triton kernels run on NVIDIA GPUs, and this is {'ROCm' if torch.version.hip else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the Triton kernels need compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return None


@cache
def _warn(reason: str) -> None:
    warnings.warn(f"hybridize runs on its slower torch engine: {reason}.", stacklevel=3)


_fitting: dict[tuple[Any, ...], int] = {}


def launch(
    kernel: Any,
    grid: Callable[[dict[str, Any]], tuple[int, ...]],
    configs: Sequence[dict[str, Any]],
    *args: Any,
    **constants: Any,
) -> None:
    """Run a kernel with the first configuration that the GPU has shared memory and registers for, and remember it.

    A configuration is tile sizes with num_warps and num_stages, the fastest first; one that does not fit is refused
    before it runs, so nothing is written twice. RuntimeError when none fits.
    """
    if interpreted():
        kernel[grid](*args, **constants, **configs[0])
        return
    from triton.runtime.errors import OutOfResources

    device = next(a.device for a in args if isinstance(a, Tensor))
    key = (kernel.fn.__name__, device, tuple(sorted(constants.items())), tuple(tuple(c.items()) for c in configs))
    refusal: Exception | None = None
    with torch.cuda.device(device):
        for n in range(_fitting.get(key, 0), len(configs)):
            try:
                kernel[grid](*args, **constants, **configs[n])
            except OutOfResources as error:
                refusal = error
                continue
            _fitting[key] = n
            return
    name = torch.cuda.get_device_name(device)
    raise RuntimeError(
        f"{kernel.fn.__name__} does not fit on {name} ({refusal}); set HYBRIDIZE_ENGINE=torch"
    ) from refusal
