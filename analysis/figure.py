"""Figures for print: one style, colours that the colour-blind can tell apart, and the kind of each number."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Bbox

from sp_bench.analysis.number import Number, Source, sources_of
from sp_bench.methods import REGISTRY
from sp_bench.plan.method import Method

MARKERS = (*"osD^vPXp<", "$u$", *"d>8H*h", *(f"${x}$" for x in "abcdefg"))
WIDTH, HEIGHT = 6.5, 3.6
"""Inches: the width of a page's text."""
FORMATS = ("pdf", "svg", "png")
VOLUME_BOUNDS = {
    "comm_bytes_lower_bound": ("bound, heads whole", (0, (4, 2))),
    "comm_bytes_least": ("bound, any split of heads", (0, (1, 1.5))),
}
"""Fields of records, with legend and dashes, of the least that can be sent: the first where a record's method leaves
heads whole."""


@dataclass(frozen=True)
class Figure:
    """A picture, its title, and the sources of its numbers."""

    name: str
    """The name of its files, such as mesh-figure8a."""
    title: str
    canvas: Canvas
    sources: tuple[Source, ...]
    note: str = ""

    def to_markdown(self) -> str:
        """A link to its SVG, and the note."""
        return f"![{self.title}]({self.name}.svg)\n\n{self.note}"

    def save(self, folder: Path, formats: Sequence[str] = FORMATS) -> None:
        """Write <name>.pdf, .svg and .png to `folder`, or some of them."""
        folder.mkdir(parents=True, exist_ok=True)
        for ending in formats:
            drawn = self._svg if ending == "svg" else self._bytes(ending)
            (folder / f"{self.name}.{ending}").write_bytes(drawn)

    def to_html(self) -> str:
        """The picture, its caption and links to its sources."""
        data = base64.b64encode(self._svg).decode()
        links = " ".join(f'<a href="#source-{html.escape(s.id)}">{html.escape(s.id)}</a>' for s in self.sources)
        sources = f"<details><summary>{len(self.sources)} sources</summary>{links}</details>"
        note = f" {html.escape(self.note)}" if self.note else ""
        return (
            f'<figure id="figure-{self.name}">'
            f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(self.title)}">'
            f"<figcaption><b>{html.escape(self.title)}.</b>{note}{sources}</figcaption></figure>"
        )

    _repr_html_ = to_html

    @cached_property
    def _svg(self) -> bytes:
        """Drawn once, as pages show it and it has a file of its own."""
        return self._bytes("svg")

    def _bytes(self, ending: str) -> bytes:
        out = io.BytesIO()
        # No date and no random ids: the same numbers give the same file.
        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[ending]
        with mpl.rc_context(STYLE):
            self.canvas.savefig(out, format=ending, dpi=200, bbox_inches=self._box, metadata=stamp)
        return out.getvalue()

    @cached_property
    def _box(self) -> Bbox:
        """The part that is drawn on, in inches. Everything is laid out once, for all formats."""
        self.canvas.draw_without_rendering()
        self.canvas.set_layout_engine("none")
        return self.canvas.get_tightbbox().padded(mpl.rcParams["savefig.pad_inches"])


STYLE: Any = {
    **sns.axes_style("whitegrid"),
    **sns.plotting_context("paper"),
    "svg.fonttype": "none",
    "svg.hashsalt": "sp_bench",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def colours(names: Sequence[str]) -> dict[str, Any]:
    """A colour for each name. A method has the same colour in every figure, and no two methods share one."""
    return _by_name(names, "colour", [*sns.color_palette("colorblind", 10), *sns.color_palette("husl", 12)], to_rgb)


def markers(names: Sequence[str]) -> dict[str, str]:
    """A marker for each name, so that lines can be told apart without colour."""
    return _by_name(names, "marker", MARKERS, str)


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name, as keyword arguments of a plot."""
    marker = markers(names)
    return {name: {"color": colour, "marker": marker[name]} for name, colour in colours(names).items()}


def _by_name(names: Sequence[str], look: str, choices: Sequence[Any], drawn: Callable[[str], Any]) -> dict[str, Any]:
    """The look that stands on each method's class, in the registry's order; other names get what these methods leave.

    A subclass with another name has not the look of its base.
    """
    of_classes = {name: [vars(cls).get(look) for cls in _named_alike(method)] for name, method in REGISTRY.items()}
    own = {name: drawn(next(filter(None, looks))) for name, looks in of_classes.items() if any(looks)}
    taken = [own[name] for name in names if name in own]
    free = [choice for choice in choices if choice not in taken] or list(choices)
    others = [name for name in names if name not in own]
    chosen = own | {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: chosen[name] for name in (*filter(names.__contains__, own), *others)}


def _named_alike(method: type[Method]) -> list[type[Method]]:
    """The method's class and those of its bases that have the same name."""
    return [cls for cls in method.__mro__ if issubclass(cls, Method) and getattr(cls, "name", None) == method.name]


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = WIDTH, height: float = HEIGHT, **options: Any
) -> tuple[Canvas, np.ndarray]:
    """An empty figure in the style of all figures, and its axes: (rows, columns). Sizes are in inches."""
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        axes = canvas.subplots(rows, columns, squeeze=False, **options)
    return canvas, axes


def labelled(name: str, kind: str) -> str:
    """A legend's entry: the name and the kind of number."""
    return f"{name} ({kind})"


def sources(numbers: Sequence[Number]) -> tuple[Source, ...]:
    """The sources of the numbers in a figure, each once."""
    return tuple(sources_of(numbers))


class Panels:
    """Axes side by side that remember the numbers drawn on them, for the figure's sources."""

    def __init__(self, columns: int = 1, rows: int = 1, **options: Any) -> None:
        self.canvas, self.axes = new_figure(columns, rows, **options)
        self.numbers: list[Number] = []

    @property
    def first(self) -> Axes:
        """The panel at the upper left."""
        return self.axes[0, 0]

    def line(self, points: Mapping[Any, Number], name: str = "", *, axis: Axes | None = None, **style: Any) -> None:
        """Draw numbers over x, without those that have no value. The legend says the name and the kind of number."""
        known = {x: number for x, number in points.items() if number.value is not None}
        self.numbers += known.values()
        if name and known:
            style["label"] = labelled(name, next(iter(known.values())).kind)
        with mpl.rc_context(STYLE):
            (axis or self.first).plot([*known], [number.known for number in known.values()], **style)

    def legend(self, axis: Axes | None = None, **style: Any) -> None:
        """The legend of one panel."""
        with mpl.rc_context(STYLE):
            (axis or self.first).legend(**style)

    def legend_below(self, ncols: int, **style: Any) -> None:
        """One legend below all panels, with the entries of the first."""
        entries, place = self.first.get_legend_handles_labels(), {"loc": "outside lower center", "ncols": ncols}
        with mpl.rc_context(STYLE):
            self.canvas.legend(*entries, **place, **style)

    def figure(self, name: str, title: str, note: str = "") -> Figure:
        """The finished figure."""
        return Figure(name, title, self.canvas, sources(self.numbers), note)


def log2_ticks(axis: Axes, ticks: Sequence[int], labels: Sequence[str] | None = None) -> None:
    """Make the x axis logarithmic to base 2, with a labelled tick at each of `ticks` and no others."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, labels or [f"{tick:g}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def lattice(axis: Axes, columns: Sequence[Any], rows: Sequence[Any], **labels: Any) -> Iterator[tuple]:
    """Make a map of the axes, with a cell for each column and row; (x, y, column, row) of each cell."""
    axis.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5), **labels)
    axis.set_xticks(range(len(columns)), map(str, columns))
    axis.set_yticks(range(len(rows)), map(str, rows))
    axis.grid(visible=False)
    return ((x, y, column, row) for (y, row), (x, column) in product(enumerate(rows), enumerate(columns)))
