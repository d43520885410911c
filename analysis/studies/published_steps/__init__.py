"""Published measurements: others' times of attention on GPUs beside their simulation, by source.

The measurements are those of analysis/published. Errors are also given without what was fitted to a point's own source
(sp_bench.validate.left_out). `python -m sp_bench.validate published` writes the same figures to docs/results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from sp_bench.analysis.figure import Figure, labelled, new_figure, sources, styles
from sp_bench.analysis.frames import methods_in_order
from sp_bench.analysis.number import Number, Source, derived, formula, median, most, of_record, tally
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.cli.compose import Composer
from sp_bench.point import resolve
from sp_bench.point.backing import links_of
from sp_bench.validate.left_out import LeftOut, fits, is_fitted, simulation
from sp_bench.validate.published import (
    TELLING,
    held_out,
    measurements,
    overrides,
    pairs,
    point_name,
    shape_name,
    short_source,
)

FILES: Mapping[str, Callable[[], list[dict[str, str]]]] = {"measurements": measurements, "held_out": held_out}
"""The measurements by their file's name: those that some figures were fitted to, and those that nothing was."""
WORDS = {"measurements": "some figures were fitted to", "held_out": "nothing was fitted to"}
LEFT_OUT = formula(
    "published-left-out",
    "simulated without what was fitted to the measurement's own source (python -m sp_bench.validate published)",
    "sp_bench/validate/left_out.py",
)
ERRORS = "points; median || .1%; 90% || .1%; largest || .1%; median, left out || .1%; 90%, left out || .1%"


@dataclass(frozen=True)
class Compared:
    """A published measurement and its simulation, in ms."""

    row: Mapping[str, str]
    file: str
    links: str
    measured: Number
    simulated: Number
    left_out: Number
    """Simulated without what was fitted to the measurement's source."""

    @property
    def errors(self) -> tuple[Number, Number]:
        """simulated / measured - 1, and the same left out."""
        return self.error(self.simulated), self.error(self.left_out)

    def error(self, ms: Number) -> Number:
        """The relative error of a simulated time."""
        return derived(lambda ours, theirs: ours / theirs - 1, ms, self.measured)


@cache
def asked() -> list[tuple[str, int, dict[str, str], dict[str, Any]]]:
    """(file, line, row, config) of every measurement."""
    with Composer() as composer:
        return [
            (file, line, row, composer.compose(overrides(row)))
            for file, rows in FILES.items()
            for line, row in enumerate(rows(), start=2)
        ]


def compared(runs: Runs) -> list[Compared]:
    """All measurements beside their simulation."""
    records = runs.ask(tuple(overrides(row)) for _, _, row, _ in asked())
    left_out = LeftOut([(row, config) for file, _, row, config in asked() if file == "measurements"])
    found = []
    for (file, line, row, config), record in zip(asked(), records, strict=True):
        source = Source(f"{file}-line-{line}", "paper", f"analysis/published/{file}.csv line {line}: {row['source']}")
        simulated = of_record(record, "step_ms_median")
        without = simulated
        if is_fitted(row, config):
            without = Number(1e3 * simulation(left_out.without(row, config)).step_s, "simulated", (LEFT_OUT,))
        links = links_of(resolve(config).cluster, int(row["gpus"]))
        found.append(
            Compared(row, file, links, Number(float(row["measured_ms"]), "paper", (source,)), simulated, without)
        )
    return found


def errors(runs: Runs) -> Section:
    """How far simulations are from the measurements, by source and by links."""
    found, parts = compared(runs), []
    for file, words in WORDS.items():
        here = [one for one in found if one.file == file]
        by_source = _grouped(here, lambda one: short_source(one.row["source"]))
        by_links = _grouped(here, lambda one: one.links)
        for by, groups in (("source", by_source), ("links", by_links)):
            name = f"published-{file.replace('_', '-')}-{by}"
            lines = [[key, *_spread(ones)] for key, ones in groups.items()]
            parts.append(Table(name, f"Errors by {by}: measurements that {words}", columns(f"{by}; {ERRORS}"), lines))
    return Section(
        "Simulated against published",
        text(
            "{points:.0f} times that others published, on machines with {links}, beside their simulation with"
            " implementation=published. The error is simulated / measured - 1, in the tables its absolute value. Left"
            " out is without what was fitted to the point's own source. Machines of one model differ: where nothing was"
            " fitted, PCIe machines are not told by the names of their GPUs.",
            points=tally(len(found), [one.measured for one in found]),
            links=", ".join(sorted({one.links for one in found})),
        ),
        *parts,
        _picture(found),
    )


def _grouped(ones: Iterable[Compared], key: Callable[[Compared], str]) -> dict[str, list[Compared]]:
    groups: dict[str, list[Compared]] = {}
    for one in ones:
        groups.setdefault(key(one), []).append(one)
    return groups


def _spread(ones: Sequence[Compared]) -> list[Cell]:
    """The cells of ERRORS."""
    here, left = ([derived(abs, one.errors[i]) for one in ones] for i in (0, 1))
    return [len(ones), median(here), _ninth(here), most(here), median(left), _ninth(left)]


def _ninth(numbers: Sequence[Number]) -> Number:
    return derived(lambda *values: np.percentile(values, 90), *numbers)


def _picture(found: Sequence[Compared]) -> Figure:
    canvas, axes = new_figure(2, height=3.6, sharex=True, sharey=True)
    names = methods_in_order(one.row["method"] for one in found)
    for axis, (file, words) in zip(axes[0], WORDS.items(), strict=True):
        here = [one for one in found if one.file == file]
        for name, style in styles(names).items():
            ones = [one for one in here if one.row["method"] == name]
            measured, simulated = ([getattr(one, what).known for one in ones] for what in ("measured", "simulated"))
            axis.plot(measured, simulated, linestyle="", markersize=4, label=labelled(name, "simulated"), **style)
        axis.axline((1, 1), (10, 10), color="0.5", linewidth=1, zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="measured, as published (ms)")
        axis.set_title(f"{words[:1].upper()}{words[1:]}", fontsize=9)
    axes[0, 0].set_ylabel("step (ms)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    numbers = [number for one in found for number in (one.measured, one.simulated)]
    return Figure("published-steps", "Steps, simulated over published", canvas, sources(numbers))


def order(runs: Runs) -> Section:
    """Whether methods of one setting are ordered as the measurements order them."""
    found, lines = compared(runs), []
    for file, words in WORDS.items():
        here = [one for one in found if one.file == file]
        for hardware, ones in _grouped(here, lambda one: one.row["hardware"]).items():
            numbers = [one.simulated for one in ones]
            counts = [pairs(_frame(ones), column)[:2] for column in ("step_simulated_ms", "step_left_out_ms")]
            (alike, count), (left, _) = counts
            lines.append([words, hardware, *(tally(value, numbers) for value in (count, alike, left))])
    return Section(
        "The order of methods",
        text(
            "Pairs of methods of one source, machine and shape, whose measured times differ by {telling:.0%} or more,"
            " and how many of them the simulation orders alike.",
            telling=TELLING,
        ),
        Table(
            "published-order",
            "Pairs of methods by machine",
            columns("measurements that; machine; pairs || .0f; ordered alike || .0f; ordered alike, left out || .0f"),
            lines,
        ),
    )


def _frame(ones: Iterable[Compared]) -> pd.DataFrame:
    """The columns that validate.published.pairs reads."""
    times = ("measured", "simulated", "left_out")
    return pd.DataFrame(
        [{**one.row, **{f"step_{time}_ms": getattr(one, time).known for time in times}} for one in ones]
    )


def fitted(runs: Runs) -> Section:
    """What was fitted to which measurements."""
    lines: list[list[Cell]] = []
    for fit in fits():
        figures = ", ".join([*fit.get("points", {}), *fit.get("scale", {})])
        lines.append([", ".join(fit["clusters"]), fit["key"], figures, fit["source"], fit["why"]])
    heads = columns("cluster; section of its file; figures; fitted to; what they are, and would be without it")
    return Section(
        "What is fitted to what",
        text("All other figures are counted, or have a source of their own in the cluster files."),
        Table("published-fits", "Figures of cluster files that were fitted to published times", heads, lines),
    )


def points(runs: Runs) -> Section:
    """The section with a row for each measurement."""
    lines: list[list[Cell]] = []
    for one in compared(runs):
        row = one.row
        mask = "causal" if row["causal"] == "True" else "full"
        about = [short_source(row["source"]), row["hardware"], shape_name(row), row["phase"], mask, point_name(row)]
        lines.append([*about, one.measured, one.simulated, *one.errors])
    heads = columns(
        "source; machine; shape; phase; mask; method; measured | ms | .2f; simulated | ms | .2f; error || +.1%;"
        " error, left out || +.1%"
    )
    return Section(
        "Every point", Table("published-points", "Published and simulated steps", heads, lines, shown_rows=12)
    )
