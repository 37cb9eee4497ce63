"""Which layers to convert: what scores say of a layer, what it is worth, and how the hybrids they select turn out.

    python examples/03_layer_selection.py MODEL --data TEXT --held-out TEXT   # minutes on a large GPU
    python examples/03_layer_selection.py --small                             # a random model, to see that it runs

All layers get a mixer, fitted and then aligned on the model's own hidden states, so that one alignment serves every
selection. A layer's worth is the loss on held-out text when it alone is replaced. Each selection's hybrid is refitted
on its own stream, as `hybridize prime` does, and measured on the held-out text and on retrieval.
"""

import argparse
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hybridize
from hybridize.console import Console
from hybridize.devices import pick_device
from hybridize.hybrid.model import mixers
from hybridize.hybrid.plan import LayerPlan
from hybridize.priming.transfer import StartOptions, fit_start
from hybridize.probing.fitted import align_mixers, fitted_hybrid, in_place
from hybridize.probing.hankel import HankelOptions, hankel_score, hankel_sweep
from hybridize.probing.joint import greedy
from hybridize.probing.options import state_window
from hybridize.probing.select import evenly_spaced, lowest, mean_ranks
from hybridize.probing.swa_proxy import Change, Sweep, windows
from hybridize.probing.windowed import without_masks
from hybridize.tasks.perplexity import mean_loss
from hybridize.tasks.retrieval import make_items, measure, summary
from hybridize.tasks.scored import score_answers, score_text
from hybridize.tasks.text import first_rows, read_documents

RATIOS = (0.25, 0.5, 0.75)
Scores = dict[str, list[float]]


def small(folder: Path) -> argparse.Namespace:
    """Save a random model and made-up text, and return the arguments that try everything on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = [f"w{n}" for n in range(96)] + ["<unk>"]
    words_only = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words_only, unk_token="<unk>").save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    # Weights as large as trained ones, so that attention is no plain mean and its layers differ.
    config = LlamaConfig(vocab_size=97, num_hidden_layers=4, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for name in ("train", "held"):
        (folder / f"{name}.txt").write_text(" ".join(random.Random(name).choices(words, k=3000)))
    return argparse.Namespace(
        model=folder / "model", data=folder / "train.txt", held_out=folder / "held.txt", layer="gka", context=64,
        tokens=512, rows=2, held_rows=2, items=0, lr=4e-3, device="cpu", output=None, joint=True,
    )  # fmt: skip


def read_rows(path: Path, tokenizer: Any, context: int, count: int) -> Tensor:
    """The first rows [count, context] of a file's or folder's documents."""
    return first_rows(read_documents(path), tokenizer, context, count)


def aligned(model: Any, kind: str, rows: Tensor, lr: float, console: Console) -> dict[int, Any]:
    """Mixers for all layers, fitted and aligned on rows [N, T]."""
    hybrid = fitted_hybrid(model, kind, rows[: max(1, 65_536 // rows.shape[1])], 4096)
    with console.progress("Align all layers", rows.numel(), "token") as tracker:
        align_mixers(model, hybrid, rows, tracker.advance, lr)
    return mixers(hybrid)


def spearman(scores: Scores) -> list[list[float]]:
    """Rank correlations of all scores with each other."""
    found: list[list[float]] = torch.corrcoef(torch.tensor([mean_ranks([x]) for x in scores.values()])).tolist()
    return found


def one_layer(sweep: Sweep, changes: dict[str, Change], statistic: str = "kl") -> Scores:
    """What each change of each layer alone costs."""
    found: Scores = {name: [] for name in changes}
    for _, by_change in sweep.run(changes):
        for name, effects in by_change.items():
            found[name].append(sum(effect[statistic] for effect in effects.values()) / len(effects))
    return found


def backwards(sweep: Sweep, model: Any, change: Change, count: int) -> list[int]:
    """Layers in the order in which they are best given their attention back, from all of them changed."""
    own = {number: layer.self_attn for number, layer in enumerate(model.base_model.layers)}
    order: list[int] = []
    while len(own) - len(order) > count:
        with ExitStack() as stack:
            for layer in own:
                if layer not in order:
                    stack.enter_context(change(layer))
            losses = {
                layer: sum(effect["kl"] for effect in effects[""].values())
                for layer, effects in sweep.run({"": in_place(model, own)}, skip=order)
            }
        order.append(min(losses, key=losses.__getitem__))
    return order


def by_scores(
    scores: Scores, pairs: Sequence[tuple[str, str]], counts: Sequence[int]
) -> dict[str, dict[int, list[int]]]:
    """Layers by score and count, the lowest, of pairs too; to compare, the highest, evenly spaced and random ones."""
    layers = len(next(iter(scores.values())))
    found = {name: {count: lowest(values, count, ()) for count in counts} for name, values in scores.items()}
    found["uniform"] = {count: evenly_spaced(layers, count, ()) for count in counts}
    for name, values in scores.items():
        worst = [-x for x in values]
        found[f"reverse {name}"] = {count: lowest(worst, count, ()) for count in counts}
    for seed in range(2):
        draw = random.Random(seed)
        found[f"random {seed}"] = {count: sorted(draw.sample(range(layers), count)) for count in counts}
    for pair in pairs:
        ranks = mean_ranks([scores[name] for name in pair])
        found["+".join(pair)] = {count: lowest(ranks, count, ()) for count in counts}
    return found


def together(
    sweep: Sweep, model: Any, changes: dict[str, Change], counts: Sequence[int], console: Console
) -> dict[str, dict[int, list[int]]]:
    """Layers by method and count, one chosen after another with the others as they are by then."""
    layers = model.config.num_hidden_layers
    found = {}
    with console.progress("Choose together", 2 * len(changes), "order") as tracker:
        for name, change in changes.items():
            order = greedy(sweep, change, "kl", max(counts), ())
            found[f"greedy {name}"] = {count: sorted(order[:count]) for count in counts}
            tracker.advance(1, name)
            order = backwards(sweep, model, change, min(counts))
            left = {count: set(range(layers)) - set(order[: layers - count]) for count in counts}
            found[f"backwards {name}"] = {count: sorted(left[count]) for count in counts}
            tracker.advance(1, name)
    return found


def hybrid_of(model: Any, kind: str, layers: list[int], trained: dict[int, Any], rows: Tensor, batch: int) -> Any:
    """A hybrid with the aligned mixers of these layers, refitted on its own stream."""
    hybrid = hybridize.convert(model, LayerPlan.from_layers(model.config.num_hidden_layers, layers, kind), share=True)
    for layer, mixer in mixers(hybrid).items():
        mixer.load_state_dict(trained[layer].state_dict())
    fit_start(model, hybrid, list(rows.split(batch)), StartOptions(calibrate=False, follow=True))
    return hybrid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--layer", default="gka")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=200_704, help="to align on")
    parser.add_argument("--rows", type=int, default=8, help="of text that scores and joint selection are measured on")
    parser.add_argument("--held-rows", type=int, default=48)
    parser.add_argument("--items", type=int, default=10, help="of retrieval for each task, length and depth; 0: none")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, help="a JSON file with everything")
    parser.add_argument(
        "--no-joint", dest="joint", action="store_false", help="choose no layers together: minutes less"
    )
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    if chosen.small:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            run(small(Path(folder)))
    elif chosen.model and chosen.data and chosen.held_out:
        run(chosen)
    else:
        parser.error("give MODEL, --data and --held-out, or --small")


def run(chosen: argparse.Namespace) -> None:
    """Measure, and print the tables as soon as there is something in them."""
    console = Console()
    device = pick_device(chosen.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    model, tokenizer = hybridize.load(chosen.model, dtype=torch.float32, device=device)
    model.eval()
    batch = max(1, min(4096, chosen.tokens) // chosen.context)
    train = max(batch, chosen.tokens // chosen.context)
    rows = read_rows(chosen.data, tokenizer, chosen.context, train + 2 * chosen.rows)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    search, fit, rows = rows[: chosen.rows], rows[chosen.rows : 2 * chosen.rows].to(device), rows[2 * chosen.rows :]
    held = read_rows(chosen.held_out, tokenizer, chosen.context, chosen.held_rows)

    trained = aligned(model, chosen.layer, rows, chosen.lr, console)
    reach = min(state_window(model.config), chosen.context // 4)
    changes = {
        **windows(model, [reach]),
        "fitted": in_place(model, mixers(fitted_hybrid(model, chosen.layer, fit, 4 * chosen.context))),
        "aligned": in_place(model, trained),
    }
    near = windows(model, [min(64, chosen.context // 8)])
    with torch.no_grad():
        sweep = Sweep(model, score_text(search, "text", 16_384))
        scores = one_layer(sweep, near | changes)
        with without_masks(model.base_model):
            ranks = hankel_sweep(model, search[:2, : min(1024, chosen.context)], HankelOptions())
        if chosen.items:
            texts = [text for _, text in read_documents(chosen.data)]
            asked = make_items(tokenizer, texts, lengths=(512, 1024), per_cell=chosen.items, seed=1)
            finds = Sweep(model, score_answers(asked, 16_384))
            scores["retrieval"] = one_layer(finds, {"": changes[str(reach)]}, "loss")[""]
        scores["hankel"] = [hankel_score(ranks[layer]) for layer in range(len(ranks))]
        full = score_text(held, "held out", 16_384, per_row=chosen.context)
        scores["worth"] = one_layer(Sweep(model, full), {"worth": changes["aligned"]}, "loss")["worth"]
        names = list(scores)
        print("\n| layer | " + " | ".join(names) + " |\n| ---: |" + " ---: |" * len(names))
        for layer, values in enumerate(zip(*scores.values(), strict=True)):
            print(f"| {layer} | " + " | ".join(f"{x:.4f}" for x in values) + " |", flush=True)
        print("\n| rank correlation | " + " | ".join(names) + " |\n| --- |" + " ---: |" * len(names))
        for name, row in zip(names, spearman(scores), strict=True):
            print(f"| {name} | " + " | ".join(f"{x:.2f}" for x in row) + " |", flush=True)
        layers = model.config.num_hidden_layers
        counts = [max(1, round(ratio * layers)) for ratio in RATIOS]
        found = by_scores(scores, [("hankel", "fitted"), ("hankel", str(reach))], counts)
        if chosen.joint:
            found |= together(sweep, model, changes, counts, console)
        items = []
        if chosen.items:
            texts = [text for _, text in read_documents(chosen.held_out)]
            items = make_items(tokenizer, texts, lengths=(256, 512, 1024), per_cell=chosen.items)

        def retrieval(candidate: Any) -> dict[str, Any]:
            return summary(items, *measure(candidate, items, 32_768)) if items else {}

        base, told = mean_loss(model, held, 8), retrieval(model)
        results: dict[str, Any] = {"source": {"loss": base, "retrieval": told}}
        print("\nLoss of the source " + f"{base:.4f}; loss above it, and retrieval of the middle one:\n")
        print("| selected by | " + " | ".join(f"{count} of {layers}" for count in counts) + " | retrieval |")
        print("| --- |" + " ---: |" * len(counts) + " --- |")
        print("| source |" + " 0 |" * len(counts) + f" {accuracies(told)} |", flush=True)
        for name, by_count in found.items():
            gaps, answers = {}, {}
            for number, (count, some) in enumerate(by_count.items()):
                hybrid = hybrid_of(model, chosen.layer, some, trained, fit, batch)
                gaps[count] = mean_loss(hybrid, held, 8) - base
                answers = retrieval(hybrid) if number == len(counts) // 2 else answers
            results[name] = {"gaps": gaps, "layers": by_count, "retrieval": answers}
            print(
                f"| {name} | " + " | ".join(f"{x:.4f}" for x in gaps.values()) + f" | {accuracies(answers)} |",
                flush=True,
            )
            if chosen.output:
                chosen.output.write_text(json.dumps({"scores": scores, "results": results}))


def accuracies(told: dict[str, Any]) -> str:
    return ", ".join(f"{task} {found['accuracy']:.0%}" for task, found in told.items())


if __name__ == "__main__":
    main()
