"""What `prime` reads, from the command line: every kind of data, mixtures, conversations, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from data_case import KINDS, SMOLLM2, UNSTABLE, make, text, tokenizer
from priming_case import save_source
from transformers import AutoModelForCausalLM

from hybridize.cli import main
from hybridize.priming.align import Aligner
from hybridize.workspace import locked

SIZES = ["--batch-size", "2", "--init-tokens", "256", "--held-out-tokens", "512", "--device", "cpu", "--layer", "gdn"]
SIZES += ["--items", "0", "--prompts", "0"]
ALL = ["--stages", "init,align,distill,adapt", "--tokens", "1280"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A pico source whose tokenizer has a chat template."""
    folder = save_source(tmp_path_factory.mktemp("chatty"), vocab_size=264)
    tokenizer(SMOLLM2).save_pretrained(folder)
    return folder


@pytest.fixture
def prime(model, tmp_path, capfd):
    """Run prime; returns (exit code, parsed JSON or None, stderr)."""

    def run(*arguments, source=model, context=64):
        words = ["prime", *([str(source)] if source else []), *SIZES, "--context", str(context)]
        code = main([*words, "--workspace", str(tmp_path / "runs"), "--json", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out.strip() else None, err

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_goes_through_every_stage(prime, tmp_path, kind) -> None:
    data = make(kind, tmp_path)
    code, report, err = prime(*ALL, "--data", data, context=128 if kind == "chat" else 32)
    assert code == 0, err
    assert report["data"] == [data] and list(report["losses"])[2:] == ALL[1].split(",")
    assert report["losses"]["adapt"]["loss"] < report["losses"]["source"]["loss"]
    assert 0 < report["held_out_tokens"] <= 512 and report["text"]["tokens"] >= 1280
    AutoModelForCausalLM.from_pretrained(report["output"])


def test_a_dataset_of_the_hub(prime, tmp_path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets of the Hub need the library datasets")
    path, real = make("jsonl", tmp_path, 60), datasets.load_dataset
    folder = str(tmp_path / "cache")
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split, streaming: real(
            "json", data_files={split: path}, split=split, streaming=streaming, cache_dir=folder
        ),
    )
    code, report, err = prime("--tokens", 640, "--data", "owner/name:config:train")
    assert code == 0, err
    assert report["data"] == ["owner/name:config:train"] and report["text"]["documents"] > 10


def test_a_mixture_by_weight_and_what_is_measured_on(prime, tmp_path) -> None:
    texts, talk = make("folder", tmp_path), make("chat", tmp_path)
    (tmp_path / "held.txt").write_text("Something else to measure on. " * 9)
    words = ["--data", f"{texts}=3", "--data", talk, "--held-out", tmp_path / "held.txt", "--tokens", 640]
    code, report, err = prime(*words, context=160)
    assert code == 0, err
    assert report["data"] == [f"{texts}=3.0", talk] and report["held_out"] == str(tmp_path / "held.txt")
    assert report["held_out_tokens"] == 159, "one of its two rows is to choose on, and a row's first token is given"


def test_only_answers_are_measured_and_learnt(prime, tmp_path) -> None:
    code, report, err = prime("--data", make("chat", tmp_path), "--tokens", 640, context=160)
    assert code == 0, err
    # Three rows of 160 tokens: what the assistant says is a small part of them.
    assert 10 < report["held_out_tokens"] < 120


def test_one_document_longer_than_the_rows_is_cut_and_none_of_it_is_lost(prime, tmp_path) -> None:
    (tmp_path / "one.txt").write_text(" ".join(f"w{i}" for i in range(900)))
    code, report, err = prime("--data", tmp_path / "one.txt", "--tokens", 640)
    assert code == 0, err
    assert report["text"]["dropped_tokens"] == 0 and "read again" not in err
    code, _, err = prime("--data", tmp_path / "one.txt", "--tokens", 12800)
    assert code == 0 and err.count("it is read again") == 1, err


def test_another_field(prime, tmp_path) -> None:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"story": text(i)}) + "\n" for i in range(40)))
    assert prime("--data", path, "--text-field", "story", "--tokens", 128)[0] == 0


def without_template(folder, template=None):
    save_source(folder, vocab_size=264)
    (folder / "chat_template.jinja").unlink()
    tokenizer(template).save_pretrained(folder)
    return folder


def empty(folder):
    (folder / "a.txt").write_text(" \n")
    return ["--data", folder / "a.txt"]


def foreign_ids(folder):
    np.array([3, 264, 5], "<u2").tofile(folder / "a.u16")
    return ["--data", folder / "a.u16"]


def scarce(folder):
    (folder / "a.txt").write_text("x" * 1000)
    return ["--data", folder / "a.txt", "--stages", "init,adapt", "--evaluate-every", "640"]


def no_field(folder):
    (folder / "a.jsonl").write_text('{"words": "x"}\n')
    return ["--data", folder / "a.jsonl"]


@pytest.mark.parametrize(
    ("bad", "code", "said"),
    [
        (empty, 1, "There is no text in {0}/a.txt; give --data something to read."),
        (lambda folder: ["--data", folder], 1, "Folder {0} holds no documents"),
        (foreign_ids, 1, "{0}/a.u16 holds the token id 264 at position 1, but the model has ids from 0 to 263"),
        (no_field, 1, 'Line 1 of {0}/a.jsonl is not an object with a field "text" or "messages"'),
        (lambda folder: ["--data", f"{make('folder', folder)}=-1"], 2, "weight above 0"),
        (lambda folder: ["--data", "nowhere.txt"], 1, "There is no file or folder nowhere.txt"),
        (lambda folder: ["--data", make("folder", folder), "--tokens", 127], 2, "less than one step of 128 tokens"),
        (scarce, 2, "--evaluate-every needs held-out text of two rows at least"),
        (lambda folder: ["--data", make("folder", folder), "--held-out", "gone.txt"], 1, "no file or folder gone.txt"),
    ],
    ids=["empty", "empty folder", "foreign ids", "no field", "weight", "missing", "budget", "scarce", "held out"],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_bad_data_are_refused_before_anything_is_written(prime, tmp_path, bad, code, said, more) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    got, report, err = prime(*bad(folder), *more)
    assert (got, report) == (code, None), err
    assert said.format(folder) in err.replace("\n", " ") and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "holds conversations, but the model's tokenizer has no chat template"),
        (UNSTABLE, "In no conversation of"),
    ],
    ids=["none", "unstable"],
)
def test_conversations_that_the_template_cannot_give(prime, tmp_path, template, said) -> None:
    source = without_template(tmp_path / "source", template)
    code, report, err = prime("--data", make("chat", tmp_path), source=source)
    assert (code, report) == (1, None) and said in err and "chat.jsonl" in err


def test_killed_before_its_first_checkpoint_a_run_begins_again(prime, tmp_path, monkeypatch) -> None:
    data = make("chat", tmp_path)
    assert prime("--data", data, "--tokens", 256, "--output", tmp_path / "one")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr("hybridize.priming.run.fit_start", lambda *arguments: 1 / 0)
        assert prime("--data", data, "--tokens", 256, "--output", tmp_path / "two")[0] == 1
    code, _, err = prime("--resume", source=None)
    assert code == 0, err
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_runs_in_one_folder(prime, tmp_path, monkeypatch) -> None:
    data = make("folder", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Aligner, "step", lambda self, batch: 1 / 0)
        assert prime("--data", data, "--tokens", 128)[0] == 1
    (folder,) = tmp_path.glob("runs/*/run.json")
    with locked(folder.parent, wait=False):
        code, _, err = prime("--resume", source=None)
        assert code == 1 and "Another process works on" in err and str(folder.parent) in err
    assert prime("--resume", source=None)[0] == 0
    # Of two that begin at once, the second finds the folder taken.
    monkeypatch.setattr("hybridize.workspace.Workspace.run_folder", lambda self, name: folder.parent)
    code, _, err = prime("--data", data, "--tokens", 128, "--output", tmp_path / "other")
    assert code == 1 and "Another run has just begun in" in err and not (tmp_path / "other").exists()
