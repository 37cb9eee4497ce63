"""What all drawings share: which files can be drawn, how they are written, and heat maps. Drawing needs matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridize.errors import UsageError
from hybridize.workspace import check_place, write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
_CELL, _PANEL, _MARGIN = (0.45, 0.3), (0.75, 0.6), (1.2, 0.7)  # inches, width and height


def check_plot(path: Path) -> None:
    """UsageError or WorkspaceError for what would keep this file from being drawn, said before the work."""
    if _suffix(path) not in FORMATS:
        raise UsageError(f"--plot {path}: the name must end in one of {', '.join('.' + name for name in FORMATS)}.")
    check_place(path.absolute(), "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib, which is not installed: pip install "hybridize[plot]"')


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, which opens no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the suffix names, see check_plot; replaces the file in one step."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_suffix(path), dpi=150)
    write_bytes(path.absolute(), buffer.getvalue())


@dataclass(frozen=True)
class Panel:
    """values[row][column] under names of rows and columns; None where nothing was measured."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]


def heat_map(
    panels: Sequence[Sequence[Panel]],
    path: Path,
    *,
    axes: tuple[str, str],
    label: str,
    span: tuple[float, float],
    title: str = "",
) -> None:
    """Draw rows of panels, each a table of coloured cells with their values, with one colour bar for all.

    axes: what rows and columns of a panel are; label: what the values are; span: the values at the colours' ends.
    """
    across, down = max(map(len, panels)), len(panels)
    columns = max(len(panel.columns) for row in panels for panel in row)
    rows = max(len(panel.rows) for row in panels for panel in row)
    width = _MARGIN[0] + across * (_PANEL[0] + _CELL[0] * columns)
    height = _MARGIN[1] + down * (_PANEL[1] + _CELL[1] * rows)
    figure = new_figure(width, height)
    places = figure.subplots(down, across, squeeze=False)
    image: Any = None
    for row, found in zip(places, panels, strict=True):
        for place in row[len(found) :]:
            place.set_axis_off()
        for place, panel in zip(row, found, strict=False):
            image = _draw(place, panel, span)
        row[0].set_ylabel(axes[0], fontsize="small")
    for place in places[-1]:
        place.set_xlabel(axes[1], fontsize="small")
    bar = figure.colorbar(image, ax=places, fraction=0.3 / width, pad=0.1 / width)
    bar.ax.tick_params(labelsize="x-small")
    bar.set_label(label, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    save(figure, path)


def _draw(place: Any, panel: Panel, span: tuple[float, float]) -> Any:
    """The panel's cells, the first row at the top; a cell without a value stays white."""
    import numpy as np

    values = np.array(panel.values, dtype=float)
    image = place.imshow(values, cmap="viridis", vmin=span[0], vmax=span[1], aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            # Black on the bright half of the colours, white on the dark one.
            colour = "black" if image.norm(value) > 0.5 else "white"
            place.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize="x-small")
    place.set_xticks(range(len(panel.columns)), panel.columns, fontsize="x-small")
    place.set_yticks(range(len(panel.rows)), panel.rows, fontsize="x-small")
    place.set_title(panel.title, fontsize="small")
    return image


def _suffix(path: Path) -> str:
    return path.suffix.lower().lstrip(".")
