"""What a probe will take, before it takes it: memory, where the weights go, and time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from hybridize.console import Console, duration, size
from hybridize.mixers.base import geometry
from hybridize.probing.fitted import FIT_TOKENS
from hybridize.probing.hankel import BLOCK_ENTRIES, LONG, LONG_HEADS, VARIANTS, splits_of
from hybridize.probing.joint import JOINT_TOKENS
from hybridize.probing.measure import HANKEL_ROWS
from hybridize.probing.options import MIXER, ProbeOptions
from hybridize.probing.spectrum import Estimate
from hybridize.probing.swa_proxy import LOGITS
from hybridize.tasks.retrieval import DEPTHS
from hybridize.tasks.scored import SCORED_PER_ROW

_EFFICIENCY = {"cpu": 0.9}  # of a forward pass beside one large product of matrices; elsewhere a half
_SLACK = 1.25  # for what an allocator keeps between uses
_ROOM = 0.95  # of the free memory that may be filled


def batch_tokens(device: torch.device, context: int) -> int:
    """Tokens that pass through a layer at once: one row at least."""
    return max(context, 2048 if device.type == "cpu" else 32_768)


@dataclass(frozen=True)
class Need:
    """Bytes: the weights, what the forward of one batch works in, and the hidden states of all batches between layers.

    passes: of all `tokens` through all layers; seconds: their time, and that of the output head.
    """

    weights: int
    work: int
    streams: int
    tokens: int
    passes: float
    seconds: float

    def summary(self) -> dict[str, Any]:
        return {
            "weight_bytes": self.weights,
            "work_bytes": self.work,
            "stream_bytes": self.streams,
            "tokens": self.tokens,
            "forward_passes": round(self.passes, 1),
            "seconds": round(self.seconds),
        }


def need(config: Any, options: ProbeOptions, tasks: int, dtype: torch.dtype, device: torch.device) -> Need:
    """What the sweep over text and over `tasks` retrieval tasks needs; device is asked for its speed."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    if MIXER in options.methods:  # which take over copies of the attention's weights
        weights += sum(p.numel() for x in model.base_model.layers for p in x.self_attn.parameters()) * dtype.itemsize
    layers, hidden = config.num_hidden_layers, config.hidden_size
    body = sum(p.numel() for p in model.base_model.layers.parameters())
    heads, kv_heads, dim = geometry(config)
    text = options.sequences * options.context if {"swa", "hankel", MIXER} & set(options.methods) else 0
    answers = tasks * DEPTHS * options.items * sum(options.lengths) if "retrieval" in options.methods else 0
    at_once = min(batch_tokens(device, options.context), max(text, answers))
    # What takes most: the MLP's three activations, q, k, v three times (rotary makes copies), or the norms in fp32,
    # beside the residual stream, its norm and the layer's output; or the logits of one chunk in fp32, six times.
    widest = max(3 * config.intermediate_size, 3 * (heads + 2 * kv_heads) * dim, 8 * hidden // dtype.itemsize)
    layer = at_once * dtype.itemsize * (3 * hidden + widest)
    blocks, hankel = _hankel_need(options, heads) if "hankel" in options.methods else (0, 0)
    work = int(_SLACK * max(layer, 6 * 4 * min(LOGITS, at_once * config.vocab_size), blocks))
    tokens = text + answers
    changes = len(options.windows) if {"swa", "retrieval"} & set(options.methods) else 0
    changes += MIXER in options.methods
    passes = 2 + changes * (layers + 1) / 2
    if MIXER in options.methods:
        passes += 2 * FIT_TOKENS / tokens
    if options.select == "greedy":
        count = round(options.ratio * layers)
        steps = sum(1 + (layers - chosen) / 2 for chosen in range(count))
        passes += steps * min(1.0, max(JOINT_TOKENS, options.context) / tokens)
    # The head runs at scored positions: once for the unchanged model, and once per change, in every layer.
    scored = min(SCORED_PER_ROW, options.context // 2) * options.sequences
    attention = 2 * options.context * heads * dim * layers  # causal: half of T x T, for scores and for values
    flops = passes * tokens * (2 * body + attention) + layers * (1 + changes) * scored * (
        2 * hidden * config.vocab_size
    )
    flops += layers * hankel
    return Need(weights, work, tokens * hidden * dtype.itemsize, tokens, passes, flops / _speed(device, dtype))


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


def show_plan(console: Console, plan: dict[str, Any]) -> None:
    """What a probe will do and take, for a person."""
    console.report(
        {
            "model": plan["model"],
            "methods": plan["methods"],
            "windows": plan["windows"],
            "sinks": plan["sinks"],
            "text": f"{plan['sequences']} rows of {plan['context']:,} tokens ({plan['data']})",
            "tokens": plan["tokens"],
            "forward passes of these": plan["forward_passes"],
            "time, about": duration(plan["seconds"]),
            "weights": size(plan["weight_bytes"]),
            "memory to work in, about": size(plan["work_bytes"]),
            "hidden states kept": size(plan["stream_bytes"]),
            "the model would be": plan["placement"],
        },
        "Dry run: nothing is loaded or written.",
    )


def room(device: torch.device, needed: Need) -> dict[int, int] | None:
    """None where the whole model fits on `device`; else the bytes that its layers may take on each GPU.

    Without a number in `device` all GPUs share the layers; what fits nowhere stays in main memory and visits.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    numbers = range(torch.cuda.device_count()) if device.index is None else [index]
    free = {i: max(0, int(_ROOM * torch.cuda.mem_get_info(i)[0]) - needed.work) for i in numbers}
    return None if needed.weights <= free[index] else free


def placement(needed: Need, free: dict[int, int] | None, device: torch.device) -> str:
    """Where the model would be, in words."""
    if free is None:
        return f"on {device}"
    names = ", ".join(f"cuda:{i}" for i in free)
    outside = needed.weights - sum(free.values())
    if outside <= 0:
        return f"layers spread over {names}"
    return f"{size(outside)} of the weights in main memory, brought to {names} when needed"
