"""Scores by name: which number of a layer's results says how much is lost without its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridize.errors import UsageError
from hybridize.probing.hankel import DEFAULT_SCORE, hankel_score

# method -> its statistics, the default first; those of hankel and of tasks depend on what was measured
_STATISTICS = {
    "swa": ("kl", "loss"),
    "retrieval": ("loss", "kl", "accuracy"),
    "hankel": (DEFAULT_SCORE,),
    "tasks": ("loss",),
}


@dataclass(frozen=True)
class NamedScore:
    """METHOD[.STATISTIC][@WINDOW]: 'swa' is the KL at the first window, 'swa.loss@64' the loss at another.

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
        if method not in _STATISTICS:
            raise UsageError(f"There is no score {name!r}; use one of {', '.join(_STATISTICS)}.")
        if method not in methods:
            raise UsageError(f"--by {name}: {method} is not measured; add it to --method ({', '.join(methods)}).")
        known = _STATISTICS[method]
        if statistic and method in ("swa", "retrieval") and statistic not in known:
            raise UsageError(f"--by {name}: {method} has the statistics {', '.join(known)}.")
        if at and window not in map(str, windows):
            raise UsageError(f"--by {name}: {window} is none of the windows ({', '.join(map(str, windows))}).")
        first = str(windows[0]) if windows and method in ("swa", "retrieval") else None
        return NamedScore(method, statistic or known[0], window or first)

    def read(self, layer: dict[str, Any]) -> float:
        """The score in a layer's results: more is lost where it is higher. UsageError for a name unknown there."""
        if self.method == "hankel":
            return hankel_score(layer["hankel"], self.statistic)
        found = layer[self.method] if self.window is None else layer[self.method][self.window]
        if self.statistic not in found:
            raise UsageError(f"There is no score {self.statistic!r} among {', '.join(found)}.")
        falls = self.statistic == "accuracy" or (self.method == "tasks" and self.statistic != "loss")
        value: float = found[self.statistic]
        return -value if falls else value
