"""Work and volume of each dealing against their lower bounds, and how much of the dense volume is sent."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

from sp_bench.analysis.figure import STYLE, Figure, colours, new_figure, sources
from sp_bench.analysis.number import Number, derived, least, most, of_record
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.choosing.places import payload_over_bound
from sp_bench.analysis.studies.documents.places import (
    DATA,
    DEALINGS,
    DEALT_GPUS,
    NODE,
    SETTING,
    TOKENS,
    asked,
    dealt,
)
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.records import Record

MB = 1e-6
SHARED_DATA = "magi_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "ring": {},
    "all_gather": {"stride": 1},
    "pass_q": {},
    "tokenring": {},
    "startrail": {"team": 2},
    "mesh": {"tile": [4, 8]},
    "usp": {"ulysses": 8},
}
"""One variant of each method, so that only the dealing differs."""


def bounds(runs: Runs) -> Section:
    """Imbalance of the work and the volume, by dealing, beside the least that they can be."""
    found = {(data, dealing): r for (data, method, dealing), r in dealt(runs).items() if method == "ring"}
    served = {key: record for key, record in found.items() if record.status == "ok"}
    lines: list[list[Cell]] = []
    for (data, dealing), record in found.items():
        work, least_work = of_record(record, "work_imbalance"), of_record(record, "work_imbalance_lower_bound")
        sent, bound = (of_record(record, f"comm_bytes_{name}").times(MB) for name in ("per_gpu", "lower_bound"))
        lines.append([data, dealing, work, least_work, sent, bound, payload_over_bound(record)])
    heads = columns(
        "lengths; dealing; work of the busiest GPU over mean || .3f; least possible with this dealing || .3f;"
        " sent by Ring | MB per GPU | .1f; lower bound | MB per GPU | .1f; payload / lower bound || .2f"
    )
    return Section(
        f"Work and volume by dealing, {DEALT_GPUS} GPUs",
        text(
            "Work is counted in (query, key) pairs: the busiest GPU's over the mean of all, with Ring. It can be 1 on"
            " every dealing that cuts documents; where documents stay whole, the longest one sets the least. The bound"
            " of the volume is for the dealing: the least that any method which doesn't split heads can send when"
            " tokens lie so. Ring sends whole chunks, so that it is above the bound where a GPU needs a part of a"
            " chunk or passes one on."
        ),
        _figure(served),
        *(_about_bounds({dealing: r for (of, dealing), r in served.items() if of == data}, data) for data in DATA),
        Table("documents-bounds", "Work and volume of Ring against their lower bounds", heads, lines, shown_rows=12),
    )


def _figure(found: dict[tuple[str, str], Record]) -> Figure:
    canvas, axes = new_figure(2, 1, height=3.2, sharey=True)
    tones, numbers = colours(DEALINGS), []
    panels = (("work_imbalance", 1.0, "busiest GPU's work, x mean"), ("comm_bytes_lower_bound", MB, "bound, MB a GPU"))
    with mpl.rc_context(STYLE):
        for axis, (field, factor, label) in zip(axes[0], panels, strict=True):
            for row, data in enumerate(DATA):
                for place, dealing in enumerate(DEALINGS):
                    if (data, dealing) not in found:
                        continue
                    number = of_record(found[data, dealing], field).times(factor)
                    numbers.append(number)
                    name = f"{dealing} ({number.kind})" if row == 0 else None
                    height = 0.8 / len(DEALINGS)
                    y = row + (place - (len(DEALINGS) - 1) / 2) * height
                    axis.barh(y, number.known, height=height, color=tones[dealing], label=name)
            axis.set(xlabel=label)
            axis.set_xscale("symlog", linthresh=1)
            axis.set_yticks(range(len(DATA)), DATA)
            axis.invert_yaxis() if axis is axes[0, 0] else None
        canvas.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7, frameon=False
        )
    note = "Left: how unequal the work is. Right: the least that has to be sent."
    return Figure("documents-bounds", "Balance and volume by dealing", canvas, sources(numbers), note)


def _about_bounds(found: dict[str, Record], data: str) -> Text:
    """The most even dealing, the one that needs least, and whether they are the same."""
    work = {name: of_record(record, "work_imbalance") for name, record in found.items()}
    bound = {name: of_record(record, "comm_bytes_lower_bound").times(MB) for name, record in found.items()}
    even = min(work, key=lambda name: (round(work[name].known, 3), bound[name].known))
    lean = min(bound, key=lambda name: (round(bound[name].known, 1), work[name].known))
    shared = {"data": data, "even": even, "work": work[even], "needs": bound[even]}
    if even == lean:
        return text(
            "{data}: {even} is the most even dealing ({work:.3f} times the mean) and needs least ({needs:.1f} MB a"
            " GPU): there is nothing to trade.",
            **shared,
        )
    return text(
        "{data}: {even} is the most even dealing ({work:.3f} times the mean) and needs at least {needs:.1f} MB a GPU;"
        " {lean} needs least ({least:.1f} MB), with a busiest GPU at {uneven:.2f} times the mean.",
        lean=lean,
        least=bound[lean],
        uneven=work[lean],
        **shared,
    )


def shares(runs: Runs) -> Section:
    """What is sent on one pack, as a share of what each method sends with full attention."""
    pairs = [(method, dealing) for method in VARIANTS for dealing in DEALINGS]
    packed = runs.by_key({(m, d): asked(SHARED_DATA, DEALT_GPUS, m, layout=d, **VARIANTS[m]) for m, d in pairs})
    dense = runs.by_key({method: _dense(method) for method in VARIANTS})
    share: dict[tuple[str, str], Number] = {}
    lines: list[list[Cell]] = []
    for method in VARIANTS:
        whole = of_record(dense[method], "comm_bytes_per_gpu")
        for dealing in DEALINGS:
            sent = of_record(packed[method, dealing], "comm_bytes_per_gpu")
            share[method, dealing] = sent.over(whole)
        lines.append([method, packed[method, DEALINGS[0]].variant or "", whole.times(MB)])
        lines[-1] += [share[method, dealing].times(100) for dealing in DEALINGS]
    heads = columns(
        "method; variant; full attention | MB per GPU | .1f; " + "; ".join(f"{d} | % | .1f" for d in DEALINGS)
    )
    return Section(
        "What nobody needs is not sent",
        text(
            "One pack ({data}, {gpus} GPUs), and one variant of each method. A chunk of keys that no later block of the"
            " receiver sees, and that it does not pass on to a GPU that needs it, is not sent; nor is a partial result"
            " that nothing was added to. The table has what is sent as a share of the same method's volume with full"
            " attention.",
            data=SHARED_DATA,
            gpus=DEALT_GPUS,
        ),
        _about_shares(share),
        Table("documents-shares", "Volume on a pack as a share of full attention", heads, lines),
    )


def _dense(method: str) -> Any:
    """The point with full attention, where everything is sent."""
    nodes = {"nodes": DEALT_GPUS // NODE} if method == "tokenring" else {}
    keys = {"gpus": DEALT_GPUS, "seqlen": f"{TOKENS * DEALT_GPUS}k", "causal": False, "layout": "contiguous"}
    return point(method=method, **keys, **SETTING, **nodes, **VARIANTS[method])


def _about_shares(share: dict[tuple[str, str], Number]) -> Text:
    known = {key: number for key, number in share.items() if number.value is not None}
    by_dealing = {d: [n for (_, other), n in known.items() if other == d] for d in DEALINGS}
    by_dealing = {d: numbers for d, numbers in by_dealing.items() if numbers}
    ring = {d: number for (method, d), number in known.items() if method == "ring"}
    saved = derived(lambda low: 1 - low, least(ring.values()))
    return text(
        "By dealing, the share that is sent, from the method with least to the one with most: "
        + ", ".join(f"{d} {{low_{d}:.0%}} to {{high_{d}:.0%}}" for d in by_dealing)
        + ". Ring saves up to {saved:.0%} ({dealing}).",
        saved=saved,
        dealing=min(ring, key=lambda d: ring[d].known),
        **{f"low_{d}": least(numbers) for d, numbers in by_dealing.items()},
        **{f"high_{d}": most(numbers) for d, numbers in by_dealing.items()},
    )
