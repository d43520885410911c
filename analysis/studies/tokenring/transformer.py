"""TokenRing on a diffusion transformer (case study I), and its argument for both directions of links."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np

from sp_bench.analysis.figure import Figure, Panels, colours, log2_ticks, styles
from sp_bench.analysis.number import Number, computed, count, ends, least, most, of_record, record_source
from sp_bench.analysis.plans import busy_links, choice_of, lanes_together
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, Text, section, words
from sp_bench.analysis.table import Cell
from sp_bench.plan.tensors import O, Q
from sp_bench.records import Record

METHODS = ("ring", "tokenring")
PLACES = (
    ("a10_pcie", 4, 6000),
    ("a10_pcie", 4, 24000),
    ("a10_pcie", 4, 96000),
    ("h100_ndr400", 4, 24000),
    ("h100_ndr400", 8, 24000),
)
"""Clusters, GPUs and tokens. The first is the paper's testbed, with its number of GPUs."""


def sends_both(record: Record) -> Number:
    """The share of steps of a forward that send Q and a partial output."""
    plan = choice_of(record).plans["forward"]
    sent = {(plan.steps[index], op.tensor) for index, op in plan.transfers}
    steps = range(max(plan.steps) + 1)
    share = sum((step, Q) in sent and (step, O) in sent for step in steps) / len(steps)
    return computed(share, record_source(record))


def asked(cluster: str, gpus: int, seqlen: int, method: str, workload: str) -> Point:
    """The step of DiT-XL, or the forward of its attention alone."""
    keys = {"model": "dit_xl", "cluster": cluster, "gpus": gpus, "seqlen": seqlen, "method": method}
    phase = {"phase": "forward"} if workload == "attention" else {}
    return point(workload=workload, layout="contiguous", mode="simulate", **keys, **phase)


def dit(runs: Runs) -> Section:
    """DiT-XL by Ring and by TokenRing."""
    records = runs.grid(lambda p, m, kind: asked(*p, method=m, workload=kind), PLACES, METHODS, ("attention", "dit"))
    rows: list[list[Cell]] = []
    gains: dict[str, list[Number]] = {"": [], "_forward": [], "_step": []}
    fields = (("attention", "forward_ms_median"), ("dit", "forward_ms_median"), ("dit", "step_ms_median"))
    for place in PLACES:
        rows.append([*place])
        for of_name, (kind, field) in zip(gains.values(), fields, strict=True):
            ring, token = (of_record(records[place, method, kind], field) for method in METHODS)
            of_name.append(ring.over(token))
            rows[-1] += [ring, token, ring.over(token)]
    return section(
        "tokenring.dit",
        both=sends_both(records[PLACES[0], "tokenring", "attention"]),
        **dict(x for name, of_name in gains.items() for x in ends(of_name, f"low{name}", f"high{name}").items()),
        times="; ".join(
            f"{name}, Ring | ms; {name}, TokenRing | ms; {name}, Ring / TokenRing || .3f"
            for name in ("attention of a layer", "forward", "step")
        ),
        rows=rows,
    )


NAMES = {"ascend_oam": "full mesh (ascend_oam)", "h100_ndr400": "NVSwitch (h100_ndr400)"}
MESH, SWITCH = NAMES
BOARD = 8
"""GPUs of a node on both clusters. Larger nodes are made up."""
DIRECTIONS_GPUS = (2, 4, 8, 16, 32)
DIRECTIONS_TOKENS = 1024
"""Tokens of a GPU. They are few, so that transfers set the time on a full mesh."""
TOPOLOGY_GPUS = (2, 4, 8)
TOPOLOGY_TOKENS = (1024, 4096, 16384)
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False, "layout": "contiguous"},
    "causal": {"causal": True, "layout": "zigzag"},
}
FASTER = 1.02
"""A method counts as faster from this ratio on."""
Gains = dict[tuple[str, str, int, int], Number]
"""Ring's time over TokenRing's, by cluster, mask, tokens of a GPU and GPUs."""


def directions(runs: Runs) -> Section:
    """The load of the two directions of links, by number of GPUs."""

    def at(cluster: str, n: int, method: str) -> Point:
        larger = {"cluster__gpus_per_node": n} if n > BOARD else {}
        keys = {"method": method, "gpus": n, "seqlen": n * DIRECTIONS_TOKENS, "phase": "forward", "cluster": cluster}
        return point(**keys, **larger, **MASKS["full"])

    records = runs.grid(at, NAMES, DIRECTIONS_GPUS, METHODS)
    both = {n: sends_both(records[MESH, n, "tokenring"]) for n in DIRECTIONS_GPUS}
    shares = {key: _pair_of_directions(record) for key, record in records.items()}
    gpus = DIRECTIONS_GPUS[-1]
    grows = all(both[a].known <= both[b].known for a, b in pairwise(DIRECTIONS_GPUS))
    out, into = shares[SWITCH, BOARD, "ring"]
    ways = [("cable", ("busiest", "its reverse")), ("port", ("out", "in"))]
    values = {"tokens": DIRECTIONS_TOKENS, "board": BOARD}
    values |= {"figure": _directions_figure(shares), "few": both[4], "many": both[gpus], "gpus": gpus}
    values |= {"switch": "does not hold" if abs(out.known - into.known) < 1e-9 else "holds", "out": out, "into": into}
    return section(
        "tokenring.directions",
        **values,
        links="; ".join(f"{m}, {link} {way} || .2f" for link, pair in ways for m in METHODS for way in pair),
        verdict="reproduced" if grows else "not reproduced",
        rows=[
            [
                n,
                both[n],
                _lanes(records[MESH, n, "tokenring"]),
                *(x for c in NAMES for m in METHODS for x in shares[c, n, m]),
            ]
            for n in DIRECTIONS_GPUS
        ],
        **{method: shares[MESH, BOARD, name][1] for method, name in (("ring", "ring"), ("token", "tokenring"))},
    )


def _lanes(record: Record) -> Number:
    return Number(lanes_together(record, ("q", "o"))[0], "simulated", (record_source(record),))


def _pair_of_directions(record: Record) -> tuple[Number, Number]:
    """The busy shares of the busiest cable and its reverse or, on a switch, of the busiest port out and in."""
    links = busy_links(record)
    if "pair" in links:
        node = int(np.sqrt(links["pair"].size))
        cables = links["pair"].reshape(node, node)
        one, other = divmod(int(cables.argmax()), node)
        shares = cables[one, other], cables[other, one]
    else:
        shares = links["port out"].max(), links["port in"].max()
    first, second = (Number(float(share), "simulated", (record_source(record),)) for share in shares)
    return first, second


def _directions_figure(shares: dict[tuple[str, int, str], tuple[Number, Number]]) -> Figure:
    panels = Panels(2, height=3.3, sharey=True)
    for axis, (cluster, name) in zip(panels.axes[0], NAMES.items(), strict=True):
        ways = ("busiest cable", "its reverse") if cluster == MESH else ("port out", "port in")
        for (method, style), which in product(styles(METHODS).items(), (0, 1)):
            more = {"linestyle": ("-", "--")[which], "markersize": (4, 7)[which]}
            points = {n: shares[cluster, n, method][which] for n in DIRECTIONS_GPUS}
            face = "none" if which else None
            panels.line(points, f"{method}, {ways[which]}", axis=axis, markerfacecolor=face, **style, **more)
        log2_ticks(axis, DIRECTIONS_GPUS)
        axis.set(title=name, xlabel="GPUs in a node", ylim=(-0.04, 1.04))
        panels.legend(axis, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=7)
    panels.first.set_ylabel("share of the time busy")
    return panels.figure(
        "tokenring-directions",
        "How busy links are in each direction, forward",
        "On a switch, a port is as busy out as in. Nodes of 16 and 32 are made up.",
    )


def topologies(runs: Runs) -> Section:
    """Ring and TokenRing on a full mesh and on a switch."""

    def at(cluster: str, mask: str, tokens: int, n: int, method: str) -> Point:
        return point(method=method, gpus=n, seqlen=n * tokens, phase="forward", cluster=cluster, **MASKS[mask])

    axes = (NAMES, MASKS, TOPOLOGY_TOKENS, TOPOLOGY_GPUS)
    records, rows, bound = runs.grid(at, *axes, METHODS), [], []
    gains: Gains = {}
    for place in product(*axes):
        ring, token = (records[*place, method] for method in METHODS)
        times = [of_record(record, "forward_ms_median") for record in (ring, token)]
        gains[place] = times[0].over(times[1])
        bound += [gains[place]] if ring.bound_by == token.bound_by == "compute" else []
        compared = [times[0], str(ring.bound_by), times[1], str(token.bound_by), gains[place]]
        rows.append([NAMES[place[0]], *place[1:], *compared])
    values = {"board": BOARD, "figure": _topologies_figure(gains), "rows": rows}
    values |= {"slower": count(bound, lambda gain: gain < 1), "bound": count(bound), "low": least(bound)}
    return section("tokenring.topologies", **values, about=[_about_topology(cluster, gains) for cluster in NAMES])


def _about_topology(cluster: str, gains: Gains) -> Text:
    of_cluster = {key[1:]: gain for key, gain in gains.items() if key[0] == cluster}
    faster, high = count(of_cluster.values(), lambda gain: gain > FASTER), most(of_cluster.values())
    mask, tokens, n = next(key for key, gain in of_cluster.items() if gain.value == high.value)
    along = [of_cluster[mask, tokens, other].known for other in TOPOLOGY_GPUS]
    grows = "grows with the GPUs" if along == sorted(along) else "does not grow steadily with the GPUs"
    values = {"name": NAMES[cluster], "faster": faster, "all": count(of_cluster.values()), "high": high, "mask": mask}
    values |= {"tokens": tokens, "n": n}
    return words(
        "tokenring.topology", **values, verdict=f", and {grows}" if faster.known else ": it has no advantage there"
    )


def _topologies_figure(gains: Gains) -> Figure:
    panels = Panels(2, height=3.2, sharey=True)
    tones = colours([f"{tokens} tokens of a GPU" for tokens in TOPOLOGY_TOKENS]).values()
    for axis, (cluster, name) in zip(panels.axes[0], NAMES.items(), strict=True):
        for tokens, tone, marker in zip(TOPOLOGY_TOKENS, tones, "osD", strict=True):
            for mask, style in zip(MASKS, ("-", "--"), strict=True):
                along = {n: gains[cluster, mask, tokens, n] for n in TOPOLOGY_GPUS}
                look = {"color": tone, "marker": marker, "linestyle": style, "markersize": 5}
                panels.line(along, f"{tokens} tokens, {mask}", axis=axis, **look)
        axis.axhline(1.0, color="black", linewidth=0.8)
        log2_ticks(axis, TOPOLOGY_GPUS)
        axis.set(title=name, xlabel="GPUs")
    panels.first.set_ylabel("time of ring / tokenring")
    panels.legend_below(3, fontsize=7)
    return panels.figure(
        "tokenring-topologies",
        "Ring's time over TokenRing's within a node, forward",
        "Above 1 TokenRing is faster. Tokens are those of a GPU.",
    )
