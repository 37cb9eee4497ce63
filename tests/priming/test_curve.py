"""The loss curve of `prime`, drawn and sent to TensorBoard, and what is said where that cannot be."""

import importlib.util
from pathlib import Path

import pytest

WORDS = ["--stages", "init,align,adapt", "--layer", "gdn", "--tokens", 512, "--evaluate-every", 128]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_curve_is_drawn(prime, tmp_path, kind):
    pytest.importorskip("matplotlib")
    code, _, err = prime(*WORDS, "--plot", tmp_path / f"curve.{kind}", "--output", tmp_path / "out")
    assert code == 0, err
    drawn = (tmp_path / f"curve.{kind}").read_bytes()
    assert drawn.startswith(b"\x89PNG") if kind == "png" else b"<svg" in drawn


@pytest.mark.parametrize(
    ("missing", "words", "said"),
    [
        ("", ["--plot", "curve.txt"], "must end in one of .png"),
        ("matplotlib", ["--plot", "curve.png"], 'pip install "hybridize[plot]"'),
        ("tensorboard", ["--tensorboard"], 'pip install "hybridize[tensorboard]"'),
    ],
)
def test_what_cannot_be_drawn_is_said_before_the_work(prime, tmp_path, monkeypatch, missing, words, said):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more))
    monkeypatch.chdir(tmp_path)
    code, _, err = prime(*words, "--output", tmp_path / "out")
    assert code == 2 and said in err and not list(tmp_path.iterdir())


def test_the_curve_is_sent_to_tensorboard(prime, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    code, report, err = prime(*WORDS, "--tensorboard", "--output", tmp_path / "out")
    assert code == 0, err
    steps = {}
    for stage in ("align", "adapt"):
        (events,) = (Path(report["run"]) / "tensorboard" / stage).iterdir()
        found = [(e.step, value.tag) for e in EventFileLoader(str(events)).Load() for value in e.summary.value]
        steps[stage] = [step for step, tag in found if tag == "loss"]
        assert any(tag == ("layers/1" if stage == "align" else "held_out") for _, tag in found)
    assert steps == {"align": [0, 1], "adapt": [0, 1, 2, 3, 4]}
