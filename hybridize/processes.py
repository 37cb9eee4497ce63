"""One program in several processes, as torchrun starts them: which one this is, and what they must agree on.

Every function does nothing where there is one process, so that callers need not ask.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def world() -> int:
    """How many processes torchrun has started."""
    return int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1


def rank() -> int:
    """The number of this process, from 0; the first one alone prints and writes."""
    return int(os.environ["RANK"]) if world() > 1 else 0


def share() -> slice:
    """Which of a batch's rows are this process's."""
    return slice(rank(), None, world())


@contextmanager
def joined(device: "torch.device") -> Iterator[None]:
    """Connect the processes while the block runs; none enters before all have come."""
    if world() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Decisions and sums of single numbers are made on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def from_first(value: T) -> T:
    """The first process's value, in all of them."""
    if world() == 1:
        return value
    import torch
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def any_of(*flags: bool) -> list[bool]:
    """Which of the flags is set in any process."""
    if world() == 1:
        return list(flags)
    import torch

    return [bool(count) for count in total(torch.tensor(flags, dtype=torch.int64)).tolist()]


def total(x: Any) -> Any:
    """The sum of all processes' tensors x, in place."""
    if world() > 1:
        import torch.distributed as dist

        dist.all_reduce(x)
    return x


def alike(tensors: Iterable[Any]) -> None:
    """Give all processes the first one's tensors: the same sums may differ in their last bits from GPU to GPU."""
    if world() > 1:
        import torch.distributed as dist

        for x in tensors:
            dist.broadcast(x.detach(), src=0)


def wait() -> None:
    """Go on when all processes have come here."""
    any_of(True)
