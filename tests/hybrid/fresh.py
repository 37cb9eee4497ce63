"""Run in a fresh process by test_checkpoint: load every folder of argv[2:], write what was found to argv[1]."""

import sys
from importlib import import_module

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    order = ["hybridize", "transformers"]
    for name in order if "--hybridize-first" in sys.argv else reversed(order):
        getattr(import_module(name), "AutoConfig", None)  # transformers loads its Auto classes when one is touched
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    out, *folders = [a for a in sys.argv[1:] if not a.startswith("--")]
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = model(torch.arange(1, 41)[None]).logits
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) if "moe" in folder else model
        found[folder] = {
            "tensors": {**dict(model.named_parameters()), **dict(model.named_buffers())},
            "logits": logits,
            "class": type(model).__name__,
            "config": AutoConfig.from_pretrained(folder).to_dict(),
            "half": {name: p.dtype for name, p in half.named_parameters()},
            "tied": model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr(),
        }
    torch.save(found, out)
