"""A hybrid that prime made, in one file and in shards, and a Hub to push it to."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from hub_double import HubDouble
from priming_case import SMALL, save_source, save_text

from hybridize.checksums import SUMS, write_checksums
from hybridize.cli import main

SOURCE_CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\n- no\ntags:\n- theirs\n---\n# A source\n"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """source, text, hybrid (one file, bfloat16, every mixer with decays) and sharded."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("push")
    save_source(folder / "source")
    (folder / "source" / "README.md").write_text(SOURCE_CARD)
    (folder / "source" / "LICENSE").write_text("Do as you like.\n")
    save_text(folder / "text")
    words = ["prime", str(folder / "source"), *SMALL, "--data", str(folder / "text"), "--tokens", "128", "--quiet"]
    words += ["--dtype", "bfloat16", "--pattern", "*-GKA-GDN-M2", "--output", str(folder / "hybrid")]
    assert main([*words, "--workspace", str(folder / "runs")]) == 0
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder / "hybrid", folder / "sharded")
    kept = {path.name: path.read_bytes() for path in (folder / "sharded").iterdir()}
    for name in ("model.safetensors", SUMS):
        (folder / "sharded" / name).unlink()
    model = AutoModelForCausalLM.from_pretrained(folder / "hybrid", dtype="auto")
    model.save_pretrained(folder / "sharded", max_shard_size="40KB")
    (folder / "sharded" / "generation_config.json").write_bytes(kept["generation_config.json"])
    write_checksums(folder / "sharded")
    return folder


@pytest.fixture
def folder(place, tmp_path):
    """A copy of the sharded hybrid."""
    return shutil.copytree(place / "sharded", tmp_path / "hybrid")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that the client library talks to without waiting between attempts, and a token that may write."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    double = HubDouble()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", double.endpoint)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    yield double
    double.close()


@pytest.fixture
def push(tmp_path, capfd):
    """Run push; returns (exit code, parsed JSON or None, stderr)."""

    def run(*arguments):
        words = [*map(str, arguments), "--workspace", str(tmp_path / "runs"), "--json", "--device", "cpu"]
        code = main(["push", *words])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out.strip() else None, err

    return run


@pytest.fixture
def untried(monkeypatch):
    """Leave out the short generation, which takes most of a check's time."""
    from hybridize.hub.preflight import Trial

    monkeypatch.setattr(Trial, "findings", lambda *arguments: [])
