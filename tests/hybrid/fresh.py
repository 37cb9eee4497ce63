"""Run in a fresh process by test_checkpoint: load every folder of argv[2:], write what was found to argv[1]."""

import sys

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--hybridize-first" in sys.argv:
        import hybridize  # noqa: F401
        from transformers import AutoConfig, AutoModelForCausalLM
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        import hybridize  # noqa: F401

    found = {}
    out, *folders = [a for a in sys.argv[1:] if not a.startswith("--")]
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = model(torch.arange(1, 41)[None]).logits
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        found[folder] = {
            "tensors": {**dict(model.named_parameters()), **dict(model.named_buffers())},
            "logits": logits,
            "class": type(model).__name__,
            "config": AutoConfig.from_pretrained(folder).to_dict(),
            "half": {name: p.dtype for name, p in half.named_parameters()},
            "tied": model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr(),
        }
    torch.save(found, out)
