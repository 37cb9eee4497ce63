"""Shows what a prime run will do, or did; reads mixer settings from the command line."""

from __future__ import annotations

import json
from typing import Any

from hybridize.console import Console, size
from hybridize.errors import UsageError

_STEPS = {
    "source": "source model",
    "converted": "converted, weights copied",
    "init": "after init",
    "align": "after align",
    "distill": "after distill",
    "adapt": "after adapt",
    "baseline": "source, same tokens",
}


def read_setting(text: str) -> tuple[str, Any]:
    """'num_iters=10' -> ('num_iters', 10); values are JSON, anything else is text. UsageError without a '='."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--set {text!r} is not NAME=VALUE, such as num_iters=10.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def show_dry_run(console: Console, report: dict[str, Any]) -> None:
    """The plan, every tensor's fate, and sizes."""
    tensors, cache = report["tensors"], report["cache"]
    console.report(
        {
            "source": report["source"],
            "pattern": report["pattern"],
            "converted layers": report["converted"],
            "source tensors copied": tensors["copied"],
            "source tensors transformed": tensors["transformed"],
            "source tensors dropped": len(tensors["dropped"]),
            "new tensors": tensors["new"],
            "parameters": report["parameters"],
            "  of these new": report["new_parameters"],
            "  of these trained": report["trained_parameters"],
            "checkpoint": size(report["checkpoint_bytes"]),
            "memory to train, about": size(report["training_bytes"]),
            **_cache_lines(cache),
            "would be written to": report["output"],
        },
        "Dry run: nothing is written.",
    )


def show_report(console: Console, report: dict[str, Any]) -> None:
    """Losses before and after, and where the hybrid is."""
    losses = report["losses"]
    source = losses["source"]["loss"]
    rows = [
        [_STEPS[name], f"{value['loss']:.4f}", f"{value['perplexity']:.2f}", f"{value['loss'] - source:+.4f}"]
        for name, value in losses.items()
    ]
    console.table(["model", "held-out loss", "perplexity", "to source"], rows)
    console.report(
        {
            "pattern": report["pattern"],
            "tokens trained on": report["train_tokens"],
            "tokens measured": report["held_out_tokens"],
            **_cache_lines(report["cache"]),
            "hybrid": report["output"],
        }
    )


def _cache_lines(cache: dict[str, Any]) -> dict[str, Any]:
    return {
        "state per sequence": size(cache["state_bytes_per_sequence"]),
        "cache per token": f"{size(cache['hybrid_bytes_per_token'])} (source {size(cache['source_bytes_per_token'])})",
        "cache smaller from": f"{cache['smaller_from_tokens']:,} tokens",
    }
