"""`hybridize probe` from the command line to a report that `prime` takes, and everything that can stop it."""

import json
import os
import shutil

import pytest
import torch
from priming_case import save_source
from probing_case import SMALL
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import hybridize
from hybridize.cli import main
from hybridize.errors import UsageError
from hybridize.probing import run as probing_run
from hybridize.probing.swa_proxy import Sweep, windows
from hybridize.sources import Source
from hybridize.tasks.retrieval import TASKS
from hybridize.tasks.scored import score_text
from hybridize.tasks.text import first_rows, read_documents
from hybridize.workspace import Workspace


def lowest(layers, count):
    return sorted(sorted(range(len(layers)), key=lambda n: layers[n]["score"])[:count])


def test_the_default_is_the_hankel_rank_or_a_mixer_where_layers_are_chosen_together(command, place):
    words = ["probe", place / "source", "--context", 64, "--sequences", 6, "--data", place / "text", "--device", "cpu"]
    code, report, err = command(*words)
    assert code == 0, err
    assert (report["methods"], report["selected"]["by"], report["base"]) == (["hankel"], "hankel", {})
    for layer in report["layers"]:
        assert layer["score"] == layer["hankel"]["no_sinks"]["rank"]["mean"]
    assert report["selected"]["layers"] == lowest(report["layers"], 2)
    _, plan, _ = command(*words, "--dry-run")
    assert (plan["tokens"], plan["forward_passes"]) == (2 * 64, 1)  # of two rows
    _, more, _ = command(*words, "--dry-run", "--method", "hankel,swa")
    assert more["tokens"] == 6 * 64 and more["work_bytes"] > plan["work_bytes"]
    _, plan, _ = command(*words, "--dry-run", "--select", "greedy")
    assert (plan["methods"], plan["align"]) == (["mixer"], 200_000)


def test_reports_every_layer_and_selects_the_lowest(probe, place, tmp_path):
    words = ["--window", "8,20", "--ratio", "0.25", "--layer", "gdn"]
    code, report, err = probe("--method", "hankel,swa", "--by", "swa", *words)
    assert code == 0, err
    assert report["model"] == str(place / "source")
    assert (report["context"], report["window"], report["windows"]) == (64, 8, [8, 20])
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2, 3]
    selected = report["selected"]
    assert (selected["ratio"], selected["by"], selected["kind"]) == (0.25, "swa", "gdn")
    assert selected["layers"] == lowest(report["layers"], 1)
    assert hybridize.LayerPlan.from_pattern(selected["pattern"]).layers == selected["layers"]
    model, tokenizer = hybridize.load(place / "source", dtype="float32", device="cpu")
    rows = first_rows(read_documents(place / "text"), tokenizer, 64, 4)
    sweep = Sweep(model, score_text(rows, "prose", 2048))
    assert report["base"] == sweep.base
    for layer, effects in sweep.run(windows(model, [8, 20])):
        found = report["layers"][layer]
        assert found["score"] == found["swa"]["8"]["kl"] == effects["8"]["prose"]["kl"]
        assert found["swa"]["20"]["loss"] == effects["20"]["prose"]["loss"]
        assert found["hankel"]["beyond"]["mass"]["mean"] < found["hankel"]["no_sinks"]["mass"]["mean"]
    path = tmp_path / "runs" / "source-probe" / "probe.json"
    assert report["report"] == str(path)
    kept = json.loads(path.read_text())
    assert kept.pop("selections") == [lowest(report["layers"], count) for count in (1, 2, 3, 4)]
    assert kept == report
    assert [entry["kind"] for entry in Workspace(tmp_path / "runs").entries()] == ["probe-run", "probe"]


def test_sinks_can_be_switched_off(probe):
    _, seen, _ = probe()
    _, unseen, _ = probe("--no-sinks")
    assert (seen["sinks"], unseen["sinks"]) == (4, 0)
    assert seen["layers"] != unseen["layers"]


@pytest.mark.parametrize("by", ["swa.loss", "swa@20", "swa.loss@20", "hankel", "hankel.no_sinks.rank"])
def test_selects_by_any_score(probe, by):
    code, report, err = probe("--method", "swa,hankel", "--window", "8,20", "--by", by)
    assert code == 0, err
    assert (report["selected"]["by"], report["selected"]["layers"]) == (by, lowest(report["layers"], 2))
    first = report["layers"][0]
    want = {
        "swa.loss": first["swa"]["8"]["loss"],
        "swa@20": first["swa"]["20"]["kl"],
        "swa.loss@20": first["swa"]["20"]["loss"],
        "hankel": first["hankel"]["no_sinks"]["rank"]["mean"],
        "hankel.no_sinks.rank": first["hankel"]["no_sinks"]["rank"]["mean"],
    }
    assert first["score"] == want[by]


def test_reports_retrieval_by_layer_and_of_the_model(command, place):
    words = ["--context", 1800, "--items", 1, "--method", "retrieval", "--window", "64", "--device", "cpu"]
    code, report, err = command("probe", place / "source", *words, "--data", place / "text", "--ratio", "0.25")
    assert code == 0, err
    assert set(report["retrieval"]) == set(report["base"]) == set(TASKS)
    for task, found in report["retrieval"].items():
        base = report["base"][task]
        assert found["items"] == base["rows"] == 15 and found["accuracy"] == pytest.approx(base["accuracy"])
        assert list(found["cells"]) == ["450", "900", "1800"] and len(found["by_depth"]) == 5
        low, high = found["log_probability_ci"]
        assert low < found["log_probability"] < high < 0
    for layer in report["layers"]:
        part = layer["retrieval"]["64"]
        assert layer["score"] == part["loss"] == pytest.approx(sum(t["loss"] for t in part["tasks"].values()) / 3)
        for task, effect in part["tasks"].items():
            assert effect["log_probability"] == pytest.approx(-report["base"][task]["loss"] - effect["loss"])
    assert report["selected"]["by"] == "retrieval"
    assert report["selected"]["layers"] == lowest(report["layers"], 1)


def test_a_loaded_model_and_texts_leave_no_files(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = hybridize.load(place / "source", dtype="float32", device="cpu")
    texts = [path.read_text() for path in sorted((place / "text").iterdir())]
    report = hybridize.probe(model, tokenizer, texts, methods=["swa"], context=64, sequences=3, windows=[8])
    assert list(report.base) == ["text"] and report.base["text"]["rows"] == 3
    assert report.select(0.5).layers == lowest(report.layers, 2)
    assert str(report.select(0.25, kind="swa")).count("SWA") == 1
    assert report.select(0.5, by="swa.loss@8").layers == sorted(
        sorted(range(4), key=lambda n: report.layers[n]["swa"]["8"]["loss"])[:2]
    )
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """What a process that is killed does not see."""


@pytest.mark.parametrize(
    ("how", "methods", "left"),
    [
        (Killed, "swa", [2, 3]),
        (KeyboardInterrupt, "swa", [2, 3]),
        (KeyboardInterrupt, "swa,hankel", [2, 3, 0, 1, 2, 3]),  # hankel comes first
    ],
)
def test_a_stopped_probe_resumes_to_the_same_numbers(probe, tmp_path, monkeypatch, how, methods, left):
    words = ["--method", methods]
    _, whole, _ = probe(*words)
    folder = tmp_path / "runs" / "source-probe-2"
    keep = probing_run._Run._keep

    def stop(self, record):
        keep(self, record)
        if record["layer"] == 1:
            raise how

    monkeypatch.setattr(probing_run._Run, "_keep", stop)
    if how is Killed:
        with pytest.raises(Killed):
            probe(*words)
        with (folder / "layers.jsonl").open("a") as file:
            file.write('{"layer": 2, "swa": {"8"')  # cut short
    else:
        code, _, err = probe(*words)
        assert code == 130 and "2 of 4 layers" in err and f"--resume --workspace {tmp_path / 'runs'}." in err
    assert not (folder / "probe.json").exists()
    again: list[int] = []
    monkeypatch.setattr(
        probing_run._Run, "_keep", lambda self, record: (again.append(record["layer"]), keep(self, record))
    )
    code, report, err = probe("--resume", "--context", 32, model=False)
    assert code == 0, err
    assert "not read again" in err and str(folder) in err
    assert again == left
    assert report["report"] == str(folder / "probe.json")
    assert {**report, "report": None} == {**whole, "report": None}


def test_two_probes_at_once_do_not_mix(probe, tmp_path, monkeypatch):
    """The second begins when the first has loaded its model, and again amid its layers."""
    _, first, _ = probe()
    _, second, _ = probe("--window", 16)
    found = []
    opened, keep = probing_run._Run._opened, probing_run._Run._keep

    def begin(self, text):
        monkeypatch.setattr(probing_run._Run, "_opened", opened)
        found.append(probe("--window", 16))
        return opened(self, text)

    def amid(self, record):
        keep(self, record)
        if self.folder.name == "source-probe-4" and record["layer"] == 1:
            found.append(probe("--resume", model=False))
            found.append(probe("--window", 16))

    monkeypatch.setattr(probing_run._Run, "_opened", begin)
    monkeypatch.setattr(probing_run._Run, "_keep", amid)
    code, report, err = probe()
    assert code == 0, err
    assert report["layers"] == first["layers"] and report["report"].endswith("source-probe-4/probe.json")
    (_, before, _), (refused, _, why), (_, within, _) = found
    assert before["layers"] == within["layers"] == second["layers"]
    assert refused == 1 and "Another process works on" in why
    assert [entry["kind"] for entry in Workspace(tmp_path / "runs").entries()].count("probe") == 5


def test_a_resumed_probe_keeps_its_number_format(probe, tmp_path, monkeypatch):
    """The default depends on the device, which may be another one by then."""
    monkeypatch.setattr(probing_run, "swept_layers", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert probe()[0] == 130
    monkeypatch.undo()
    loaded = []
    load = Source.load
    monkeypatch.setattr(Source, "load", lambda self, dtype, *a: (loaded.append(dtype), load(self, dtype, *a))[1])
    assert json.loads((tmp_path / "runs" / "source-probe" / "run.json").read_text())["options"]["dtype"] == "float32"
    assert probe("--resume", model=False)[0] == 0 and loaded == [torch.float32]


def test_resuming_asks_for_the_same_text_and_a_run_that_is_not_finished(probe, command, place, tmp_path, monkeypatch):
    code, _, err = probe("--resume")
    assert code == 1 and "There is no probe in" in err
    shutil.copytree(place / "text", tmp_path / "text")
    monkeypatch.setattr(probing_run, "swept_layers", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert probe("--data", tmp_path / "text")[0] == 130
    monkeypatch.undo()
    for path in (tmp_path / "text").iterdir():
        path.write_text(path.read_text()[7:])
    code, _, err = probe("--resume", model=False)
    assert code == 1 and "has changed since" in err
    shutil.rmtree(tmp_path / "text")
    shutil.copytree(place / "text", tmp_path / "text")
    record = Workspace.record
    monkeypatch.setattr(Workspace, "record", lambda self, kind, *args, **more: (_ for _ in ()).throw(KeyboardInterrupt))
    assert probe("--resume", model=False)[0] == 130  # with its report written, and not in the index yet
    monkeypatch.setattr(Workspace, "record", record)
    assert [entry["kind"] for entry in Workspace(tmp_path / "runs").entries()] == ["probe-run"]
    assert probe("--resume", model=False)[0] == 0
    assert [entry["kind"] for entry in Workspace(tmp_path / "runs").entries()] == ["probe-run", "probe"]
    code, _, err = probe("--resume", model=False)
    assert code == 2 and "The last probe is finished" in err
    command("probe", place / "source", "--scores", task_scores(tmp_path))
    code, _, err = probe("--resume", model=False)
    assert code == 2 and "The last probe is finished" in err


def task_scores(folder):
    path = folder / "tasks.csv"
    path.write_text("layer_num,recall\n0,0.1\n1,0.2\n2,0.3\n3,0.4\n")
    return path


def test_a_run_may_be_resumed_where_batches_are_of_another_size(probe, monkeypatch):
    _, whole, _ = probe()
    monkeypatch.setattr(probing_run, "swept_layers", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert probe()[0] == 130
    monkeypatch.undo()
    monkeypatch.setattr(probing_run, "batch_tokens", lambda device, context: context)
    code, report, err = probe("--resume", model=False)
    assert code == 0, err
    for layer, same in zip(report["layers"], whole["layers"], strict=True):
        assert layer["score"] == pytest.approx(same["score"], rel=1e-3)


def test_a_workspace_that_cannot_be_is_said_before_the_model_is_loaded(place, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(Source, "load", lambda *args: pytest.fail("loaded"))
    (tmp_path / "file").touch()
    assert main(["probe", str(place / "source"), *SMALL, "--workspace", str(tmp_path / "file" / "runs")]) == 1
    assert "choose another --workspace" in capfd.readouterr().err


def test_prime_takes_the_selection(probe, command, place, tmp_path):
    _, report, _ = probe("--ratio", "0.75", "--layer", "swa")
    prime = ["prime", "--dry-run", "--context", 32, "--tokens", 2048, "--device", "cpu", "--data", place / "text"]
    code, plan, err = command(*prime)
    assert code == 0, err
    assert plan["source"] == str(place / "source") and f"taking {place / 'source'}" in err
    assert plan["pattern"] == report["selected"]["pattern"] and not plan["evenly_spaced"]
    assert "selected by swa" in err and report["report"] in err
    _, plan, _ = command(*prime, "--ratio", "0.25", "--layer", "gdn")
    assert plan["converted"] == lowest(report["layers"], 1) and "GDN" in plan["pattern"]
    _, plan, err = command(*prime, "--layers", "1,2")
    assert plan["converted"] == [1, 2]
    other = save_source(tmp_path / "other")
    _, plan, err = command("prime", other, *prime[1:])
    assert plan["converted"] == [1, 3] and "No probe of this model" in err
    (tmp_path / "runs" / "source-probe" / "probe.json").write_text('{"selected": {}}')
    code, _, err = command("prime", place / "source", *prime[1:])
    assert code == 1 and "cannot be used" in err


def test_task_scores_of_a_model_reach_prime(command, place, tmp_path):
    table = tmp_path / "tasks.csv"
    table.write_text("layer_num,recall,rag\n-1,0.9,0.8\n0,0.1,0.2\n1,0.9,0.7\n2,0.5,0.5\n3,0.8,0.9\n")
    code, report, err = command("probe", "--scores", table)
    assert code == 0, err
    assert report["model"] is None and report["selected"]["layers"] == [1, 3]
    assert report["layers"][2]["score"] == pytest.approx(0.85 - 0.5)
    _, report, _ = command("probe", place / "source", "--scores", table, "--by", "tasks.recall", "--ratio", "0.25")
    assert report["selected"]["layers"] == [1] and report["model"] == str(place / "source")
    _, plan, err = command("prime", place / "source", "--dry-run", "--context", 32, "--device", "cpu")
    assert plan["converted"] == [1]
    table.write_text("layer_num,recall\n0,0.1\n1,0.2\n")
    code, _, err = command("probe", place / "source", "--scores", table)
    assert code == 1 and "scores 2 layers" in err and "has 4" in err


@pytest.mark.parametrize(
    ("words", "exit_code", "part"),
    [
        (["--context", "5000"], 2, "more than the 2048 positions"),
        (["--context", "2048"], 1, "one row of 2048 tokens, the longest has "),
        (["--window", "64"], 2, "hides nothing of a context of 64"),
        (["--window", "8,8"], 2, "different sizes"),
        (["--window", "0"], 2, "at least 1 token"),
        (["--window", "8,x"], 2, "no list of numbers"),
        (["--method", "swa,taylor"], 2, "no method 'taylor'"),
        (["--method", ","], 2, "names no method"),
        (["--ratio", "1.5"], 2, "--ratio 1.5: the share"),
        (["--ratio", "nan"], 2, "--ratio nan: the share"),
        (["--by", ""], 2, "no score ''"),
        (["--by", "swa."], 2, "no score 'swa.'"),
        (["--by", "swa+swa"], 2, "names swa twice"),
        (["--method", "hankel", "--by", "hankel.no_sinks.nuclear.p77"], 2, "no Hankel statistic"),
        (["--dry-run", "--resume"], 2, "leave one out"),
        (["--layer", "rnn"], 2, "'rnn' is none of gka, gdn, mamba2, swa"),
        (["--window", "6_4"], 2, "no list of numbers"),
        (["--keep", "1_0"], 2, "no list of numbers"),
        (["--sequences", "0"], 2, "--sequences is 0"),
        (["--data", ""], 2, "nothing was given"),
        (["--data", os.devnull], 1, "the longest has 0"),
        (["--seed", str(2**63)], 2, "below 2**63"),
        (["--select", "best"], 2, "no selection 'best'"),
        (["--select", "greedy", "--method", "hankel"], 2, "by swa or by mixer"),
        (["--method", "mixer", "--sequences", "10000"], 1, "take all there is"),
        (["--gpu-memory", "24"], 2, "--gpu-memory is of a GPU, but the probe would run on cpu"),
        (["--gpu-memory", "0"], 2, "--gpu-memory is 0"),
        (["--gpu-memory", "nan"], 2, "--gpu-memory is nan"),
        (["--data", "nowhere"], 1, "There is no file or folder"),
        (["--method", "retrieval"], 1, "Items of 64 tokens are too short for the passkey task"),
        (["--by", "swa.depth"], 2, "swa has the statistics kl, loss"),
        (["--by", "beauty"], 2, "no score 'beauty'"),
        (["--method", "hankel", "--by", "hankel.all.beauty"], 2, "no Hankel statistic 'all.beauty'"),
        (["--by", "hankel"], 2, "hankel is not measured; add it"),
        (["--by", "swa@9"], 2, "'9' is none of the windows (8)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
def test_refuses_what_cannot_be(probe, tmp_path, monkeypatch, dry, words, exit_code, part):
    monkeypatch.setattr(Source, "load", lambda *args: pytest.fail("loaded"))
    code, report, err = probe(*words, *(["--dry-run"] if dry else []))
    assert (code, report) == (exit_code, None), err
    assert part in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_an_empty_name_is_no_folder(command):
    for words in (["probe", "", *SMALL], ["probe", "", "--scores", "x.csv"], ["prime", "", "--dry-run"]):
        code, _, err = command(*words)
        assert code == 2 and "nothing was given" in err


def test_names_the_file_that_is_no_text(probe, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good \xff bad")
    code, _, err = probe("--data", tmp_path / "bad.txt")
    assert code == 1 and "bad.txt is not UTF-8 text (byte 5)" in err


def test_names_the_layer_that_is_not_finite(command, place, tmp_path):
    shutil.copytree(place / "source", tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.layers.2.self_attn.k_proj.weight"][0, 0] = float("inf")
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    code, _, err = command("probe", tmp_path / "broken", *SMALL, "--data", place / "text")
    assert code == 1 and "Layer 2 has weights that are not finite numbers (self_attn.k_proj.weight)" in err


def test_refuses_models_whose_attention_cannot_be_read(command, place, tmp_path):
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=256)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    code, _, err = command("probe", tmp_path / "gpt2", *SMALL)
    assert code == 1 and "'gpt2' cannot be converted" in err
    model, tokenizer = hybridize.load(place / "source", dtype="float32", device="cpu")
    hybrid = hybridize.convert(model, hybridize.LayerPlan.from_layers(4, [1], "swa"))
    with pytest.raises(Exception, match="already a hybrid"):
        hybridize.probe(hybrid, tokenizer, ["text"])
    with pytest.raises(UsageError, match="no method"):
        hybridize.probe(model, tokenizer, ["text"], methods=["guess"])
