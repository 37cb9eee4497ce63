"""Hankel rank: how large a state would have to be to carry what an attention layer carries from past to future.

A causal mixing matrix M [T, T] maps the tokens before `split` to the outputs from `split` on by its off-diagonal block
M[split:, :split]. The rank of that block is the smallest state of any time-varying linear recurrence that does the
same (Dewilde and van der Veen 1998). Attention's blocks have full rank in exact arithmetic, so what counts is how many
singular values are large. Rows sum to one, so an absolute threshold means something; a relative one is ruled by the
attention sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hybridize.errors import NonFiniteError, SourceError, UsageError
from hybridize.hybrid.walk import capture_layer_inputs, entry_device, run_layer
from hybridize.probing.finite import check_hidden, is_finite
from hybridize.probing.spectrum import (
    EXACT_LIMIT,
    SPECTRUM_STATISTICS,
    Estimate,
    estimated_spectrum,
    exact_spectrum,
    spectrum_statistics,
)

QUERY_ROWS = 1024  # rows of scores computed at once, over all keys
BLOCK_ENTRIES = 2**27  # entries of the blocks held at once (0.5 GB), if that is more than one head's
LONG, LONG_HEADS = 4096, 8  # tokens above which a few heads and one split stand for all
# Of all statistics this one tracks best, on SmolLM2-135M, what a layer loses to an aligned mixer (Spearman 0.5); the
# nuclear norm tracks the loss to a window (0.9) instead.
DEFAULT_SCORE = "no_sinks.rank"
VARIANTS = ("all", "no_sinks", "beyond")
STATISTICS = (*SPECTRUM_STATISTICS, "mass")
_CAPTURE = "hybridize_capture"

Result = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class HankelOptions:
    """What is measured on each block, and how.

    splits: where past and future part, as shares of T; a head counts with its largest value over them (None: quarters,
    or the middle alone where T is above LONG). absolute, relative: thresholds of the two ranks. state: the state's
    dimension for the tail error (None: the head's). sinks: first columns that variant no_sinks leaves out. window:
    variant `beyond` leaves out the sinks and what a window of this many tokens sees (0: no such variant). method:
    exact, estimate, or auto (exact up to EXACT_LIMIT values). stacked: heads that share a key head share one state,
    instead of one state per query head. max_heads: measure this many evenly spaced heads, or stacks, at most (None:
    all, or LONG_HEADS where T is above LONG).
    """

    splits: tuple[float, ...] | None = None
    absolute: float = 0.05
    relative: float = 1e-2
    state: int | None = None
    sinks: int = 4
    window: int = 0
    method: str = "auto"
    estimate: Estimate = field(default_factory=Estimate)
    stacked: bool = False
    max_heads: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Mixing:
    """What makes a layer's mixing matrices: q [B, H, T, D] and k [B, Hk, T, D] after rotary and norms, scale, window.

    `window` is the layer's own sliding window (query i sees keys j, i - window < j <= i), None where it has none.
    """

    q: Tensor
    k: Tensor
    scale: float
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, query heads, tokens."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def state(self) -> int:
        """The key dimension of a state-space head made from this attention head."""
        return self.q.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.q.device

    def block(self, sequence: int, heads: Sequence[int], split: int) -> Tensor:
        """M[split:, :split] of some heads of one sequence, fp32 [heads, T - split, split].

        Softmax is taken in fp32 over all keys, QUERY_ROWS queries at a time: no T x T matrix is held.
        """
        q = self.q[sequence, list(heads)].float()
        k = self.k[sequence, [head // self.group for head in heads]].float()
        tokens = q.shape[1]
        out = q.new_empty(len(q), tokens - split, split)
        for start in range(split, tokens, QUERY_ROWS):
            stop = min(start + QUERY_ROWS, tokens)
            i = torch.arange(start, stop, device=q.device)[:, None]
            j = torch.arange(stop, device=q.device)
            unseen = j > i
            if self.window is not None:
                unseen |= j <= i - self.window
            scores = (self.scale * q[:, start:stop]) @ k[:, :stop].transpose(1, 2)
            out[:, start - split : stop - split] = scores.masked_fill_(unseen, -torch.inf).softmax(-1)[..., :split]
        return out


class _Captured(Exception):
    """Ends an attention module's forward once its queries and keys are known."""

    def __init__(self, mixing: Mixing):
        self.mixing = mixing


def _capture(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> Any:
    """An attention function of transformers that computes nothing: it hands what it was given to `mixing_of`."""
    # Some families (Qwen2-MoE) keep the window on the module and express it in the mask alone.
    window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    raise _Captured(Mixing(query, key, float(scale), window or None))


AttentionInterface.register(_CAPTURE, _capture)


@torch.no_grad()
def mixing_of(layer: Any, hidden: Tensor, arguments: dict[str, Any], number: int) -> Mixing:
    """Mixing matrices of decoder layer `number` on hidden states [B, T, hidden] of unpadded rows.

    `arguments` are the layer's keyword arguments in a forward of the model. Raises SourceError when the attention
    cannot be read, NonFiniteError when it gives values that are not finite.
    """
    config = layer.self_attn.config
    before = config._attn_implementation
    config._attn_implementation = _CAPTURE
    try:
        layer(hidden, **arguments)
    except _Captured as captured:
        mixing = captured.mixing
    else:
        raise SourceError(
            f"The attention of layer {number} ({type(layer.self_attn).__name__}) does not use transformers' attention "
            "functions, so its mixing matrix cannot be read; leave out the method hankel."
        )
    finally:
        config._attn_implementation = before
    if not (is_finite(mixing.q) and is_finite(mixing.k)):
        raise NonFiniteError(
            f"The queries or keys of layer {number} are not finite numbers; use --dtype float32 or bfloat16, or check "
            "the model."
        )
    return mixing


def splits_of(tokens: int, options: HankelOptions = HankelOptions()) -> list[int]:
    """Where past and future part in a row of so many tokens."""
    shares = options.splits or ((0.5,) if tokens > LONG else (0.25, 0.5, 0.75))
    return sorted({min(max(round(share * tokens), 1), tokens - 1) for share in shares})


def layer_hankel(mixing: Mixing, options: HankelOptions = HankelOptions()) -> Result:
    """Statistics of one layer: variant -> statistic (see spectrum_statistics, and `mass`) -> mean and p90 over heads.

    `mass` is the block's mean row sum: the attention paid across the split. All are means over the sequences.
    """
    if options.method not in ("auto", "exact", "estimate"):
        raise UsageError(f"There is no Hankel method {options.method!r}; use auto, exact or estimate.")
    sequences, _, tokens = mixing.shape
    splits = splits_of(tokens, options)
    generator = torch.Generator(mixing.device).manual_seed(options.seed)
    results = []
    for sequence in range(sequences):
        largest: dict[tuple[str, str], Tensor] = {}
        for split in splits:
            for key, values in _split_statistics(mixing, sequence, split, options, generator).items():
                largest[key] = torch.maximum(largest[key], values) if key in largest else values
        result: Result = {}
        for (variant, name), values in largest.items():
            numbers = {"mean": values.mean().item(), "p90": values.quantile(0.9).item()}
            result.setdefault(variant, {})[name] = numbers
        results.append(result)
    return mean_results(results)


def _split_statistics(
    mixing: Mixing, sequence: int, split: int, options: HankelOptions, generator: torch.Generator
) -> dict[tuple[str, str], Tensor]:
    """(variant, statistic) -> one value per head, or per group of stacked heads; a few heads are held at a time."""
    _, heads, tokens = mixing.shape
    unit = mixing.group if options.stacked else 1
    units = heads // unit
    count = min(units, options.max_heads or (LONG_HEADS if tokens > LONG else units))
    chosen = [(2 * n + 1) * units // (2 * count) * unit + m for n in range(count) for m in range(unit)]
    size = unit * max(1, BLOCK_ENTRIES // (unit * split * (tokens - split)))
    parts: dict[tuple[str, str], list[Tensor]] = {}
    for start in range(0, len(chosen), size):
        block = mixing.block(sequence, chosen[start : start + size], split)
        for variant, matrices in _variants(block, split, options):
            stacked = matrices.reshape(-1, unit * matrices.shape[1], split)
            for name, values in _block_statistics(stacked, options, options.state or mixing.state, generator).items():
                parts.setdefault((variant, name), []).append(values)
    return {key: torch.cat(values) for key, values in parts.items()}


def _variants(block: Tensor, split: int, options: HankelOptions) -> Iterable[tuple[str, Tensor]]:
    """The block [heads, T - split, split] as it is, without sinks, and beyond the window; changed in place."""
    yield "all", block
    if options.sinks:
        block[..., : options.sinks] = 0
    yield "no_sinks", block
    if options.window:
        # Row r is token split + r, which keeps the columns up to split + r - window.
        yield "beyond", block.tril_(split - options.window)


def _block_statistics(
    matrices: Tensor, options: HankelOptions, state: int, generator: torch.Generator
) -> dict[str, Tensor]:
    exact = options.method == "exact" or (options.method == "auto" and min(matrices.shape[1:]) <= EXACT_LIMIT)
    spectrum = exact_spectrum(matrices) if exact else estimated_spectrum(matrices, generator, options.estimate)
    statistics = spectrum_statistics(spectrum, absolute=options.absolute, relative=options.relative, state=state)
    mass = matrices.sum(-1).mean(-1)
    return {**{name: x.cpu() for name, x in statistics.items()}, "mass": mass.cpu().double()}


def mean_results(results: Sequence[Result]) -> Result:
    """The mean of results of one layer on different sequences."""
    return {
        variant: {
            name: {kind: sum(r[variant][name][kind] for r in results) / len(results) for kind in kinds}
            for name, kinds in statistics.items()
        }
        for variant, statistics in results[0].items()
    }


def hankel_score(result: Result, by: str = DEFAULT_SCORE) -> float:
    """One number for a layer: 'variant.statistic', the mean over heads, or 'variant.statistic.p90'."""
    check_hankel_score(by)
    variant, name, *kind = by.split(".")
    return result[variant][name][kind[0] if kind else "mean"]


def check_hankel_score(by: str) -> None:
    """UsageError unless `hankel_score` knows the name."""
    known = {f"{variant}.{name}" for variant in VARIANTS for name in STATISTICS}
    if by.removesuffix(".p90") not in known:
        raise UsageError(
            f"There is no Hankel statistic {by!r}; use {', '.join(VARIANTS)}, a point, and one of "
            f"{', '.join(STATISTICS)}, such as {DEFAULT_SCORE}, or this with .p90."
        )


def hankel_sweep(
    model: Any,
    rows: Tensor,
    options: HankelOptions = HankelOptions(),
    *,
    layers: Iterable[int] | None = None,
    advance: Callable[[int], None] | None = None,
    done: Callable[[int, Result], None] | None = None,
) -> dict[int, Result]:
    """Results of `layers` (None: all) of a causal language model on rows of token ids [N, T], in one walk.

    advance(tokens) is called after each row of each layer that is measured, done(layer, result) after each layer. Held:
    one hidden state per token, and one layer's blocks. NonFiniteError names the layer that gave NaN or infinity.
    """
    body = model.base_model
    wanted = set(range(len(body.layers)) if layers is None else layers)
    device = entry_device(model)
    streams, arguments = capture_layer_inputs(body, [ids.to(device) for ids in rows.split(1)])
    results: dict[int, Result] = {}
    for i, layer in enumerate(body.layers[: max(wanted, default=-1) + 1]):
        found = []
        for n, hidden in enumerate(streams):
            if i in wanted:
                found.append(layer_hankel(mixing_of(layer, hidden, arguments[i], i), options))
                if advance is not None:
                    advance(rows.shape[1])
            streams[n] = run_layer(layer, hidden, arguments[i])[0]
            check_hidden(streams[n], i)
        if found:
            results[i] = mean_results(found)
            if done is not None:
                done(i, results[i])
    return results
