"""Scores by name: which number of a layer's results says how much is lost without its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridize.errors import UsageError
from hybridize.probing.hankel import DEFAULT_SCORE, check_hankel_score, hankel_score
from hybridize.probing.select import mean_ranks

# method -> its statistics, the default first; those of hankel and of tasks depend on what was measured
_STATISTICS = {
    "swa": ("kl", "loss"),
    "retrieval": ("loss", "kl", "accuracy"),
    "hankel": (DEFAULT_SCORE,),
    "mixer": ("kl", "loss"),
    "tasks": ("loss",),
}


@dataclass(frozen=True)
class NamedScore:
    """METHOD[.STATISTIC][@WINDOW]: 'swa' is the KL at the first window, 'swa.loss@64' the loss at another.

    'mixer' is the KL with a fitted mixer in place, 'retrieval@mixer' the loss of answers then.

    'hankel.no_sinks.nuclear.p90' is a statistic of `hankel_score`, 'tasks.recall' a column of a CSV of task scores.
    """

    method: str
    statistic: str
    window: str | None

    @staticmethod
    def parse(name: str, windows: Sequence[int], methods: Sequence[str]) -> NamedScore:
        """UsageError where there is no such score, or where it is not among what is measured."""
        rest, at, window = name.partition("@")
        method, _, statistic = rest.partition(".")
        if method not in _STATISTICS or rest.endswith("."):
            raise UsageError(f"There is no score {name!r}; use one of {', '.join(_STATISTICS)}.")
        if method not in methods:
            if "tasks" in methods:
                raise UsageError(
                    f"--by {name}: --scores has scores of tasks only; use tasks, or tasks.NAME of a column."
                )
            raise UsageError(f"--by {name}: {method} is not measured; add it to --method ({', '.join(methods)}).")
        known = _STATISTICS[method]
        if statistic and method in ("swa", "retrieval", "mixer") and statistic not in known:
            raise UsageError(f"--by {name}: {method} has the statistics {', '.join(known)}.")
        changes = [*map(str, windows), *(["mixer"] if method == "retrieval" and "mixer" in methods else [])]
        if at and method not in ("swa", "retrieval"):
            raise UsageError(f"--by {name}: {method} is not measured at windows.")
        if at and window not in changes:
            raise UsageError(f"--by {name}: {window!r} is none of the windows ({', '.join(changes)}).")
        if method == "hankel" and statistic:
            check_hankel_score(statistic)
        first = str(windows[0]) if windows and method in ("swa", "retrieval") else None
        return NamedScore(method, statistic or known[0], window or first)

    def read(self, layer: dict[str, Any]) -> float:
        """The score in a layer's results: more is lost where it is higher. UsageError for a name unknown there."""
        falls = self.statistic == "accuracy" or (self.method == "tasks" and self.statistic != "loss")
        return -self.value(layer) if falls else self.value(layer)

    def value(self, layer: dict[str, Any]) -> float:
        """The number as it was measured: of an accuracy or a task, a higher one is better."""
        if self.method == "hankel":
            return hankel_score(layer["hankel"], self.statistic)
        found = layer[self.method] if self.window is None else layer[self.method][self.window]
        if self.statistic not in found:
            raise UsageError(f"There is no score {self.statistic!r} among {', '.join(found)}.")
        value: float = found[self.statistic]
        return value


def parse_scores(by: str, windows: Sequence[int], methods: Sequence[str]) -> list[NamedScore]:
    """The scores that 'swa+hankel' combines, or the only one; see NamedScore.parse."""
    names = [name.strip() for name in by.split("+")]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--by {by} names {twice} twice; name it once.")
    return [NamedScore.parse(name, windows, methods) for name in names]


def layer_scores(scores: Sequence[NamedScore], layers: Sequence[dict[str, Any]]) -> list[float]:
    """One number per layer: the score, or of several the mean of the layer's ranks, since their units differ."""
    columns = [[score.read(layer) for layer in layers] for score in scores]
    return columns[0] if len(columns) == 1 else mean_ranks(columns)


def main_scores(windows: Sequence[int], methods: Sequence[str]) -> dict[str, NamedScore]:
    """Title -> score: what a person sees of each method, the method's own score first."""
    names: dict[str, str] = {}
    for method in methods:
        if method == "swa":
            names |= {f"KL @{window}": f"swa@{window}" for window in windows}
            names[f"loss @{windows[0]}"] = "swa.loss"
        elif method == "retrieval":
            names |= {f"answer loss @{window}": f"retrieval@{window}" for window in windows}
            names[f"accuracy @{windows[0]}"] = "retrieval.accuracy"
        else:
            names[method] = method
    return {title: NamedScore.parse(name, windows, methods) for title, name in names.items()}
