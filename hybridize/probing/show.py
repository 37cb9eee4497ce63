"""What a probe found, for a person: a bar and the main numbers of each layer, the selection, and what it buys."""

from __future__ import annotations

from math import floor, log10
from typing import Any

from hybridize.console import Console, bar, size
from hybridize.hybrid.plan import TOKENS
from hybridize.probing.named import NamedScore, main_scores, parse_scores
from hybridize.probing.report import ProbeReport


def show_report(console: Console, report: ProbeReport) -> None:
    """Print the layers' scores, the model's own numbers, the selected layers, and the caches' sizes."""
    console.table(*_layers(report))
    selected = report.to_dict()["selected"]
    layers, uniform = selected["layers"], selected["uniform"]
    console.report(
        {
            **_base(report),
            "selected by": report.by if report.order is None else f"{report.by}, one layer after another",
            "converted layers": f"{len(layers)} of {report.num_layers}: {', '.join(map(str, layers))}",
            "pattern": selected["pattern"],
            "sum of their scores": f"{selected['score']:.4g}; of evenly spaced layers {uniform['score']:.4g} "
            "(a rough guide: layers interact)",
            **_state(report.buys),
        }
    )
    if report.buys is not None:
        _show_caches(console, report.buys)


def _layers(report: ProbeReport) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of layers; a number that is the score itself is not shown again."""
    used = parse_scores(report.by, report.windows, report.methods)
    others = main_scores(report.windows, report.methods)
    title = next((title for title, score in others.items() if [score] == used), report.by)
    others.pop(title, None)
    scores = [layer["score"] for layer in report.layers]
    kinds = report.select().kinds
    columns = [
        [str(layer["layer"]).rjust(len(str(report.num_layers - 1))) for layer in report.layers],
        [bar(share) for share in shares(scores)],
        _aligned(scores),
        *(_column(score, report) for score in others.values()),
        [_fate(kind, number in report.keep) for number, kind in enumerate(kinds)],
    ]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return ["layer", "", f"score: {title}", *others, "becomes"], rows


def shares(scores: list[float]) -> list[float]:
    """Lengths of the scores' bars, the largest 1; they begin at zero, or at the lowest score if that is below."""
    start = min(0.0, *scores)
    span = max(*scores, start) - start
    return [(score - start) / span if span else 0.0 for score in scores]


def _column(score: NamedScore, report: ProbeReport) -> list[str]:
    return _aligned([score.value(layer) for layer in report.layers], signed=score.statistic == "loss")


def _aligned(values: list[float], signed: bool = False) -> list[str]:
    """The numbers with equally many digits behind the point, four significant ones for the largest."""
    largest = max(map(abs, values))
    digits = min(6, max(0, 3 - floor(log10(largest)))) if largest else 1
    texts = [f"{value:{'+' if signed else ''}.{digits}f}" for value in values]
    return [text.rjust(max(map(len, texts))) for text in texts]


def _fate(kind: str | None, kept: bool) -> str:
    return TOKENS[kind] if kind else "attention (kept)" if kept else "attention"


def _base(report: ProbeReport) -> dict[str, str]:
    """The unchanged model's loss by group of text, and its accuracy by retrieval task."""
    tasks = {task for effects in report.layers[0].get("retrieval", {}).values() for task in effects["tasks"]}
    losses = [f"{group} {found['loss']:.3f}" for group, found in report.base.items() if group not in tasks]
    right = [f"{task} {found['accuracy']:.0%}" for task, found in report.base.items() if task in tasks]
    return {
        **({"loss of the model": f"{', '.join(losses)} nats per token"} if losses else {}),
        **({"its retrieval": ", ".join(right)} if right else {}),
    }


def _state(buys: dict[str, Any] | None) -> dict[str, str]:
    if buys is None:
        return {}
    return {
        "state per sequence": size(buys["state_bytes_per_sequence"]),
        "cache smaller from": f"{buys['smaller_from_tokens']:,} tokens",
    }


def _show_caches(console: Console, buys: dict[str, Any]) -> None:
    """What a sequence takes in the source and in the hybrid, at several lengths."""
    rows = [
        [
            f"{at['tokens'] // 1024}K",
            size(at["source_bytes"]),
            size(at["hybrid_bytes"]),
            f"{at['hybrid_bytes'] / at['source_bytes']:.0%}",
        ]
        for at in buys["contexts"]
    ]
    console.table(["tokens", f"cache of the source ({buys['dtype']})", "cache and state of the hybrid", "share"], rows)
