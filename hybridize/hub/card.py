"""Writes a hybrid's model card from its config and from what was measured; a number that is not known is not given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridize.console import show, size
from hybridize.hub.metadata import make_metadata
from hybridize.hub.origin import Origin
from hybridize.hybrid.plan import ATTENTION, TOKENS, LayerPlan

MARK = "<!-- Written by hybridize push, which writes it anew each time; without this line, it is left as it is. -->"
_NAMES = {
    "gka": "Gated KalmaNet",
    "gdn": "Gated DeltaNet",
    "mamba2": "Mamba-2",
    "swa": "sliding-window attention",
}
_STEPS = {"source": "source", "converted": "converted, not trained", "baseline": "source, trained on the same tokens"}


def write_card(
    repository: str,
    config: dict[str, Any],
    report: dict[str, Any],
    origin: Origin,
    scores: Sequence[float] | None = None,
    chat: bool = False,
    notices: Sequence[str] = (),
) -> str:
    """The card of a hybrid as Markdown. `report` is prime's, and may be empty; `scores` are a probe's, by layer;
    `notices` are the licence files beside it."""
    plan = LayerPlan.from_pattern(config["hybrid"]["pattern"])
    metadata = make_metadata(plan, origin, report.get("data", []), chat)
    parts = [
        f"---\n{metadata}\n---\n{MARK}",
        f"# {repository.rpartition('/')[2]}",
        _introduction(plan, origin),
        _layers(plan, scores),
        _recipe(config, report, origin),
        _measured(report),
        _loading(repository, "auto_map" in config, chat),
        _limits(plan, config, report),
        _licence(origin, notices),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(plan: LayerPlan, origin: Origin) -> str:
    kinds = " and ".join(_NAMES[kind] for kind in dict.fromkeys(kind for kind in plan.kinds if kind))
    return (
        f"A hybrid of attention and layers with a memory of fixed size, made from {_named(origin)}: "
        f"{len(plan.layers)} of its {len(plan.kinds)} attention layers became {kinds}. The tokenizer and the "
        "generation settings are the source's."
    )


def _named(origin: Origin) -> str:
    if origin.repository is None:
        return f"a local model, {origin.name}"
    at = f" (commit `{origin.revision}`)" if origin.revision else ""
    return f"[{origin.repository}](https://huggingface.co/{origin.repository}){at}"


def _layers(plan: LayerPlan, scores: Sequence[float] | None) -> str:
    lines = []
    for layer, kind in enumerate(plan.kinds):
        bar, name = ("████", "attention") if kind is None else ("░░░░", TOKENS[kind])
        score = f"  {scores[layer]:.4g}" if scores is not None else ""
        lines.append(f"{layer:>3}  {bar}  {name:<9}{score}".rstrip())
    told = " The last column is the probe's score: what is lost when that layer fades." if scores is not None else ""
    return (
        f"## Layers\n\nPattern `{plan}` (`{ATTENTION}` is attention).{told}\n\n```text\n" + "\n".join(lines) + "\n```"
    )


def _recipe(config: dict[str, Any], report: dict[str, Any], origin: Origin) -> str:
    if not report:
        return ""
    stages = report.get("stages", [])
    data = [name if not name.startswith(("/", "~")) else Path(name).name for name in report.get("data", [])]
    rows: dict[str, Any] = {
        "source": origin.repository or origin.name,
        "layers chosen": str(report.get("chosen", "")).split(" in ")[0],
        "stages": ", ".join(stages) or "none: weights copied",
        "data": ", ".join(data),
        "tokens trained on": report.get("train_tokens"),
        "tokens per row": report.get("context"),
        "rows per step": report.get("batch_size"),
        "seed": report.get("seed"),
        "parameters": report.get("parameters"),
        "  of these new": report.get("new_parameters"),
        "number format": config.get("dtype"),
    }
    for stage in ("align", "distill", "adapt"):
        if stage in stages and (lr := _learning_rate(report.get(stage))) is not None:
            rows[f"learning rate of {stage}"] = lr
    for kind, settings in config["hybrid"].get("mixers", {}).items():
        rows[f"settings of {TOKENS[kind]}"] = show(settings)
    body = [[name, show(value)] for name, value in rows.items() if value not in (None, "")]
    return "## How it was made\n\nWith `hybridize prime`:\n\n" + _table(["", ""], body)


def _learning_rate(options: Any) -> float | None:
    if not isinstance(options, dict):
        return None
    return options.get("lr", (options.get("train") or {}).get("lr"))


def _measured(report: dict[str, Any]) -> str:
    parts = []
    if losses := report.get("losses"):
        rows = [[_step(name), f"{value['loss']:.4f}", f"{value['perplexity']:.2f}"] for name, value in losses.items()]
        count = f" of {report['held_out_tokens']:,} tokens" if report.get("held_out_tokens") else ""
        parts.append(f"On held-out text{count}:\n\n" + _table(["model", "loss", "perplexity"], rows))
    if retrieval := report.get("retrieval"):
        tasks = list(next(iter(retrieval.values())))
        rows = [
            [_step(name), *(f"{found[task]['accuracy']:.0%}" for task in tasks)] for name, found in retrieval.items()
        ]
        parts.append("Right answers in retrieval from context:\n\n" + _table(["model", *tasks], rows))
    if generation := report.get("generation"):
        modes = list(next(iter(generation["models"].values())))
        rows = [
            [_step(name), *(f"{found[mode]['good']} of {found[mode]['texts']}" for mode in modes)]
            for name, found in generation["models"].items()
        ]
        told = (
            f"Texts of {generation['new_tokens']} tokens with no {generation['ngram']}-gram more than "
            f"{generation['repeats_allowed']} times and a perplexity under the source below "
            f"{generation['perplexity_bound']:.1f}:\n\n"
        )
        parts.append(told + _table(["model", *modes], rows))
    if cache := report.get("cache"):
        rows = [
            [
                "keys and values of a token",
                size(cache["source_bytes_per_token"]),
                size(cache["hybrid_bytes_per_token"]),
            ],
            ["state of a sequence", size(0), size(cache["state_bytes_per_sequence"])],
        ]
        smaller = f"\n\nThe hybrid's cache is the smaller one from {cache['smaller_from_tokens']:,} tokens on."
        parts.append("Cache:\n\n" + _table(["", "source", "hybrid"], rows) + smaller)
    return "## Measured\n\n" + "\n\n".join(parts) if parts else ""


def _step(name: str) -> str:
    return _STEPS.get(name, f"after {name}")


def _loading(repository: str, remote_code: bool, chat: bool) -> str:
    ask = (
        'ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True, '
        'return_tensors="pt", return_dict=True)'
        if chat
        else 'ids = tokenizer("Hello", return_tensors="pt")'
    )
    write = f"{ask}\nprint(tokenizer.decode(model.generate(**ids, max_new_tokens=100)[0]))"
    parts = [
        "## Loading it",
        "With `hybridize` installed, no remote code is needed:",
        f'```python\nimport hybridize\n\nmodel, tokenizer = hybridize.load("{repository}")\n{write}\n```',
    ]
    if remote_code:
        parts += [
            "Without it, with the code in this repository, which you should read first:",
            "```python\nfrom transformers import AutoModelForCausalLM\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repository}", trust_remote_code=True)\n```',
        ]
    else:
        parts.append("After `import hybridize`, the Auto classes of transformers load it too.")
    return "\n\n".join(parts)


def _limits(plan: LayerPlan, config: dict[str, Any], report: dict[str, Any]) -> str:
    others = "; attention in the other layers still sees them" if None in plan.kinds else ""
    lines = [
        f"A converted layer keeps a state of fixed size, so that exact details from far back can be lost{others}.",
        "All that the source says about its use, its biases and its dangers holds here too and was not measured again.",
    ]
    if longest := report.get("context"):
        native = config.get("max_position_embeddings")
        beside = f", and the source's config allows {native:,}" if isinstance(native, int) else ""
        lines.append(
            f"Its training and its losses are on rows of {longest:,} tokens{beside}: longer ones are untested."
        )
    if "swa" in plan.kinds:
        lines.append("Layers of sliding-window attention see their window and nothing before it.")
    if not report:
        lines.append("No report of its making came with it, so that nothing measured is given here.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _licence(origin: Origin, notices: Sequence[str]) -> str:
    licence = origin.metadata.get("license_name") or origin.metadata.get("license")
    texts = f" Its text and notices: {', '.join(f'`{name}`' for name in notices)}." if notices else ""
    if not licence:
        told = "The source's card, where this was written, names no licence: look it up before you use this model."
        return f"## Licence\n\n{told}{texts}"
    link = origin.metadata.get("license_link")
    name = f"[{show(licence)}]({link})" if isinstance(link, str) and link.startswith("http") else show(licence)
    made = f"Weights and tokenizer derive from {_named(origin)} and keep its licence: {name}."
    return f"## Licence\n\n{made} They were changed: attention layers were converted with hybridize.{texts}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
