"""What can be drawn and where, and the heat map: its size, its values and its colours."""

import os
import struct

import pytest

from hybridize import plots
from hybridize.errors import UsageError, WorkspaceError
from hybridize.plots import FORMATS, Panel, check_plot, heat_map

WORDS = {"axes": ("tokens", "depth"), "label": "share right", "span": (0.0, 1.0)}


def panels(down=1, across=1, rows=3, columns=5):
    """Value 0.01 x its number among all cells, from 0 on."""
    lengths, depths = [f"{2048 << n:,}" for n in range(rows)], [f"{n / 4:g}" for n in range(columns)]
    number = iter(range(10_000))
    return [
        [
            Panel(f"reader {y}, task {x}", lengths, depths, [[0.01 * next(number) for _ in depths] for _ in lengths])
            for x in range(across)
        ]
        for y in range(down)
    ]


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def svg(tmp_path):
    """Draws panels as SVG whose text is text, not outlines."""
    matplotlib = pytest.importorskip("matplotlib")

    def draw(found, **words):
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            heat_map(found, tmp_path / "map.svg", **WORDS | words)
        return (tmp_path / "map.svg").read_text()

    return draw


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """Draws panels and gives the figure back."""
    pytest.importorskip("matplotlib")
    drawn = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (drawn.append(figure), save(figure, path)))

    def draw(found, **words):
        heat_map(found, tmp_path / "map.png", **WORDS | words)
        return drawn[-1]

    return draw


@pytest.mark.parametrize("suffix", [*FORMATS, "PNG"])
def test_a_place_that_can_be_drawn_to(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    check_plot(tmp_path / "new" / f"scores.{suffix}")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_drawn_to(tmp_path, monkeypatch):
    for name in ("scores.txt", "scores", "png"):
        with pytest.raises(UsageError, match=r"must end in one of \.png, \.svg, \.pdf"):
            check_plot(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may write everywhere
    with pytest.raises(WorkspaceError, match="cannot be written to; choose another --plot"):
        check_plot(tmp_path / "scores.png")


def test_a_heat_map_grows_with_its_panels_and_replaces_the_file(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    sizes = {}
    for down, across in ((1, 1), (3, 6)):
        heat_map(panels(down, across), path, **WORDS)
        sizes[down] = png_size(path)
    assert list(tmp_path.iterdir()) == [path]
    assert 400 < sizes[1][0] < 1000 and 250 < sizes[1][1] < 800
    assert 2500 < sizes[3][0] < 5000 and 700 < sizes[3][1] < 2000


def test_it_shows_every_value_and_name(svg):
    text = svg(panels(2, 2), title="what was found")
    for word in ["what was found", "share right", "tokens", "depth", "2,048", "8,192", "0.75", "reader 1, task 0"]:
        assert f">{word}<" in text, word
    for number in range(2 * 2 * 15):
        assert f">{0.01 * number:.2f}<" in text, number


def test_a_cell_without_a_value_stays_empty(figure):
    drawn = figure([[Panel("passkey", ["512", "1,024"], ["0", "1"], [[0.25, None], [None, 1.0]])]])
    place, bar = drawn.axes
    assert [(note.get_position(), note.get_text()) for note in place.texts] == [((0, 0), "0.25"), ((1, 1), "1.00")]
    assert place.images[0].get_array().mask.tolist() == [[False, True], [True, False]]
    assert bar.get_ylabel() == "share right"


def test_one_colour_bar_holds_for_all_panels(figure):
    drawn = figure(panels(3, 6, rows=3, columns=5), span=(-2.0, 0.0))
    assert len(drawn.axes) == 3 * 6 + 1
    assert {image.get_clim() for place in drawn.axes[:-1] for image in place.images} == {(-2.0, 0.0)}


def test_values_can_be_read_and_touch_no_other(figure):
    drawn = figure([[Panel("long", ["262,144"] * 3, ["0.25"] * 5, [[-12.34] * 5] * 3)] * 6] * 3, span=(-13.0, 0.0))
    drawn.draw_without_rendering()
    for place in drawn.axes[:-1]:
        boxes = [note.get_window_extent() for note in place.texts]
        assert min(box.height for box in boxes) * 72 / drawn.dpi > 5  # points
        assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])
        titles = [place.title.get_window_extent(), place.xaxis.label.get_window_extent()]
        assert not any(title.overlaps(box) for title in titles for box in boxes)
    boxes = [place.get_tightbbox() for place in drawn.axes]
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])


def test_rows_of_fewer_panels_leave_their_places_empty(figure):
    (first,), (second, third) = panels(1, 1)[0], panels(1, 2)[0]
    drawn = figure([[first], [second, third]])
    assert [place.axison for place in drawn.axes] == [True, False, True, True, True]


def test_matplotlib_is_imported_only_to_draw(python):
    done = python("-c", "import hybridize.plots, sys; print('matplotlib' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
