"""What decides a probe: checked, completed with defaults, and kept so that a resumed probe is the same probe."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridize.builtin import BUILTIN, model_name
from hybridize.errors import CheckpointError, UsageError
from hybridize.hybrid.plan import check_kind
from hybridize.mixers.base import geometry
from hybridize.probing.fitted import ALIGN_TOKENS
from hybridize.probing.named import parse_scores
from hybridize.probing.select import share_of
from hybridize.probing.windowed import SINKS
from hybridize.sources import Source

SHORTEST_ITEM = 128  # tokens of a retrieval item: the question alone takes about 100
MIXER = "mixer"
METHODS = ("hankel", "swa", "retrieval", MIXER)  # the first of those measured gives the scores
SELECTIONS = ("lowest", "greedy")
# Singular values of one layer and row take 3 s of a CPU core at 1024 tokens, and several times as long at 2048.
CONTEXT, HANKEL_CONTEXT = 2048, 1024
RUN_FILE, LAYERS_FILE, REPORT_FILE = "run.json", "layers.jsonl", "probe.json"


@dataclass(frozen=True)
class ProbeOptions:
    """Everything that decides a probe's result; kept in its run.json.

    windows: of the SWA proxy and of retrieval, the first one gives the scores; sequences: rows of text; items: of
    retrieval, for each task, length and depth; align: tokens that mixers are trained on once they are fitted; by: the
    score that selects; keep: layers that stay attention; select: the lowest scores, or greedy, one layer after another
    with those before it changed.
    """

    model: str
    revision: str | None
    methods: tuple[str, ...]
    windows: tuple[int, ...]
    sinks: int
    context: int
    sequences: int
    items: int
    align: int
    data: str
    ratio: float
    keep: tuple[int, ...]
    by: str
    select: str
    layer: str
    seed: int
    dtype: str | None

    @staticmethod
    def read(path: Path) -> ProbeOptions:
        """Options from a run.json; CheckpointError when the file is damaged."""
        try:
            raw = json.loads(path.read_text("utf-8"))["options"]
            return ProbeOptions(**{**raw, **{name: tuple(raw[name]) for name in ("methods", "windows", "keep")}})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); start the probe without --resume.") from None

    @property
    def reads_text(self) -> bool:
        """Whether rows of text are measured on, and not retrieval items alone."""
        return bool({"swa", "hankel", MIXER} & set(self.methods))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the retrieval items: a quarter, a half and the whole of the context, and enough for a question."""
        least = min(self.context, SHORTEST_ITEM)
        return tuple(sorted({max(least, self.context // share) for share in (4, 2, 1)}))


def state_window(config: Any) -> int:
    """The window whose keys and values, in bf16, take as many bytes as the state of a GKA layer, in fp32.

    Per query head the state is two D x D matrices, per token the cache has 2 D numbers for each key head: 2 D H / Hk
    tokens, 384 for SmolLM2-135M and 1024 for Qwen3-8B. So the proxy asks what is lost at equal memory.
    """
    heads, kv_heads, dim = geometry(config)
    return 2 * dim * heads // kv_heads


def make_options(
    config: Any,
    name: str,
    *,
    revision: str | None = None,
    methods: Sequence[str] | None = None,
    windows: Sequence[int] | None = None,
    sinks: int = SINKS,
    context: int | None = None,
    sequences: int = 8,
    items: int = 20,
    align: int | None = None,
    data: str | os.PathLike[str] = BUILTIN,
    ratio: float | None = None,
    count: int | None = None,
    keep: Sequence[int] = (),
    by: str | None = None,
    select: str = "lowest",
    layer: str = "gka",
    seed: int = 0,
    dtype: str | None = None,
) -> ProbeOptions:
    """Options with defaults filled in; UsageError or PlanError for what cannot be."""
    if methods is None:  # the best score of one pass, and what does best of all where layers are chosen together
        methods = ("hankel",) if select == "lowest" else (MIXER,)
    if unknown := [method for method in methods if method not in METHODS]:
        raise UsageError(f"There is no method {unknown[0]!r}; the methods are {', '.join(METHODS)}.")
    if not methods:
        raise UsageError(f"--method names no method; give some of {', '.join(METHODS)}.")
    longest = getattr(config, "max_position_embeddings", None)
    if context is None:
        context = HANKEL_CONTEXT if set(methods) == {"hankel"} else CONTEXT
        context = min(context, longest or context)
    for option, value, least in (
        ("context", context, 16),
        ("sequences", sequences, 1),
        ("items", items, 1),
        ("sinks", sinks, 0),
        ("align", align or 0, 0),
    ):
        if value < least:
            raise UsageError(f"--{option} is {value}; it must be at least {least}.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed is {seed}; it must be at least 0 and below 2**63.")
    if align is not None and MIXER not in methods:
        raise UsageError(f"--align {align} trains mixers, and none are measured; leave it out, or add --method mixer.")
    if align is None:
        align = ALIGN_TOKENS if MIXER in methods else 0
    if longest and context > longest:
        raise UsageError(f"--context {context} is more than the {longest} positions that the model was made for.")
    # A window near the context hides too little to measure anything.
    windows = [min(state_window(config), context // 4)] if windows is None else windows
    if not windows or min(windows) < 1 or len(set(windows)) < len(windows):
        raise UsageError(f"--window {','.join(map(str, windows))}: give different sizes of at least 1 token.")
    if min(windows) >= context:
        raise UsageError(f"--window {min(windows)} hides nothing of a context of {context} tokens; give a smaller one.")
    methods = tuple(method for method in METHODS if method in methods)
    by = methods[0] if by is None else by
    scores = parse_scores(by, windows, methods)
    check_kind(layer)
    if select not in SELECTIONS:
        raise UsageError(f"There is no selection {select!r}; use {' or '.join(SELECTIONS)}.")
    if select == "greedy" and (len(scores) > 1 or scores[0].method not in ("swa", MIXER)):
        raise UsageError(f"--select greedy changes layers together, by swa or by {MIXER}; --by {by} cannot.")
    return ProbeOptions(
        model=name,
        revision=revision,
        methods=methods,
        windows=tuple(windows),
        sinks=sinks,
        context=context,
        sequences=sequences,
        items=items,
        align=align,
        data=BUILTIN if data == BUILTIN else str(Path(data).expanduser().absolute()),
        ratio=share_of(config.num_hidden_layers, ratio, count, keep),
        keep=tuple(sorted(keep)),
        by=by,
        select=select,
        layer=layer,
        seed=seed,
        dtype=dtype,
    )


def name_of(source: Source) -> tuple[str, str | None]:
    """The name and revision under which a probe keeps its source."""
    return model_name(source), source.revision if source.repository else None
