"""A pico source model and its text, and the commands run on them in a workspace of their own."""

import json

import pytest
import torch
from priming_case import save_source, save_text
from probing_case import SMALL

from hybridize.cli import main


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("probe")
    save_source(folder / "source")
    save_text(folder / "text")
    return folder


@pytest.fixture
def command(tmp_path, capfd):
    """Run a command in a workspace of its own; returns (exit code, parsed JSON or None, stderr)."""

    def run(*words):
        code = main([*map(str, words), "--workspace", str(tmp_path / "runs"), "--json"])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out.strip() else None, err

    return run


@pytest.fixture
def probe(command, place):
    def run(*words, model=True):
        return command("probe", *([place / "source"] if model else []), *SMALL, "--data", place / "text", *words)

    return run
