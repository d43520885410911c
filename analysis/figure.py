"""Figures that are fit to print: one style, colours that the colour-blind tell apart, and the kind of each number."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure as Canvas

from sp_bench.analysis.number import Number, Source, sources_of

METHOD_ORDER = (
    *("ring", "striped", "zigzag", "double_ring", "pass_q", "all_gather", "tokenring"),
    *("ulysses", "usp", "startrail", "mesh"),
)
METHOD_COLOURS = (0, 9, 5, 4, 6, 8, 2, 1, 3, 7, 10)
"""Of seaborn's colorblind palette, with black behind it; the lightest are for methods that are drawn least."""
BLACK = (0.1, 0.1, 0.1)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*", "h")
WIDTH, HEIGHT = 6.5, 3.6
"""Inches: the width of a page's text."""
FORMATS = ("pdf", "svg", "png")


@dataclass(frozen=True)
class Figure:
    """A picture, what it shows, and the sources of its numbers."""

    name: str
    """Of its files, such as mesh-figure8a."""
    title: str
    canvas: Canvas
    sources: tuple[Source, ...]
    note: str = ""

    def save(self, folder: Path) -> None:
        """<name>.pdf, .svg and .png in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for ending in FORMATS:
            (folder / f"{self.name}.{ending}").write_bytes(self._bytes(ending))

    def to_html(self) -> str:
        """The picture within the page."""
        data = base64.b64encode(self._bytes("svg")).decode()
        links = " ".join(f'<a href="#source-{html.escape(s.id)}">{html.escape(s.id)}</a>' for s in self.sources)
        sources = f"<details><summary>{len(self.sources)} sources</summary>{links}</details>"
        note = f" {html.escape(self.note)}" if self.note else ""
        return (
            f'<figure id="figure-{self.name}">'
            f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(self.title)}">'
            f"<figcaption><b>{html.escape(self.title)}.</b>{note}{sources}</figcaption></figure>"
        )

    _repr_html_ = to_html

    def _bytes(self, ending: str) -> bytes:
        out = io.BytesIO()
        # No date and no random ids: the same numbers give the same file.
        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[ending]
        with mpl.rc_context(STYLE):
            self.canvas.savefig(out, format=ending, dpi=200, bbox_inches="tight", metadata=stamp)
        return out.getvalue()


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
    """A colour for each name; a method has the same one in every figure, and no two of them have one."""
    palette = sns.color_palette("colorblind", 10)
    of_methods = {name: (*palette, BLACK)[i] for name, i in zip(METHOD_ORDER, METHOD_COLOURS, strict=True)}
    return _by_name(names, of_methods, palette)


def markers(names: Sequence[str]) -> dict[str, str]:
    """A marker for each name, so that colour is not needed to tell lines apart."""
    return _by_name(names, dict(zip(METHOD_ORDER, MARKERS, strict=True)), MARKERS)


def _by_name(names: Sequence[str], of_methods: dict[str, Any], choices: Sequence[Any]) -> dict[str, Any]:
    """A method's own choice, and for other names what the methods among them leave."""
    taken = [of_methods[name] for name in names if name in of_methods]
    free = [choice for choice in choices if choice not in taken] or list(choices)
    others = [name for name in names if name not in of_methods]
    chosen = of_methods | {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: chosen[name] for name in (*filter(names.__contains__, METHOD_ORDER), *others)}


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = WIDTH, height: float = HEIGHT, **options: Any
) -> tuple[Canvas, np.ndarray]:
    """(canvas, axes) in the style of all figures, without the state that pyplot keeps. axes: (rows, columns)."""
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        axes = canvas.subplots(rows, columns, squeeze=False, **options)
    return canvas, axes


def labelled(name: str, kind: str) -> str:
    """A legend's entry: a method or what it is, and what kind of number."""
    return f"{name} ({kind})"


def sources(numbers: Sequence[Number]) -> tuple[Source, ...]:
    """Of the numbers in a figure."""
    return tuple(sources_of(numbers))
