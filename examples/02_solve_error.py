"""How exact gka's solve is: its steps against the exact solution, and the kernels against the same steps in fp64.

    python examples/02_solve_error.py              # on this machine's GPU, else, in some minutes, on the CPU
    python examples/02_solve_error.py --small      # small heads, a few seconds

Three kinds of Gram matrices: of independent keys that fade slowly (easy), of keys that resemble the one before them and
fade within some 20 tokens (typical), and of nearly equal keys (nearly rank one). Errors are relative, in the norm of
the read-out of the last 64 tokens.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from hybridize.kernels.gka import chunk_gka, naive_gka, recurrent_gka

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = 100  # steps, after which less than 1e-11 is left: every one takes a quarter off
HEADS, KV_HEADS = 4, 2

Inputs = dict[str, Tensor]
Form = Callable[..., tuple[Tensor, object]]


def inputs(kind: str, tokens: int, dim: int) -> Inputs:
    """Return q, k, v [1,T,H,D] that bf16 holds exactly, and gates [1,T,H], in fp64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, dim).double() for heads in (HEADS, KV_HEADS, KV_HEADS))
    log_decay = {"easy": -0.002, "typical": -0.05, "nearly rank one": -0.02}[kind]
    if kind == "typical":
        for t in range(1, tokens):
            k[:, t] = 0.9 * k[:, t - 1] + 0.44 * k[:, t]
    if kind == "nearly rank one":
        k = k[:, :1] + 0.02 * k
    gates = torch.ones(1, tokens, HEADS).double()
    q, k, v = (x.bfloat16().double() for x in (q, k, v))
    return {"q": q, "k": k, "v": v, "g": log_decay * gates, "beta": 0.9 * gates, "alpha": 0.8 * gates}


def run(form: Form, given: Inputs, dtype: torch.dtype, num_iters: int) -> Tensor:
    """Return the last read-outs in fp64; q, k and v are given in `dtype`, gates in fp32 or better."""
    wide = torch.promote_types(dtype, torch.float32)
    moved = {n: x.to(DEVICE, dtype if n in "qkv" else wide) for n, x in given.items()}
    return form(**moved, num_iters=num_iters)[0][:, -64:].double().cpu()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    tokens, dim = (24, 16) if parser.parse_args().small else (256, 128)
    print(f"{torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}, torch {torch.__version__}\n")
    columns = ["steps to exact", "chunk, fp32", "chunk, bf16", "recurrent, fp32", "recurrent, bf16"]
    print("| Gram matrix | iterations | " + " | ".join(columns) + " |")
    print("| --- | ---: |" + " ---: |" * len(columns))
    for kind in ("easy", "typical", "nearly rank one"):
        given = inputs(kind, tokens, dim)
        exact = run(naive_gka, given, torch.float64, EXACT)
        for num_iters in (30, 10):
            steps = run(naive_gka, given, torch.float64, num_iters)
            found = [
                run(form, given, dtype, num_iters)
                for form in (chunk_gka, recurrent_gka)
                for dtype in (torch.float32, torch.bfloat16)
            ]
            errors = [(steps - exact).norm() / exact.norm(), *((x - steps).norm() / steps.norm() for x in found)]
            print(f"| {kind} | {num_iters} | " + " | ".join(f"{x:.1e}" for x in errors) + " |", flush=True)


if __name__ == "__main__":
    main()
