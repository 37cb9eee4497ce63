"""The main job on the built-in model and text, small enough for a laptop."""

from __future__ import annotations

import os
from typing import Any

import torch

from hybridize.builtin import BUILTIN
from hybridize.console import Console
from hybridize.hybrid.loading import load
from hybridize.priming.run import prime

PROMPT = "What is gravity? Answer in one sentence."


def quickstart(
    *,
    layer: str = "gdn",
    tokens: int = 12_288,
    output: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    workspace: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Prime the built-in model, load what was written as any user would, and generate; returns the report."""
    console = console or Console(quiet=True)
    report = prime(
        BUILTIN,
        layer=layer,
        tokens=tokens,
        init_tokens=8192,
        held_out_tokens=4096,
        context=512,
        items=0,
        prompts=0,
        output=output,
        device=device,
        dtype=dtype,
        seed=seed,
        workspace=workspace,
        console=console,
    )
    console.note("Loading the hybrid and generating.")
    model, tokenizer = load(report["output"], device=device)
    report["sample"] = {"prompt": PROMPT, "text": _answer(model, tokenizer, PROMPT)}
    return report


@torch.no_grad()
def _answer(model: Any, tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    ids = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()
