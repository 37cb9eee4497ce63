"""What a probe will take, before it takes it: memory, where the weights go, and time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from hybridize.console import Console, duration, size
from hybridize.devices import pick_device
from hybridize.errors import UsageError
from hybridize.mixers.base import geometry
from hybridize.probing.fitted import FIT_TOKENS
from hybridize.probing.hankel import BLOCK_ENTRIES, LONG, LONG_HEADS, VARIANTS, splits_of
from hybridize.probing.joint import JOINT_TOKENS
from hybridize.probing.measure import HANKEL_ROWS, Amount
from hybridize.probing.options import MIXER, ProbeOptions
from hybridize.probing.spectrum import Estimate
from hybridize.probing.swa_proxy import KEPT, LOGITS

ALIGN_PASSES = 4  # the model's own forward, and its mixers' forward and backward
_EFFICIENCY = {"cpu": 0.9}  # of a forward pass beside one large product of matrices; elsewhere a half
_SLACK = 1.25  # for what an allocator keeps between uses
_ROOM = 0.95  # of the free memory that may be filled


def batch_tokens(device: torch.device, context: int) -> int:
    """Tokens that pass through a layer at once: one row at least."""
    return max(context, 2048 if device.type == "cpu" else 32_768)


def target_of(name: str | None, gpu_memory: float | None, elsewhere: bool = False) -> torch.device:
    """The device to work on; with `elsewhere` and a memory of so many GiB, a GPU that this machine does not have.

    UsageError for a device that is not here, and for gpu_memory without a GPU.
    """
    if gpu_memory is not None and not 0 < gpu_memory < 2**20:
        raise UsageError(f"--gpu-memory is {gpu_memory:g}; give the GiB of a GPU, such as 24.")
    if elsewhere and gpu_memory is not None and not torch.cuda.is_available() and name in (None, "cuda"):
        return torch.device("cuda")
    device = pick_device(name)
    if gpu_memory is not None and device.type != "cuda":
        raise UsageError(f"--gpu-memory is of a GPU, but the probe would run on {device}; leave it out.")
    return device


@dataclass(frozen=True)
class Need:
    """Bytes: the weights, what the forward of one batch works in, and the hidden states of all batches between layers.

    passes: of all `tokens`, in so many batches, through all layers; operations: theirs, and those of the output head;
    seconds: their time, or None on a device that is not here.
    """

    weights: int
    work: int
    streams: int
    tokens: int
    batches: int
    passes: float
    operations: float
    seconds: float | None

    def summary(self, where: Placement) -> dict[str, Any]:
        """As a plan has it; the time counts what is brought to a GPU again and again."""
        seconds = self.seconds
        if seconds is not None and where.outside:
            seconds += self.passes * self.batches * where.outside / _bytes_per_second(where.device)
        return {
            "weight_bytes": self.weights,
            "work_bytes": self.work,
            "stream_bytes": self.streams,
            "offloaded_bytes": where.outside,
            "lacking_bytes": where.lacking,
            "tokens": self.tokens,
            "forward_passes": round(self.passes, 1),
            "operations": self.operations,
            "seconds": None if seconds is None else round(seconds),
        }


def need(model: Any, options: ProbeOptions, amount: Amount, dtype: torch.dtype, device: torch.device) -> Need:
    """What a probe needs of a model, which may be on the meta device; `device` is asked for its speed."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    attention = sum(p.numel() for x in model.base_model.layers for p in x.self_attn.parameters())
    if MIXER in options.methods:  # which take over copies of the attention's weights
        weights += attention * dtype.itemsize
    layers, hidden = config.num_hidden_layers, config.hidden_size
    body = sum(p.numel() for p in model.base_model.layers.parameters())
    heads, kv_heads, dim = geometry(config)
    changes = len(options.windows) if {"swa", "retrieval"} & set(options.methods) else 0
    changes += MIXER in options.methods
    read = min(HANKEL_ROWS * options.context, amount.text) if "hankel" in options.methods else 0  # row by row
    tokens = amount.text + amount.answers if changes else read
    at_once = (
        min(batch_tokens(device, options.context), max(amount.text, amount.answers)) if changes else options.context
    )
    # What takes most: the MLP's three activations, q, k, v three times (rotary makes copies), or the norms in fp32,
    # beside the residual stream, its norm and the layer's output; or the logits of one chunk in fp32, six times.
    widest = max(3 * config.intermediate_size, 3 * (heads + 2 * kv_heads) * dim, 8 * hidden // dtype.itemsize)
    layer = at_once * dtype.itemsize * (3 * hidden + widest)
    kept = 4 * min(KEPT, amount.scored * config.vocab_size)
    logits = 6 * 4 * min(LOGITS, at_once * config.vocab_size) if changes else 0
    blocks, hankel = _hankel_need(options, heads) if "hankel" in options.methods else (0, 0)
    training = 4 * 4 * attention if options.align else 0  # mixers, their gradients and two moments in fp32
    work = int(_SLACK * max(layer + max(kept, training), logits + kept, blocks))
    passes = read / tokens + (2 + changes * (layers + 1) / 2 if changes else 0)
    passes += (2 * min(FIT_TOKENS, amount.mixers) + ALIGN_PASSES * min(options.align, amount.mixers)) / tokens
    if options.select == "greedy":
        count = round(options.ratio * layers)
        steps = sum(1 + (layers - chosen) / 2 for chosen in range(count))
        passes += steps * min(1.0, max(JOINT_TOKENS, options.context) / tokens)
    # The head runs at scored positions: once per change in every layer.
    mixing = 2 * options.context * heads * dim * layers  # causal: half of T x T, for scores and for values
    head = 2 * hidden * config.vocab_size
    operations = passes * tokens * (2 * body + mixing) + layers * changes * amount.scored * head + layers * hankel
    here = device.type != "cuda" or torch.cuda.is_available()
    seconds = operations / _speed(device, dtype) if here else None
    streams = tokens * hidden * dtype.itemsize
    return Need(weights, work, streams, tokens, -(-tokens // at_once), passes, operations, seconds)


def _hankel_need(options: ProbeOptions, heads: int) -> tuple[int, int]:
    """Bytes of a layer's blocks with what is computed from them, and operations, for the rows that are measured."""
    tokens, estimate = options.context, Estimate()
    some = min(heads, LONG_HEADS) if tokens > LONG else heads
    entries = [split * (tokens - split) for split in splits_of(tokens)]
    held = max(max(entries), min(BLOCK_ENTRIES, some * max(entries)))
    # Of each variant: a product with the basis per pass and two more, and two with each probe in every Lanczos step.
    products = estimate.basis * (2 * estimate.passes + 2) + 2 * estimate.probes * estimate.steps
    rows = min(HANKEL_ROWS, options.sequences)
    return 3 * 4 * held, 2 * products * len(VARIANTS) * sum(entries) * some * rows


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a forward pass here, from one large product of matrices."""
    side = 1024 if device.type == "cpu" else 8192
    a = torch.ones(side, side, device=device, dtype=dtype)
    times = []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        times.append(time.perf_counter() - start)
    return _EFFICIENCY.get(device.type, 0.5) * 2 * side**3 / min(times)


def _bytes_per_second(device: torch.device) -> float:
    """From main memory to a GPU, as it takes weights from there."""
    weights = torch.ones(2**26, dtype=torch.uint8)
    times = []
    for _ in range(3):  # the first one warms up
        start = time.perf_counter()
        weights.to(device)[0].item()
        times.append(time.perf_counter() - start)
    return weights.nbytes / min(times)


def show_plan(console: Console, plan: dict[str, Any]) -> None:
    """What a probe will do and take, for a person."""
    seconds = plan["seconds"]
    console.report(
        {
            "model": plan["model"],
            "methods": plan["methods"],
            "windows": plan["windows"],
            "sinks": plan["sinks"],
            "text": f"{plan['sequences']} rows of {plan['context']:,} tokens ({plan['data']})",
            "tokens": plan["tokens"],
            "forward passes of these": plan["forward_passes"],
            "time, about": f"not known: no such GPU is here; {plan['operations'] / 1e12:,.0f} TFLOP"
            if seconds is None
            else duration(seconds),
            "number format": plan["dtype"],
            "weights": size(plan["weight_bytes"]),
            "memory to work in, about": size(plan["work_bytes"]),
            "hidden states kept": size(plan["stream_bytes"]),
            "the model would be": plan["placement"],
        },
        "Dry run: nothing is loaded or written.",
    )


@dataclass(frozen=True)
class Placement:
    """Where a model's weights go; str() says it in words.

    room: None where the whole model fits on `device`; else the bytes that its layers may take on each GPU. outside:
    bytes that stay in main memory and visit. lacking: bytes of memory that are too few, whatever goes where.
    """

    device: torch.device
    room: dict[int, int] | None
    outside: int
    lacking: int

    @staticmethod
    def of(needed: Need, device: torch.device, gpu_memory: float | None = None) -> Placement:
        """With gpu_memory, at most so many GiB of each GPU; without a number in `device` all GPUs share the layers."""
        main = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device.type != "cuda":
            return Placement(device, None, 0, max(0, needed.weights + needed.work + needed.streams - main))
        free = {i: int(_ROOM * memory) for i, memory in _gpu_bytes(device, gpu_memory).items()}
        room = {i: max(0, memory - needed.work) for i, memory in free.items()}
        if needed.weights <= room[next(iter(room))]:
            return Placement(device, None, 0, 0)
        outside = max(0, needed.weights - sum(room.values()))
        # The plan for a GPU elsewhere says nothing of the main memory there.
        short = outside + needed.streams - main if torch.cuda.is_available() else 0
        return Placement(device, room, outside, max(0, short, needed.work - max(free.values())))

    def __str__(self) -> str:
        if self.room is None:
            words = f"on {self.device}"
        else:
            names = ", ".join(f"cuda:{i}" for i in self.room)
            words = f"{size(self.outside)} of the weights in main memory, brought to {names} when needed"
            words = words if self.outside else f"layers spread over {names}"
        return f"{words}, where {size(self.lacking)} of memory are lacking" if self.lacking else words


def _gpu_bytes(device: torch.device, gpu_memory: float | None) -> dict[int, int]:
    """Bytes that may be used of each GPU, that of `device` first."""
    limit = 2**60 if gpu_memory is None else int(gpu_memory * 2**30)
    if not torch.cuda.is_available():
        return {0: limit}
    if device.index is not None:
        numbers = [device.index]
    else:
        numbers = sorted(range(torch.cuda.device_count()), key=lambda i: i != torch.cuda.current_device())
    return {i: min(limit, torch.cuda.mem_get_info(i)[0]) for i in numbers}
