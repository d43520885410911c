"""Figures 9a and 10 of the Mesh-Attention paper: how long ranks compute and wait, and grouped-query attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sp_bench.analysis.figure import Figure, Panels, colours, labelled
from sp_bench.analysis.number import Number, count, derived, ends, least, mean, most, total
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section, words
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.cells import METHODS
from sp_bench.analysis.studies.mesh.paper import HEADS, Cell
from sp_bench.analysis.studies.mesh.scaling import paper_seconds
from sp_bench.plan.method import PHASES
from sp_bench.records import Record

Parts = dict[str, tuple[Number, Number]]
"""Seconds that a rank computes and waits, by phase."""
CLAIMS = {
    "forward": "ring forward time spent waiting",
    "top": "mesh communication wait below ring, maximum",
    "average": "mesh communication wait below ring, average",
    "overhead": "mesh communication overhead of total time",
}
"""The text's claims on waiting, by the start of each."""


def breakdown(runs: Runs, *methods: str) -> dict[Cell, Parts]:
    """The time parts of the cells at 1M causal."""
    records = cells.cell_records(runs, cells.long_cells(*methods))
    return {cell: cells.compute_and_wait(record, runs.folder) for cell, record in records.items()}


def waited(parts: Parts) -> Number:
    """Seconds of waiting in an iteration."""
    return total(wait for _, wait in parts.values())


def computed(parts: Parts) -> Number:
    """Seconds of computing in an iteration."""
    return total(busy for busy, _ in parts.values())


def share(wait: Number, busy: Number) -> Number:
    """The share of waiting in percent."""
    return derived(lambda w, b: 100 * w / (w + b), wait, busy)


def waiting(runs: Runs) -> dict[str, Number]:
    """Our values of CLAIMS, by the claim."""
    by_name = {(cell.method, cell.gpus): parts for cell, parts in breakdown(runs, *METHODS).items()}
    less = [cells.reduction(waited(by_name["mesh", n]), waited(by_name["ring", n])) for n in cells.GPUS]
    busy, wait = by_name["ring", 128]["forward"]
    last = by_name["mesh", 256]
    ours = share(wait, busy), most(less), mean(less), share(waited(last), computed(last))
    return dict(zip(CLAIMS.values(), ours, strict=True))


def figure9a(runs: Runs) -> Section:
    """The time breakdown of Ring and Mesh at 1M causal."""
    parts_of, ours = breakdown(runs, *METHODS), waiting(runs)
    by_method = {m: [parts for cell, parts in parts_of.items() if cell.method == m] for m in METHODS}
    ring, mesh = (computed(parts) for cell, parts in parts_of.items() if cell.gpus == 32)
    numbers = {cell: [number for phase in PHASES for number in parts[phase]] for cell, parts in parts_of.items()}
    rows = [
        [cell.gpus, cell.method, *numbers[cell], share(waited(parts), computed(parts))]
        for cell, parts in parts_of.items()
    ]
    title = "Computing and waiting at 1M, causal"
    values = {"times": words("mesh.times"), "alike": mesh.over(ring)}
    return section(
        "mesh.figure9a",
        **values,
        figure=bars("mesh-figure9a", title, "GPUs", [str(n) for n in cells.GPUS], by_method),
        seconds="; ".join(f"{phase} {part} | s | .2f" for phase in PHASES for part in ("compute", "wait")),
        rows=rows,
        **{name: ours[claim] for name, claim in CLAIMS.items()},
        **{f"paper_{name}": cells.stated(claim) for name, claim in CLAIMS.items()},
        **_rates(runs),
    )


def _rates(runs: Runs) -> dict[str, Any]:
    """The kernel rates at which the paper's waiting and its times fit together."""
    paper, ours, rates = paper_seconds(), breakdown(runs, "mesh"), []
    average, overhead = (cells.stated(CLAIMS[name]) for name in ("average", "overhead"))
    for gpus in cells.GPUS:
        ring, mesh = (Cell(True, cells.LONG, gpus, method) for method in METHODS)
        # mesh - compute = (1 - average) (ring - compute)
        compute = derived(lambda m, r, a: (m - (1 - a / 100) * r) / (a / 100), paper[mesh], paper[ring], average)
        busy = computed(ours[mesh])
        rates.append([gpus, compute, busy, _rate(mesh, compute), _rate(mesh, busy)])
    last = Cell(True, cells.LONG, 256, "mesh")
    stated = _rate(last, derived(lambda s, o: s * (1 - o / 100), paper[last], overhead))
    implied = [row[3] for row in rates]
    return {**ends(implied, "slow", "fast"), "stated": stated, "ours": rates[0][4], "rates": rates}


def _rate(cell: Cell, compute: Number) -> Number:
    return derived(lambda s: cell.flops_per_gpu / s / 1e12, compute)


def bars(name: str, title: str, x_label: str, labels: Sequence[str], by_method: dict[str, list[Parts]]) -> Figure:
    """Stacked bars of both methods side by side: a colour for each phase, waiting hatched."""
    panels, width, palette = Panels(height=3.4), 0.36, colours(list(PHASES))
    axis = panels.first
    for side, (method, cells_parts) in zip((-0.5, 0.5), by_method.items(), strict=True):
        for i, parts in enumerate(cells_parts):
            base, x = 0.0, i + side * (width + 0.04)
            for phase in PHASES:
                for part, number in zip(("compute", "wait"), parts[phase], strict=True):
                    label = labelled(f"{phase} {part}", number.kind) if i == 0 and side < 0 else None
                    style: dict[str, Any] = {"edgecolor": palette[phase], "linewidth": 0.8, "label": label}
                    waits = {"facecolor": "white", "hatch": "////"}
                    style |= waits if part == "wait" else {"facecolor": palette[phase]}
                    axis.bar(x, number.known, width, bottom=base, **style)
                    base += number.known
                    panels.numbers.append(number)
            axis.annotate(method, (x, base), (0, 3), textcoords="offset points", ha="center", size=7)
    axis.set_xticks(range(len(labels)), labels)
    axis.set(xlabel=x_label, ylabel="time of a rank, s")
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.1)
    panels.legend_below(2, fontsize=8)
    return panels.figure(name, title)


DEGREES = (1, 2, 4, 8, 16, 32)
PAPERS_MOST = 8
"""The largest GQA degree that the text names."""
GPUS = 256
LESS = 0.95
"""A gain counts as smaller than another if it is below this share of it."""
Key = tuple[int, int, str]
"""GQA degree g (query heads for each KV head), GPUs, method."""


def gqa_records(runs: Runs) -> dict[Key, Record]:
    """Records of all degrees on 256 GPUs, and of the paper's degrees on fewer."""
    keys = [(g, gpus, m) for gpus in cells.GPUS for g in DEGREES for m in METHODS if gpus == GPUS or g <= PAPERS_MOST]
    asked = {key: cells.cell_point(Cell(True, cells.LONG, *key[1:]), kv_heads=HEADS // key[0]) for key in keys}
    return runs.by_key(asked)


def gain(records: dict[Key, Record], g: int, gpus: int) -> Number:
    """Ring's time over Mesh's."""
    ring, mesh = (cells.seconds(records[g, gpus, method]) for method in METHODS)
    return ring.over(mesh)


def figure10(runs: Runs) -> Section:
    """The time of an iteration by GQA degree."""
    records = gqa_records(runs)
    parts = {key: cells.compute_and_wait(record, runs.folder) for key, record in records.items() if key[1] == GPUS}
    by_method = {method: [parts[g, GPUS, method] for g in DEGREES] for method in METHODS}
    title, label = f"Grouped-query attention on {GPUS} GPUs, 1M, causal", "g, query heads that share a KV head"
    rows = []
    for g in DEGREES:
        both, waits = zip(*((records[g, GPUS, m], waited(parts[g, GPUS, m])) for m in METHODS), strict=True)
        rows.append([g, HEADS // g, both[1].variant or "", *map(cells.seconds, both), gain(records, g, GPUS), *waits])
    degrees = [g for g in DEGREES if g <= PAPERS_MOST]
    wins = [gain(records, g, gpus) for g, gpus, method in records if method == "mesh"]
    faster = count(wins, lambda ratio: ratio > 1)
    less = [n for n in cells.GPUS if gain(records, PAPERS_MOST, n).known < LESS * gain(records, 1, n).known]
    holds = f"holds on {', '.join(map(str, less))} GPUs only" if less else "doesn't hold"
    values = {"figure": bars("mesh-figure10", title, label, list(map(str, DEGREES)), by_method), "wins": faster}
    values |= {"rows": rows, "degrees": "; ".join(f"Ring / Mesh at g = {g} || .2f" for g in degrees)}
    return section(
        "mesh.figure10",
        **values,
        times=words("mesh.times"),
        points=count(wins),
        everywhere="as stated" if faster.known == len(wins) else "not everywhere, as stated",
        holds=holds if len(less) < len(cells.GPUS) else "holds on all numbers of GPUs",
        waits=least(share(wait, busy) for busy, wait in parts[PAPERS_MOST, GPUS, "ring"].values()),
        gains=[[gpus, *(gain(records, g, gpus) for g in degrees)] for gpus in cells.GPUS],
        **{name: gain(records, g, GPUS) for name, g in (("first", 1), ("eight", PAPERS_MOST), ("last", DEGREES[-1]))},
    )
