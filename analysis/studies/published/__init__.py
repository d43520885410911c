"""Published measurements: others' times of attention on GPUs beside their simulation, by source.

The measurements are those of analysis/published. Errors are also given without what was fitted to a point's own source
(sp_bench.validate.left_out).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from sp_bench.analysis.figure import Figure, labelled, new_figure, sources, styles
from sp_bench.analysis.frames import methods_in_order
from sp_bench.analysis.number import Number, Source, derived, least, median, most, step_ms, tally
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.table import Cell
from sp_bench.cli.compose import Composer
from sp_bench.plan.method import PHASES
from sp_bench.point.backing import TELLING
from sp_bench.validate.common import published_rows
from sp_bench.validate.left_out import LeftOut, fits, is_fitted, simulation
from sp_bench.validate.published import overrides, pairs, point_name

WORDS = {
    "measurements": "some figures were fitted to",
    "held_out": "nothing was fitted to",
    "second": "are of the second set",
}
"""The files of measurements: those that some figures were fitted to, those that nothing was, and the second set (tiles,
and larger machines)."""
LEFT_OUT = source("published.left-out")
UNEXPLAINED = 0.1
"""Methods of a source with a larger error are listed."""
ERRORS = "points; median || .1%; 90% || .1%; largest || .1%; median, left out || .1%; 90%, left out || .1%"


@dataclass(frozen=True)
class Compared:
    """A published measurement and its simulation, in ms."""

    row: Mapping[str, str]
    file: str
    kind: Mapping[str, str]
    """The kind of the point's transfers and links (sp_bench.point.backing)."""
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
            for file in WORDS
            for line, row in enumerate(published_rows(file), start=2)
        ]


@cache
def left_out() -> LeftOut:
    """The configs of measurements without what was fitted to their source."""
    return LeftOut([(row, config) for file, _, row, config in asked() if file == "measurements"])


@cache
def left_out_ms() -> list[float | None]:
    """The simulated time of every measurement without what was fitted to its source; None where nothing was."""
    without = left_out()
    return [
        1e3 * simulation(without.without(row, config)).step_s if is_fitted(row, config) else None
        for _, _, row, config in asked()
    ]


def compared(runs: Runs) -> list[Compared]:
    """All measurements beside their simulation."""
    records, rows = runs.ask(tuple(overrides(row)) for _, _, row, _ in asked()), []
    for (file, line, row, _), record, other_ms in zip(asked(), records, left_out_ms(), strict=True):
        place = Source(f"{file}-line-{line}", "paper", f"analysis/published/{file}.csv line {line}: {row['source']}")
        simulated = other = step_ms(record)
        if other_ms is not None:
            other = Number(other_ms, "simulated", (LEFT_OUT,))
        measured = Number(float(row["measured_ms"]), "paper", (place,))
        rows.append(Compared(row, file, record.validation_kind or {}, measured, simulated, other))
    return rows


def errors(runs: Runs) -> Section:
    """The errors of simulations of the measurements, by source, by links and by transfers."""
    all_rows = compared(runs)
    by = {"source": lambda one: short_source(one.row["source"])}
    by |= {name: lambda one, name=name: one.kind[name] for name in ("links", "transfers")}
    by["hardware"] = lambda one: one.row["hardware"]
    tables = {
        f"{file}_{name}": [[group, *_spread(ones)] for group, ones in _grouped(_of(all_rows, file), key).items()]
        for file in WORDS
        for name, key in by.items()
        if name != "hardware" or file == "second"
    }
    values = {"links": ", ".join(sorted({one.kind["links"] for one in all_rows})), "columns": ERRORS}
    return section(
        "published.errors",
        **values,
        points=tally(len(all_rows), [one.measured for one in all_rows]),
        picture=_picture(all_rows),
        **tables,
    )


def _of(found: Iterable[Compared], file: str) -> list[Compared]:
    return [one for one in found if one.file == file]


def _grouped(ones: Iterable[Compared], key: Callable[[Compared], Any]) -> dict[Any, list[Compared]]:
    groups: dict[Any, list[Compared]] = {}
    for one in ones:
        groups.setdefault(key(one), []).append(one)
    return groups


def _spread(ones: Sequence[Compared]) -> list[Cell]:
    """The cells of ERRORS."""
    errors, left = ([derived(abs, one.errors[i]) for one in ones] for i in (0, 1))
    return [len(ones), median(errors), _ninth(errors), most(errors), median(left), _ninth(left)]


def _ninth(numbers: Sequence[Number]) -> Number:
    return derived(lambda *values: np.percentile(values, 90), *numbers)


def _picture(found: Sequence[Compared]) -> Figure:
    canvas, axes = new_figure(len(WORDS), height=3.6, sharex=True, sharey=True)
    names = methods_in_order(one.row["method"] for one in found)
    for axis, (file, words) in zip(axes[0], WORDS.items(), strict=True):
        of_file = _of(found, file)
        for name, style in styles(names).items():
            ones = [one for one in of_file if one.row["method"] == name]
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
    """The number of pairs of methods that are ordered as the measurements order them."""
    all_rows, rows, totals = compared(runs), [], {}
    for file, words in WORDS.items():
        ones = _of(all_rows, file)
        totals[file] = [*_ordered(ones), pairs(_frame(ones))[2]]
        for hardware, group in _grouped(ones, lambda one: one.row["hardware"]).items():
            rows.append([words, hardware, *_ordered(group)])
    (count, alike, left, wrong), (held, held_alike, *_), (more, more_alike, _, more_wrong) = totals.values()
    times = [f"{pair}, {n} times" if n > 1 else pair for pair, n in Counter(wrong).items()]
    values = {"count": count, "alike": alike, "left": left, "held": held, "held_alike": held_alike}
    values |= {"second": more, "second_alike": more_alike}
    where = Counter(pair.rpartition(" (")[2].rstrip(")") for pair in more_wrong)  # machine and phase
    second_wrong = "; ".join(f"{number} on {words}" for words, number in where.items()) or "none"
    words = {"wrong": "; ".join(times) or "none", "second_wrong": second_wrong}
    return section("published.order", telling=TELLING, **values, **words, rows=rows)


def _ordered(ones: Sequence[Compared]) -> list[Number]:
    """The number of pairs, of those that are ordered alike, and of those that are so left out."""
    (alike, count), (left, _) = (pairs(_frame(ones), f"step_{time}_ms")[:2] for time in ("simulated", "left_out"))
    return [tally(number, [one.simulated for one in ones]) for number in (count, alike, left)]


def _frame(ones: Iterable[Compared]) -> pd.DataFrame:
    """The columns that validate.published.pairs reads."""
    times = ("measured", "simulated", "left_out")
    return pd.DataFrame(
        [{**one.row, **{f"step_{time}_ms": getattr(one, time).known for time in times}} for one in ones]
    )


def unexplained(runs: Runs) -> Section:
    """The methods of a source and machine of which a point is further off than UNEXPLAINED."""
    rows: list[list[Cell]] = []
    about = ("source", "hardware", "seqlen", "heads", "phase", "causal", "method", "variant")
    given = _of(compared(runs), "measurements")
    for ones in _grouped(given, lambda one: tuple(one.row[key] for key in about)).values():
        errors = [one.errors[0].known for one in ones]
        if max(map(abs, errors)) > UNEXPLAINED:
            row, measured = ones[0].row, [one.measured for one in ones]
            names = [short_source(row["source"]), row["hardware"], point_name(row), row["phase"]]
            rows.append([*names, ", ".join(f"{error:+.1%}" for error in errors), most(measured).over(least(measured))])
    return section("published.unexplained", off=UNEXPLAINED, rows=rows)


def fitted(_: Runs) -> Section:
    """The figures that were fitted, to which measurements, and what they are without their source."""
    rows, without = [], left_out()
    for index, fit in enumerate(fits()):
        figures = [f"{path} (without: {value:g})" for path, value in fit.get("points", {}).items()]
        figures += [f"{table} (without: x {factor:g})" for table, factor in fit.get("scale", {}).items()]
        figures += [f"all (without: those of {fit['cluster']})"] if "cluster" in fit else []
        again = [_again(without, index, phase) for phase in PHASES if "scale" in fit]
        left = "; ".join(filter(None, again)) or "the figure without it: no other source has measured this"
        rows.append([", ".join(fit["clusters"]), fit["key"], ", ".join(figures), fit["source"], fit["why"], left])
    return section("published.fitted", rows=rows)


def _again(without: LeftOut, index: int, phase: str) -> str:
    """The factor of a phase's rates without their source, in words."""
    factor, others = without.refitted(index, phase), without.others(fits()[index], phase)
    names = ", ".join(sorted({short_source(row["source"]) for row, _ in others}))
    return f"{phase} fitted again to {len(others)} points of {names}: x {factor:.2f}" if factor else ""


def points(runs: Runs) -> Section:
    """A row for each measurement."""
    rows: list[list[Cell]] = []
    for one in compared(runs):
        row, mask = one.row, "causal" if one.row["causal"] == "True" else "full"
        about = [short_source(row["source"]), row["hardware"], shape_name(row), row["phase"], mask, point_name(row)]
        rows.append([*about, one.measured, one.simulated, *one.errors])
    return section("published.points", rows=rows)


def shape_name(row: Mapping[str, str]) -> str:
    """The tokens, heads and batch of a measurement."""
    batch = f", batch {row['batch']}" if int(row["batch"]) > 1 else ""
    return f"{int(row['seqlen']) // 1024}k, {row['heads']} heads{batch}"


def short_source(name: str) -> str:
    """The repository of a source, without the file."""
    return name.split()[1] + (" (PCIe)" if "pcie" in name else "")
