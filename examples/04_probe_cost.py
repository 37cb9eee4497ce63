"""What a probe of a large model takes, beside plain forward passes of the same tokens: random weights of its shape.

python examples/04_probe_cost.py                # Qwen3-8B's shape, 8 rows of 32K tokens; needs a large GPU
python examples/04_probe_cost.py --rows 2       # fewer rows
python examples/04_probe_cost.py --small        # a pico model, anywhere
"""

import argparse
import resource
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridize.console import Console, duration, size
from hybridize.probing.estimate import batch_tokens
from hybridize.probing.options import state_window
from hybridize.probing.swa_proxy import Sweep, windows
from hybridize.tasks.scored import score_text

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


def peak() -> int:
    """Return the most memory taken so far, in bytes: of the GPU, or of this process."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def settled() -> float:
    """Return the time, when the device has done all its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def main() -> None:
    """Print the two times, their ratio, and the peaks of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int)
    chosen = parser.parse_args()
    if DEVICE.type == "cpu" and not chosen.small:
        parser.error("this shape needs a CUDA device; --small runs anywhere")
    context = chosen.context or (256 if chosen.small else 32_768)
    torch.manual_seed(0)
    config = Qwen3Config(**(SMALL if chosen.small else LARGE), tie_word_embeddings=False)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if chosen.small else torch.bfloat16).eval()
    rows = torch.randint(0, config.vocab_size, (chosen.rows, context))
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    layers = config.num_hidden_layers
    print(f"{name}, torch {torch.__version__}; {chosen.rows} rows of {context:,} tokens, {layers} layers")

    plain = []
    for ids in rows[[0, *range(chosen.rows)]].split(1):  # the first one warms up
        begin = settled()
        model.base_model(input_ids=ids.to(DEVICE), use_cache=False)
        plain.append(settled() - begin)
    forward, forward_peak = sum(plain[1:]), peak()

    window = min(state_window(config), context // 4)
    batches = score_text(rows, "random", batch_tokens(DEVICE, context))
    begin = settled()
    with Console().progress("Sweep", rows.numel() * layers * (2 + (layers + 1) / 2), "token") as tracker:
        sweep = Sweep(model, batches, tracker.advance)
        for _ in sweep.run(windows(model, [window])):
            pass
    swept = settled() - begin
    print("| what | value |\n| --- | ---: |")
    for what, value in {
        "plain forward passes of all rows, without the output head": f"{forward:.2f} s",
        "their peak of memory": size(forward_peak),
        f"probe, window {window}": f"{swept:.2f} s ({duration(swept)})",
        "its peak of memory": size(peak()),
        "the probe in plain forward passes": f"{swept / forward:.2f}",
        "and for each layer": f"{swept / forward / layers:.3f}",
        "held between layers": size(rows.numel() * config.hidden_size * model.dtype.itemsize),
    }.items():
        print(f"| {what} | {value} |")


if __name__ == "__main__":
    main()
