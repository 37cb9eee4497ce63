"""A drawing of the scores, and everything that is wrong with it said before the work."""

import errno
import importlib.util
import os

import pytest
from probing_case import made_up_report

from hybridize import plots
from hybridize.probing.plot import _panels, draw
from hybridize.sources import Source

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", [*MAGIC, "PNG"])
def test_draws_in_the_format_of_the_suffix(tmp_path, suffix):
    path = tmp_path / "new" / f"scores.{suffix}"
    draw(made_up_report(), path)
    assert path.read_bytes().startswith(MAGIC[suffix.lower()])
    assert list(path.parent.iterdir()) == [path]


def test_a_panel_per_method_with_windows_as_lines():
    report = made_up_report()
    panels = _panels(report)
    assert [panel.title.partition(":")[0] for panel in panels] == ["swa", "hankel", "retrieval"]
    assert panels[0].bars == report.scores("swa")
    assert [panel.lines for panel in panels] == [
        {"window 20": report.scores("swa@20")},
        {},
        {"window 20": report.scores("retrieval@20")},
    ]
    combined = _panels(made_up_report("swa+hankel", methods=("swa", "hankel")))
    assert combined[0].title == "score: swa+hankel" and len(combined) == 3


def test_shows_model_context_window_and_the_converted_layers(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    report = made_up_report(methods=("swa",))
    draw(report, tmp_path / "scores.png")
    (figure,) = drawn
    assert figure.get_suptitle() == "model, context 64, window 8, selected by swa"
    (axis,) = figure.axes
    converted, stays = axis.containers
    assert [round(patch.get_x() + patch.get_width() / 2) for patch in converted] == report.select().layers == [2, 3, 5]
    assert [round(patch.get_x() + patch.get_width() / 2) for patch in stays] == [0, 1, 4]
    assert [patch.get_height() for patch in converted] == [report.layers[n]["score"] for n in (2, 3, 5)]
    assert list(axis.lines[0].get_ydata()) == report.scores("swa@20")


def test_says_what_is_wrong_before_the_work(probe, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "old.png").write_text("precious")
    for name, code, part in (
        ("scores.jpg", 2, "must end in one of .png, .svg, .pdf"),
        ("scores", 2, "must end in one of"),
        ("file/scores.png", 1, "is not a folder; choose another --plot"),
        ("old.png", 1, "exists already and is left as it is; choose another --plot"),
    ):
        found, report, err = probe("--plot", tmp_path / name)
        assert (found, report) == (code, None) and part in err, err
    assert (tmp_path / "old.png").read_text() == "precious"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    found, _, err = probe("--plot", tmp_path / "scores.png")
    assert found == 2 and 'pip install "hybridize[plot]"' in err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_to(probe, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may write everywhere
    monkeypatch.setattr(Source, "load", lambda *args: pytest.fail("loaded"))
    code, report, err = probe("--plot", tmp_path / "scores.png")
    assert (code, report) == (1, None) and "cannot be written to; choose another --plot" in err


def test_a_probe_is_drawn_and_says_where(probe, tmp_path):
    path = tmp_path / "scores.svg"
    code, report, err = probe("--plot", path)
    assert code == 0, err
    assert f"drawn in {path}" in err and report["selected"]["layers"]
    assert path.read_bytes().startswith(MAGIC["svg"])


def test_a_drawing_that_fails_hides_no_result(probe, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(plots, "write_bytes", full)
    code, report, err = probe("--plot", tmp_path / "scores.svg")
    assert code == 1 and "The disk is full" in err and report["selected"]["layers"]


def test_matplotlib_is_imported_only_to_draw(python):
    code = "import hybridize.probing.plot, hybridize.commands.probe, sys; print('matplotlib' in sys.modules)"
    done = python("-c", code)
    assert done.stdout.strip() == "False", done.stderr
