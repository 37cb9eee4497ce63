"""Which layers a probe selects, given one score per layer: how many, the lowest, and evenly spaced ones to compare."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hybridize.errors import UsageError
from hybridize.hybrid.plan import LayerPlan

DEFAULT_RATIO = 0.5


def share_of(num_layers: int, ratio: float | None, count: int | None, keep: Sequence[int]) -> float:
    """The share of layers to convert that `how_many` allows: `ratio`, or that of `count`, or DEFAULT_RATIO."""
    size = how_many(num_layers, ratio, count, keep)
    return size / num_layers if ratio is None and count is not None else _ratio(ratio)


def how_many(num_layers: int, ratio: float | None, count: int | None, keep: Sequence[int]) -> int:
    """The number of layers to convert: `count`, or round(ratio * num_layers) and at least one.

    UsageError for a wrong ratio or count, for both, and where `keep` does not leave so many layers.
    """
    if ratio is not None and count is not None:
        raise UsageError("--ratio and --count both say how many layers to convert; give one of them.")
    given = f"--ratio {_ratio(ratio)}" if count is None else f"--count {count}"
    if count is None:
        if not 0 < _ratio(ratio) <= 1:
            raise UsageError(f"{given}: the share of layers to convert must be above 0 and at most 1.")
        count = len(LayerPlan.evenly_spaced(num_layers, _ratio(ratio), "gka").layers)
    if not 1 <= count <= num_layers:
        raise UsageError(f"{given}: the model has {num_layers} layers; convert 1 to {num_layers} of them.")
    for layer in keep:
        if not 0 <= layer < num_layers:
            raise UsageError(f"--keep {layer}: there is no such layer; the model has layers 0 to {num_layers - 1}.")
        if keep.count(layer) > 1:
            raise UsageError(f"--keep names layer {layer} twice; name it once.")
    if count > (free := num_layers - len(keep)):
        raise UsageError(f"{given} converts {count} of {num_layers} layers, but --keep leaves {free}; keep fewer.")
    return count


def _ratio(ratio: float | None) -> float:
    return DEFAULT_RATIO if ratio is None else ratio


def lowest(scores: Sequence[float], count: int, keep: Collection[int]) -> list[int]:
    """The `count` layers with the lowest scores of those that are not in `keep`, in order; of equals the first."""
    return sorted(sorted(_free(len(scores), keep), key=scores.__getitem__)[:count])


def evenly_spaced(num_layers: int, count: int, keep: Collection[int]) -> list[int]:
    """`count` layers, evenly spaced among those that are not in `keep`, and ending with the last of these."""
    free = _free(num_layers, keep)
    return [free[i] for i in LayerPlan.evenly_spaced(len(free), count / len(free), "gka").layers]


def mean_ranks(columns: Sequence[Sequence[float]]) -> list[float]:
    """For each layer the mean over `columns` [scores][layers] of its rank, from 1 for the lowest; ties share theirs."""
    ranks = [_ranks(scores) for scores in columns]
    return [sum(layer) / len(ranks) for layer in zip(*ranks, strict=True)]


def _ranks(scores: Sequence[float]) -> list[float]:
    return [sum(x < score for x in scores) + (scores.count(score) + 1) / 2 for score in scores]


def _free(num_layers: int, keep: Collection[int]) -> list[int]:
    return [layer for layer in range(num_layers) if layer not in keep]
