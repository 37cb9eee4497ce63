"""What a hybrid is worth: mixers, ratios, budgets and recipes of `hybridize prime`, each under the same conditions.

    python examples/05_prime_recipes.py MODEL --data TRAIN --held-out TEXT --output runs   # minutes a run
    python examples/05_prime_recipes.py --small                                            # a random model

`hybridize probe` chooses the layers. Then come runs of `hybridize prime`, several at a time; a run that is finished is
not repeated. Every run trains on the same text in the same order, and is compared with the source, and with the source
trained on the tokens of the adapt stage. The tables are of all runs that are finished, also after --minutes or Ctrl-C.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hybridize.builtin import open_model
from hybridize.priming.options import choose_layers
from hybridize.probing.options import state_window
from hybridize.workspace import Workspace

GROUPS = ("mixers", "ratios", "seeds", "tokens", "ablations")
FULL = "align,distill,adapt"
Cell = tuple[str, list[str]]


def cells(count: int, selections: list[list[int]], window: int, tokens: int) -> dict[str, list[Cell]]:
    """The runs by group, as names and arguments of prime; `selections` are the probe's layers for every number."""

    def plan(layer: str, ratio: float = 0.5) -> list[str]:
        chosen = selections[max(1, math.floor(ratio * count + 0.5)) - 1]
        return ["--layer", layer, "--layers", ",".join(map(str, chosen))]

    def run(*more: str, layer: str = "gka", ratio: float = 0.5, stages: str = f"init,{FULL}", share: float = 1) -> Any:
        return [*plan(layer, ratio), "--stages", stages, "--tokens", str(int(tokens * share)), *more]

    kinds = {
        "gka": run("--baseline"),
        "gdn": run(layer="gdn"),
        "mamba2": run(layer="mamba2"),
        "swa x1": run("--set", f"window={window}", layer="swa"),
        "swa x2": run("--set", f"window={2 * window}", layer="swa"),
        "swa x4": run("--set", f"window={4 * window}", layer="swa"),
    }
    short: Any = {"items": ["--items", "0", "--prompts", "0"], "share": 0.25}
    quick, part = short["items"], short["share"]
    uniform, _ = choose_layers(count, 0.5, None, None, "gka")
    others = sorted(set(range(count)) - set(selections[count // 2 - 1])) or [0]
    ablations = {
        "full": run(*quick, "--baseline", share=part),
        "no distill": run(*quick, stages="init,align,adapt", share=part),
        "no align": run(*quick, stages="init,distill,adapt", share=part),
        "adapt alone": run(*quick, stages="init,adapt", share=part),
        "no adapt": run(*quick, stages="init,align,distill", share=part),
        "align alone": run(*quick, stages="init,align", share=part),
        "adapt with KL": run(*quick, "--kl", "1", share=part),
        "no closed form": run(*quick, "--no-solve", share=part),
        "gate of the reference": run(*quick, "--gate", "blend", share=part),
        "no rotary": run(*quick, "--set", "rope=false", share=part),
        "even layers": _with_layers(run(*quick, share=part), uniform.layers),
        "the probe's worst": _with_layers(run(*quick, share=part), others),
        "adapt lr / 3": run(*quick, "--adapt-lr", "1e-4", share=part),
        "adapt lr x 3": run(*quick, "--adapt-lr", "1e-3", share=part),
        "distill lr / 3": run(*quick, "--distill-lr", "3e-4", share=part),
        "distill lr x 3": run(*quick, "--distill-lr", "3e-3", share=part),
        "adapt mixers": run(*quick, "--train", "mixers", share=part),
        "adapt mixers+attention": run(*quick, "--train", "mixers+norms+attention", share=part),
    }
    return {
        "mixers": list(kinds.items()),
        "ratios": [(f"gka {r:.0%}", run(ratio=r)) for r in (0.25, 0.75)],
        "seeds": [(f"{kind} seed 1", [*kinds[kind], "--seed", "1"]) for kind in ("gka", "gdn", "mamba2", "swa x1")],
        "tokens": [(f"gka tokens x {s:g}", run(*quick, "--baseline", share=s)) for s in (0.125, 0.5, 2)],
        "ablations": [(f"ablation {name}", given) for name, given in ablations.items()],
    }


def _with_layers(given: list[str], layers: list[int]) -> list[str]:
    at = given.index("--layers") + 1
    return [*given[:at], ",".join(map(str, layers)), *given[at + 1 :]]


class Runs:
    """Runs that are going on, at most `jobs`; each has a folder below `output`, with its report when it is done."""

    def __init__(self, chosen: argparse.Namespace, common: list[str]):
        self.output, self.jobs, self.common, self.keep = chosen.output, chosen.jobs, common, chosen.keep
        self.ends = time.monotonic() + 60 * chosen.minutes
        self.active: dict[str, tuple[Any, Any, float]] = {}
        self.seconds: dict[str, float] = {}

    def report(self, name: str) -> Path:
        return Path(self.output) / "cells" / f"{name.replace(' ', '_').replace('%', '')}.json"

    def start(self, name: str, given: list[str]) -> None:
        report = self.report(name)
        report.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(self.output) / report.stem
        command = [sys.executable, "-m", "hybridize", "prime", *self.common, *given, "--json", "--quiet"]
        command += ["--workspace", str(workspace)]
        if (workspace / "index.json").exists():
            command.append("--resume")
        log = (report.parent / f"{report.stem}.log").open("w")
        self.active[name] = (subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True), log, time.time())

    def collect(self) -> None:
        """Write the reports of runs that have ended; say why one failed."""
        for name, (process, log, began) in list(self.active.items()):
            if process.poll() is None:
                continue
            out = process.communicate()[0]
            log.close()
            del self.active[name]
            if process.returncode:
                print(f"{name} failed: {Path(log.name).read_text().strip()[-300:]}", file=sys.stderr, flush=True)
                continue
            result = {"name": name, "seconds": round(time.time() - began, 1), **json.loads(out)}
            self.report(name).write_text(json.dumps(result))
            print(f"{name}: {result['seconds']} s", file=sys.stderr, flush=True)
            if not self.keep:
                for weights in Path(result["output"]).glob("*.safetensors"):
                    weights.unlink()

    def all(self, wanted: list[Cell]) -> None:
        waiting = [(name, given) for name, given in wanted if not self.report(name).exists()]
        try:
            while (waiting or self.active) and time.monotonic() < self.ends:
                while waiting and len(self.active) < self.jobs:
                    self.start(*waiting.pop(0))
                time.sleep(0.2)
                self.collect()
        finally:
            for process, _, _ in self.active.values():
                process.terminate()
            self.left = [*self.active, *(name for name, _ in waiting)]


def tables(output: Path) -> None:
    """Everything that is finished, beside the source trained on as many tokens where there is such a run."""
    found = [json.loads(path.read_text()) for path in sorted((output / "cells").glob("*.json"))]
    baselines = {_adapted(run): run["losses"]["baseline"]["loss"] for run in found if "baseline" in run["losses"]}
    print("\n| run | converted | tokens | loss | perplexity | above source | so trained | times its ppl |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for run in found:
        losses = run["losses"]
        last = [name for name in losses if name != "baseline"][-1]
        for name in ["baseline"] if "baseline" in losses else []:
            show = losses[name]
            above = show["loss"] - losses["source"]["loss"]
            title = f"source, trained as {run['name']}"
            print(
                f"| {title} | 0 | {_adapted(run)} | {show['loss']:.4f} | {show['perplexity']:.2f} | {above:+.4f} | | |"
            )
        loss, source = losses[last]["loss"], losses["source"]["loss"]
        base = baselines.get(_adapted(run))
        beside = f"{loss - base:+.4f} | {math.exp(loss - base):.3f}" if base is not None else " | "
        print(
            f"| {run['name']} | {len(run['converted'])} | {run['train_tokens']} | {loss:.4f} | "
            f"{losses[last]['perplexity']:.2f} | {loss - source:+.4f} | {beside} |"
        )
    print("\n| run | of | retrieval: right (log-probability a token) | texts without repetition, likely, both |")
    print("| --- | --- | --- | --- |")
    for run in found:
        answers, written = run.get("retrieval", {}), run.get("generation", {}).get("models", {})
        for name in answers or written:
            told = ", ".join(
                f"{task} {x['accuracy']:.0%} ({x['log_probability']:.2f})" for task, x in answers.get(name, {}).items()
            )
            texts = written.get(name, {})
            wrote = "; ".join(
                f"{mode} {x['not_repetitive']}, {x['likely']}, {x['good']} of {x['texts']}" for mode, x in texts.items()
            )
            print(f"| {run['name']} | {name} | {told} | {wrote} |")


def _adapted(run: dict[str, Any]) -> int:
    stages = [name for name in FULL.split(",") if name in run["stages"]]
    return int(run["tokens"] * 2 / sum(1 if name == "align" else 2 for name in stages)) if "adapt" in stages else 0


def small(folder: Path) -> list[str]:
    """A random model and made-up text: arguments that try two runs on them."""
    import runpy

    made = runpy.run_path(str(Path(__file__).with_name("03_layer_selection.py")))["small"](folder)
    given = [str(made.model), "--data", str(made.data), "--held-out", str(made.held_out), "--output", str(folder / "o")]
    given += ["--context", "32", "--batch-size", "2", "--tokens", "640", "--held-out-tokens", "64", "--probe-rows", "1"]
    return [*given, "--jobs", "2", "--only", "gka,mamba2", "--device", "cpu", "--items", "0", "--prompts", "1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data", help="what prime reads")
    parser.add_argument("--held-out", help="what losses are measured on")
    parser.add_argument("--output", type=Path, help="a folder for runs and reports")
    parser.add_argument("--probe-data", help="text that the layers are chosen on; default: --data")
    parser.add_argument("--probe-rows", default="8")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="of a run; of most ablations a quarter")
    parser.add_argument("--context", default="2048")
    parser.add_argument("--batch-size", default="8")
    parser.add_argument("--held-out-tokens", default="172032")
    parser.add_argument("--items", default="10")
    parser.add_argument("--prompts", default="20")
    parser.add_argument("--groups", default=",".join(GROUPS), help="which, in this order")
    parser.add_argument("--only", help="runs by name, of these groups")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="to start and wait for runs")
    parser.add_argument("--keep", action="store_true", help="keep the hybrids' weights")
    parser.add_argument("--device")
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    if chosen.small:
        with tempfile.TemporaryDirectory() as folder:
            measure(parser.parse_args(small(Path(folder))))
    elif chosen.model and chosen.data and chosen.held_out and chosen.output:
        measure(chosen)
    else:
        parser.error("give MODEL, --data, --held-out and --output, or --small")


def measure(chosen: argparse.Namespace) -> None:
    """Probe, run and show."""
    chosen.output.mkdir(parents=True, exist_ok=True)
    place = Workspace(chosen.output / "probe")
    device = ["--device", chosen.device] if chosen.device else []
    if place.last("probe") is None:
        command = [sys.executable, "-m", "hybridize", "probe", chosen.model, "--data", chosen.probe_data or chosen.data]
        command += ["--sequences", chosen.probe_rows, "--context", str(min(1024, int(chosen.context))), "--ratio", "1"]
        command += ["--workspace", str(place.folder), "--json", "--quiet", *device]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
    found: Any = place.last("probe")
    probed = json.loads(Path(found["value"]).read_text())
    config = open_model(chosen.model, None, lambda text: None).config
    groups = cells(config.num_hidden_layers, probed["selections"], state_window(config), chosen.tokens)
    wanted = [cell for group in chosen.groups.split(",") for cell in groups[group]]
    if chosen.only:
        wanted = [cell for cell in wanted if cell[0] in chosen.only.split(",")]
    common = [chosen.model, "--data", chosen.data, "--held-out", chosen.held_out, "--context", chosen.context]
    common += ["--batch-size", chosen.batch_size, "--held-out-tokens", chosen.held_out_tokens, *device]
    common += ["--items", chosen.items, "--prompts", chosen.prompts]
    runs = Runs(chosen, common)
    try:
        runs.all(wanted)
    except KeyboardInterrupt:
        print("Stopped; the same command goes on.", file=sys.stderr)
    if runs.left:
        print(f"Not finished: {', '.join(runs.left)}.", file=sys.stderr)
    tables(chosen.output)


if __name__ == "__main__":
    main()
