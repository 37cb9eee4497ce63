"""A source and text on disk, and `prime` as the command line runs it."""

import json

import pytest
import torch
from priming_case import SMALL, save_source, save_text

from hybridize.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("prime")
    save_source(folder / "source")
    save_text(folder / "text")
    return folder


@pytest.fixture
def prime(place, tmp_path, capfd):
    """Run prime; returns (exit code, parsed JSON or None, stderr)."""

    def run(*arguments, model=True):
        data = [] if "--data" in arguments else ["--data", str(place / "text")]
        words = ["prime", *([str(place / "source")] if model else []), *SMALL, *data]
        code = main([*words, "--workspace", str(tmp_path / "runs"), "--json", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out.strip() else None, err

    return run
