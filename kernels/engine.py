"""Which engine runs an operation: Triton where it is fast and right, torch everywhere."""

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, wraps
from importlib.util import find_spec
from shutil import which
from sysconfig import get_paths
from typing import Any

import torch
from torch import Tensor

ENGINES = ("torch", "triton")
WIDEST_HEAD = 128  # whose tiles fit the registers and shared memory of a program


def interpreted() -> bool:
    """Say whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(x: Tensor, *widths: int, widest: int = WIDEST_HEAD) -> bool:
    """Say whether Triton runs an operation on x, whose heads have these widths; a GPU left to torch warns once.

    HYBRIDIZE_ENGINE=torch or =triton overrides the choice. ValueError when it names neither, or Triton cannot run.
    """
    wanted = os.environ.get("HYBRIDIZE_ENGINE")
    if wanted not in (None, "", *ENGINES):
        raise ValueError(f"HYBRIDIZE_ENGINE is {wanted!r}, but must be torch or triton")
    if wanted == "torch" or x.numel() == 0:
        return False
    reason = _obstacle(x.device, x.dtype, max(widths), widest)
    if wanted == "triton" and reason:
        raise ValueError(f"HYBRIDIZE_ENGINE is triton, but {reason}")
    if reason and x.device.type != "cpu":
        _warn(reason)
    return reason is None


def _obstacle(device: torch.device, dtype: torch.dtype, width: int, widest: int) -> str | None:
    """Return why Triton cannot run here, or None."""
    if dtype == torch.float64:
        return "the Triton kernels have no fp64"
    if width > widest:
        name = str(dtype).removeprefix("torch.")
        return f"the Triton kernels take {name} heads of up to {widest} channels, and these have {width}"
    return _machine_obstacle(device)


@cache
def _machine_obstacle(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"the Triton kernels run on NVIDIA GPUs, and this is {'ROCm' if torch.version.hip else device.type}"
    if capability(device) < (8, 0):
        return "the Triton kernels need compute capability 8.0, and this GPU has {}.{}".format(*capability(device))
    compiler = os.environ.get("CC") or next(filter(None, map(which, ("clang", "gcc", "cc"))), None)
    if compiler is None or not os.path.exists(os.path.join(get_paths()["include"], "Python.h")):
        return "Triton needs a C compiler and Python's headers (on Debian: apt install gcc python3-dev)"
    return None


@cache
def _warn(reason: str) -> None:
    warnings.warn(f"hybridize runs on its slower torch engine: {reason}.", stacklevel=3)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability, (0, 0) for anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def padded(width: int, least: int = 16) -> int:
    """Return the tile that holds width channels: the next power of two, at least the 16 that tensor cores need."""
    return max(least, 1 << (width - 1).bit_length())


def product_tile(width: int) -> int:
    """Return the tile of width channels for kernels made of matrix products.

    At least 64 on a GPU: Triton 3.6 compiles some products of narrower tiles into illegal accesses on Hopper.
    """
    return padded(width, 16 if interpreted() else 64)


_fitting: dict[tuple[Any, ...], int] = {}
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def compiled_together(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compile all kernels that a function launches side by side, before its first run on new kinds of arguments.

    It is called once more for this, with launches that compile and do not run, so all it does must be allocations and
    launches. A context of autograd among its arguments counts as the tensors it has saved.
    """
    seen: set[Any] = set()

    @wraps(run)
    def compiling_first(*args: Any) -> Any:
        kinds = tuple(map(_kind, args))
        if kinds not in seen and not interpreted():
            seen.add(kinds)
            _compile(run, args)
        return run(*args)

    return compiling_first


def _kind(x: Any) -> Any:
    """Return what tells arguments apart that need other kernels."""
    if isinstance(x, Tensor):
        return x.dtype, x.device.index, x.shape[2:]
    if hasattr(x, "saved_tensors"):
        return tuple(map(_kind, x.saved_tensors))
    return x if isinstance(x, bool | int | float | None) else type(x)


def _compile(run: Callable[..., Any], args: Sequence[Any]) -> None:
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:  # before Triton 3.5
        return
    # What cannot be compiled is met again, and explained, when it is to run.
    with ThreadPoolExecutor(os.cpu_count()) as threads, mode(threads, ignore_errors=True):
        token = _compiling.set(True)
        try:
            run(*args)
        finally:
            _compiling.reset(token)


def launch(
    kernel: Any,
    grid: Callable[[dict[str, Any]], tuple[int, ...]],
    configs: Sequence[dict[str, Any]],
    *args: Any,
    **constants: Any,
) -> None:
    """Run a kernel with the first configuration that the GPU has shared memory and registers for, and remember it.

    A configuration is tile sizes with num_warps and num_stages, the fastest first; one that does not fit is refused
    before it runs, so nothing is written twice. The first argument is a tensor. RuntimeError when none fits.
    """
    if interpreted():
        tiles = {name: x for name, x in configs[0].items() if name.isupper()}
        kernel[grid](*args, **constants, **tiles)
        return
    device = args[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, configs, *args, **constants)
        return
    key = (id(kernel), device.index, *constants.values())
    first = _fitting.get(key)
    if _compiling.get():
        kernel.warmup(*args, grid=(1,), **constants, **configs[first or 0])
        return
    if first is not None:
        kernel[grid](*args, **constants, **configs[first])
        return
    from triton.runtime.errors import OutOfResources

    refusal: Exception | None = None
    for n, config in enumerate(configs):
        try:
            kernel[grid](*args, **constants, **config)
        except OutOfResources as error:
            refusal = error
            continue
        _fitting[key] = n
        return
    name = torch.cuda.get_device_name(device)
    raise RuntimeError(f"A kernel does not fit on {name} ({refusal}); set HYBRIDIZE_ENGINE=torch.") from refusal
