"""How fast the kernels are on this machine, and how near to what it can do.

    python examples/01_kernel_speed.py                 # the shapes of an 8B model; needs a GPU
    python examples/01_kernel_speed.py --small         # a few seconds anywhere, to see that everything runs
    python examples/01_kernel_speed.py --only decode   # rows whose name has this in it

Every row: the median time of many runs with a cold L2 cache, what had to be moved or computed, and which share of this
machine's own ceiling that is: the speed of a copy, or of a large bf16 matrix product, measured in the same run. With
flash-linear-attention's core installed (pip install fla-core), its kernels run beside ours.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridize.kernels.gdn import chunk_gated_delta_rule, recurrent_gated_delta_rule
from hybridize.kernels.gka import chunk_gka, recurrent_gka
from hybridize.kernels.ssd import chunk_ssd, recurrent_ssd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Shape:
    """Sizes of one layer: query heads, key/value heads, head dim."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


@dataclass
class Row:
    """One measurement: what runs, and its least traffic in bytes or its operations."""

    name: str
    run: Callable[[], object]
    bytes: float = 0.0
    flops: float = 0.0


def median_ms(run: Callable[[], object]) -> float:
    """Return the median time of a call in ms; the L2 cache is emptied before each."""
    if DEVICE.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=10, rep=100, return_mode="median"))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)[1] * 1e3


def ceilings(size: int) -> tuple[float, float]:
    """Return this machine's copy speed in bytes/s and bf16 matrix product speed in operations/s."""
    x = torch.empty(size**2 * 8, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    copy = 2 * x.numel() / median_ms(lambda: y.copy_(x)) * 1e3
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    return copy, 2 * size**3 / median_ms(lambda: a @ a) * 1e3


def inputs(batch: int, tokens: int, shape: Shape, grad: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return random [q, k, v] in bf16 (fp32 on a CPU) and gates [g, beta, alpha] in fp32."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32

    def random(heads: int) -> Tensor:
        return torch.randn(batch, tokens, heads, shape.dim, device=DEVICE, dtype=dtype).requires_grad_(grad)

    gates = torch.rand(3, batch, tokens, shape.heads, device=DEVICE)
    qkv = [random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)]
    return qkv, [x.requires_grad_(grad) for x in (-0.1 * gates[0], gates[1].clone(), gates[2].clone())]


def state(batch: int, shape: Shape) -> Tensor:
    """Return one fp32 state for every row and head; it is positive definite, so that it may be gka's Gram matrix."""
    keys = torch.randn(batch, shape.heads, 2 * shape.dim, shape.dim, device=DEVICE)
    return keys.mT @ keys / shape.dim


def decode_rows(batch: int, shape: Shape) -> Iterator[Row]:
    """One token for every row of a batch, states in place."""
    (q, k, v), (g, beta, alpha) = inputs(batch, 1, shape)
    h, u = state(batch, shape), state(batch, shape)
    moved = 2.0 * h.numel() * 4
    for iters in (30, 10):
        run = lambda n=iters: recurrent_gka(q, k, v, g, beta, alpha, num_iters=n, initial_state=(h, u), inplace=True)
        yield Row(f"gka decode, {iters} iterations, batch {batch}", run, bytes=2 * moved)
    run = lambda: recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=h, inplace=True)
    yield Row(f"gdn decode, batch {batch}", run, bytes=moved)
    x, rate = torch.randn_like(q), -torch.rand(shape.heads, device=DEVICE)
    yield Row(
        f"ssd decode, batch {batch}",
        lambda: recurrent_ssd(x, beta, rate, k, v, initial_state=h, inplace=True),
        bytes=moved,
    )


def chunk_rows(tokens: int, shape: Shape, train: bool) -> Iterator[Row]:
    """One long sequence, forward, or forward and backward."""
    qkv, gates = inputs(1, tokens, shape, grad=train)
    x = torch.randn_like(qkv[0]).requires_grad_(train)
    rate = -torch.rand(shape.heads, device=DEVICE)
    work = "forward and backward" if train else "prefill"
    pairs = tokens * shape.heads * shape.dim
    # Operations of the chunked form with chunks of 64: products of a chunk's tokens, with its state, and into it.
    linear = 2.0 * pairs * (2 * 64 + 2 * shape.dim)
    solve = 2.0 * 30 * pairs * (2 * 64 + shape.dim)
    forms: dict[str, tuple[Callable[[], tuple[Tensor, object]], float]] = {
        "gka": (lambda: chunk_gka(*qkv, *gates), 2 * linear + solve),
        "gdn": (lambda: chunk_gated_delta_rule(*qkv, *gates[:2]), linear + 2.0 * pairs * (3 * 64 + shape.dim)),
        "ssd": (lambda: chunk_ssd(x, gates[1], rate, qkv[1], qkv[2]), linear),
    }
    for name, (form, flops) in forms.items():
        if train:
            d_o = torch.randn_like(x)
            # Not backward(), which would add to the gradients of the call before, and be timed with that.
            run: Callable[[], object] = lambda form=form, leaves=(x, *qkv, *gates), d_o=d_o: torch.autograd.grad(
                form()[0], leaves, d_o, allow_unused=True
            )
            yield Row(f"{name} {work}, {tokens} tokens", run, flops=3 * flops)
        else:
            yield Row(f"{name} {work}, {tokens} tokens", form, flops=flops)
    yield from peer_rows(tokens, shape, train)


def peer_rows(tokens: int, shape: Shape, train: bool) -> Iterator[Row]:
    """flash-linear-attention's kernels at the same shape, where they are installed; its gdn refuses to train here."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as peer_gdn
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return
    (q, k, v), (g, beta, _) = inputs(1, tokens, Shape(shape.heads, shape.heads, shape.dim), grad=train)
    d_o = torch.randn_like(q)
    forms = {"fla simple_gla": lambda: chunk_simple_gla(q, k, v, g)[0]}
    if not train:
        forms["fla gdn"] = lambda: peer_gdn(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    for name, form in forms.items():
        run = (lambda form=form: torch.autograd.grad(form(), (q, k, v, g), d_o, allow_unused=True)) if train else form
        yield Row(f"{name}, {'forward and backward' if train else 'prefill'}, {tokens} tokens", run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    if DEVICE.type == "cpu" and not chosen.small:
        parser.error("these shapes need a CUDA device; --small runs anywhere")
    shape = Shape(4, 2, 32) if chosen.small else Shape()
    copy, product = ceilings(512 if chosen.small else 8192)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}: copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s\n"
    )
    print("| what | ms | moved or computed | share of ceiling |\n| --- | ---: | ---: | ---: |")
    for make in (
        *(lambda b=b: decode_rows(b, shape) for b in ((1, 2) if chosen.small else (1, 128, 256))),
        *(lambda t=t: chunk_rows(t, shape, False) for t in ((100,) if chosen.small else (16384, 65536))),
        lambda: chunk_rows(100 if chosen.small else 8192, shape, True),
    ):
        for row in make():
            if chosen.only not in row.name:
                continue
            ms = median_ms(row.run)
            if row.bytes:
                cost, share = f"{row.bytes / 1e9:.3f} GB", f"{row.bytes / ms * 1e3 / copy:.0%}"
            elif row.flops:
                cost, share = f"{row.flops / 1e9:.0f} GFLOP", f"{row.flops / ms * 1e3 / product:.0%}"
            else:
                cost, share = "", ""
            print(f"| {row.name} | {ms:.3f} | {cost} | {share} |", flush=True)


if __name__ == "__main__":
    main()
