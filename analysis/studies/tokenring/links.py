"""TokenRing's argument for both directions of links, on a full mesh of cables and on a switch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from sp_bench.analysis.figure import Figure, Panels, colours, log2_ticks, styles
from sp_bench.analysis.number import Number, count, least, most, of_record, record_source
from sp_bench.analysis.plans import busy_links, lanes_together
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.tokenring.transformer import sends_both
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.records import Record

METHODS = ("ring", "tokenring")
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
    """How busy the two directions of links are, by number of GPUs."""
    asked = {}
    for cluster, n, method in product(NAMES, DIRECTIONS_GPUS, METHODS):
        larger = {"cluster__gpus_per_node": n} if n > BOARD else {}
        keys = {"method": method, "gpus": n, "seqlen": n * DIRECTIONS_TOKENS, "phase": "forward", "cluster": cluster}
        asked[cluster, n, method] = point(**keys, **larger, **MASKS["full"])
    found = runs.by_key(asked)
    both = {n: sends_both(found[MESH, n, "tokenring"]) for n in DIRECTIONS_GPUS}
    shares = {key: _pair_of_directions(record) for key, record in found.items()}
    lines: list[list[Cell]] = []
    for n in DIRECTIONS_GPUS:
        lines.append([n, both[n], _lanes(found[MESH, n, "tokenring"])])
        lines[-1] += [share for cluster in NAMES for method in METHODS for share in shares[cluster, n, method]]
    ways = [("cable", ("busiest", "its reverse")), ("port", ("out", "in"))]
    links = [f"{method}, {link} {way} || .2f" for link, pair in ways for method in METHODS for way in pair]
    heads = columns(
        "; ".join(
            ["GPUs", "share of steps that send both ways || .2f", "share of time that sends both ways || .2f", *links]
        )
    )
    return Section(
        "Both directions of links, by number of GPUs",
        text(
            "The paper says that Ring uses one direction of its links and TokenRing both, more so with more GPUs."
            " Counted from the plan: the share of TokenRing's steps that send both Q and a partial output. Simulated,"
            " forward, full attention, {tokens} tokens on a GPU: the share of the time in which a GPU sends both, and"
            " how busy links are, which is their bytes over the bytes that they carry at full rate in that time. Nodes"
            " of more than {board} GPUs are made up, with the same rates for each GPU.",
            tokens=DIRECTIONS_TOKENS,
            board=BOARD,
        ),
        Table("tokenring-directions", "Share of steps and of time, 0 to 1", heads, lines),
        _directions_figure(shares),
        _about_directions(both, shares),
    )


def _lanes(record: Record) -> Number:
    return Number(lanes_together(record, ("q", "o"))[0], "simulated", (record_source(record),))


def _pair_of_directions(record: Record) -> tuple[Number, Number]:
    """How busy the busiest cable and its reverse are or, on a switch, the busiest port out and in."""
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


def _about_directions(both: dict[int, Number], shares: dict[tuple[str, int, str], tuple[Number, Number]]) -> Text:
    gpus = DIRECTIONS_GPUS[-1]
    grows = all(both[a].known <= both[b].known for a, b in pairwise(DIRECTIONS_GPUS))
    out, into = shares[SWITCH, BOARD, "ring"]
    return text(
        "TokenRing sends both in {few:.0%} of its steps on 4 GPUs and in {many:.0%} on {gpus}: the paper's claim is"
        " {verdict}. Ring does leave one direction of cables idle: on the full mesh of {board}, the reverse of the"
        " busiest cable is busy {ring:.0%} of the time. With TokenRing it is busy {token:.0%}, as partial outputs go"
        " straight to their owners over all cables rather than back along the ring. On a switch the claim {switch}:"
        " with Ring, ports are busy {out:.0%} of the time out and {into:.0%} in.",
        few=both[4],
        many=both[gpus],
        gpus=gpus,
        verdict="reproduced" if grows else "not reproduced",
        board=BOARD,
        ring=shares[MESH, BOARD, "ring"][1],
        token=shares[MESH, BOARD, "tokenring"][1],
        switch="does not hold" if abs(out.known - into.known) < 1e-9 else "holds",
        out=out,
        into=into,
    )


def topologies(runs: Runs) -> Section:
    """Ring and TokenRing on a full mesh and on a switch."""
    places = list(product(NAMES, MASKS, TOPOLOGY_TOKENS, TOPOLOGY_GPUS))
    asked = {
        (cluster, mask, tokens, n, method): point(
            method=method, gpus=n, seqlen=n * tokens, phase="forward", cluster=cluster, **MASKS[mask]
        )
        for cluster, mask, tokens, n in places
        for method in METHODS
    }
    found = runs.by_key(asked)
    lines: list[list[Cell]] = []
    gains: Gains = {}
    for place in places:
        ring, token = (found[*place, method] for method in METHODS)
        times = [of_record(record, "forward_ms_median") for record in (ring, token)]
        gains[place] = times[0].over(times[1])
        lines.append([NAMES[place[0]], *place[1:], times[0], str(ring.bound_by), times[1], str(token.bound_by)])
        lines[-1].append(gains[place])
    heads = columns(
        "nodes; mask; tokens of a GPU; GPUs; Ring | ms; Ring is bound by; TokenRing | ms; TokenRing is bound by;"
        " Ring / TokenRing || .2f"
    )
    return Section(
        "Full mesh against NVSwitch",
        text(
            "The paper says that the advantage grows with more GPUs and on a full mesh, and had none to test on."
            " Simulated forward passes within a node of {board}, with full attention, and causal with the zigzag"
            " layout, where TokenRing sends less (case study II).",
            board=BOARD,
        ),
        _topologies_figure(gains),
        Table("tokenring-topologies", "Forward passes within a node", heads, lines, shown_rows=18),
        *(_about_topology(cluster, gains) for cluster in NAMES),
        _about_blocks(list(found.values()), list(gains.values())),
    )


def _about_blocks(records: Sequence[Record], gains: Sequence[Number]) -> Text:
    """The gains of points that are bound by compute; `records` has ring and tokenring of each point in turn."""
    pairs = zip(records[::2], records[1::2], gains, strict=True)
    bound = [gain for ring, token, gain in pairs if ring.bound_by == token.bound_by == "compute"]
    return text(
        "Where blocks set the time of both, TokenRing is the slower one at {slower:.0f} of {bound:.0f} points, down to"
        " {low:.2f} times Ring's speed. It folds returned partial outputs in separate kernels, and the last ones travel"
        " after all blocks.",
        slower=count(bound, lambda gain: gain < 1),
        bound=count(bound),
        low=least(bound),
    )


def _about_topology(cluster: str, gains: Gains) -> Text:
    here = {key[1:]: gain for key, gain in gains.items() if key[0] == cluster}
    faster, high = count(here.values(), lambda gain: gain > FASTER), most(here.values())
    mask, tokens, n = next(key for key, gain in here.items() if gain.value == high.value)
    along = [here[mask, tokens, other].known for other in TOPOLOGY_GPUS]
    grows = "grows with the GPUs" if along == sorted(along) else "does not grow steadily with the GPUs"
    return text(
        "{name}: TokenRing is more than 2% faster than Ring at {faster:.0f} of {all:.0f} points. Its highest ratio is"
        " {high:.2f} ({mask} mask, {tokens} tokens, {n} GPUs){verdict}.",
        name=NAMES[cluster],
        faster=faster,
        all=count(here.values()),
        high=high,
        mask=mask,
        tokens=tokens,
        n=n,
        verdict=f", and {grows}" if faster.known else ": it has no advantage there",
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
