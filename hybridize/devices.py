"""Which device and number format to use where a person did not say."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hybridize.errors import UsageError
from hybridize.processes import world

if TYPE_CHECKING:
    import torch


def pick_device(name: str | None = None) -> "torch.device":
    """The device of that name, or the fastest one there is; UsageError where it is absent.

    Of several processes on a machine with GPUs, each has its own.
    """
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if world() > 1 and (name == "cuda" or (name is None and cuda)):
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if name is None:
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{name!r} is no device that torch knows; use cpu, cuda, cuda:1 or mps.") from None
    count = {"cpu": 1, "cuda": torch.cuda.device_count() if cuda else 0, "mps": int(mps)}.get(device.type, 0)
    if (device.index or 0) >= count:
        raise UsageError(
            f"Device {name} was asked for, but torch {torch.__version__} finds {count} such; use --device cpu."
        )
    return device


def pick_dtype(name: "str | torch.dtype | None", device: "torch.device") -> "torch.dtype":
    """The floating-point type of that name; by default float32 on a CPU, where bfloat16 is slower, else bfloat16."""
    import torch

    if isinstance(name, torch.dtype):
        return name
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"{name!r} is no floating-point type; use float32, bfloat16 or float16.")
    return dtype


@contextmanager
def tensor_cores(device: "torch.device", wanted: bool) -> Iterator[None]:
    """While this lasts, let a GPU multiply fp32 matrices with TF32's 10 bits of mantissa where `wanted`.

    For what is in fp32 only because its neighbours are: on an H200 it is eight times as fast.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    if wanted and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
