"""TokenRing's argument: both directions of links, on a full mesh of cables and on a switch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sp_bench.analysis.figure import Figure, colours, labelled, markers, new_figure, sources
from sp_bench.analysis.number import Number, derived, formula, of_record, record_source
from sp_bench.analysis.plans import busy_links, choice_of, lanes_together
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.table import Cell, Column, Table
from sp_bench.plan.ops import Transfer
from sp_bench.records import Record

METHODS = ("ring", "tokenring")
NAMES = {"ascend_oam": "full mesh (ascend_oam)", "h100_ndr400": "NVSwitch (h100_ndr400)"}
MESH, SWITCH = NAMES
BOARD = 8
"""GPUs that such a node has; larger ones are made up."""
DIRECTIONS_GPUS = (2, 4, 8, 16, 32)
DIRECTIONS_TOKENS = 1024
"""Tokens of a GPU: few, so that transfers set the time on a full mesh."""
TOPOLOGY_GPUS = (2, 4, 8)
TOPOLOGY_TOKENS = (1024, 4096, 16384)
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False, "layout": "contiguous"},
    "causal": {"causal": True, "layout": "zigzag"},
}
FASTER = 1.02
"""A gain below this counts as none."""


def directions(runs: Runs) -> Section:
    """How busy the two directions of links are as n grows."""
    asked = {
        (cluster, n, method): point(
            method=method,
            gpus=n,
            seqlen=n * DIRECTIONS_TOKENS,
            phase="forward",
            cluster=cluster,
            **({"cluster__gpus_per_node": n} if n > BOARD else {}),
            **MASKS["full"],
        )
        for cluster in NAMES
        for n in DIRECTIONS_GPUS
        for method in METHODS
    }
    found = dict(zip(asked, runs.ask(asked.values()), strict=True))
    both = {n: _both_steps(found[MESH, n, "tokenring"]) for n in DIRECTIONS_GPUS}
    shares = {key: _pair_of_directions(record) for key, record in found.items()}
    lines: list[list[Cell]] = []
    for n in DIRECTIONS_GPUS:
        lines.append([n, both[n], _lanes(found[MESH, n, "tokenring"])])
        lines[-1] += [share for cluster in NAMES for method in METHODS for share in shares[cluster, n, method]]
    columns = [Column("GPUs"), Column("steps that send both", "", ".2f"), Column("time with both", "", ".2f")]
    for network in ("cable", "port"):
        ways = ("busiest", "its reverse") if network == "cable" else ("out", "in")
        columns += [Column(f"{method}, {network} {way}", "", ".2f") for method in METHODS for way in ways]
    return Section(
        "Both directions of links as n grows",
        [
            text(
                "The paper: Ring uses one direction of its links, TokenRing both, and the more the more GPUs there"
                " are. Counted from the plan: the share of TokenRing's steps that send both Q and a partial output."
                " Simulated, forward, full attention, {tokens} tokens to a GPU: the share of the time in which both"
                " are under way on a GPU, and how busy links are, which is their bytes over what they carry at full"
                " rate in that time. Nodes of more than {board} GPUs are made up, with the same rates for each GPU.",
                tokens=_setting(DIRECTIONS_TOKENS),
                board=_setting(BOARD),
            ),
            Table("tokenring-directions", "Share of steps and of time, 0 to 1", columns, lines),
            _directions_figure(shares),
            _about_directions(both, shares),
        ],
    )


def _setting(value: float) -> Number:
    return Number(value, "computed", (formula("tokenring-setting", "what was asked for", "this study"),))


def _both_steps(record: Record) -> Number:
    """The share of TokenRing's steps that send Q and a partial output."""
    plan = choice_of(record).plans["forward"]
    sent = {(step, op.carries) for op, step in zip(plan.ops, plan.steps, strict=True) if isinstance(op, Transfer)}
    steps = range(max(plan.steps) + 1)
    share = sum((step, "q") in sent and (step, "o") in sent for step in steps) / len(steps)
    return Number(share, "computed", (record_source(record),))


def _lanes(record: Record) -> Number:
    return Number(lanes_together(record, ("q", "o"))[0], "simulated", (record_source(record),))


def _pair_of_directions(record: Record) -> tuple[Number, Number]:
    """How busy the busiest cable and the one back are or, of a switch, the busiest port out and in."""
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
    canvas, axes = new_figure(2, height=3.3, sharey=True)
    colour, marker = colours(METHODS), markers(METHODS)
    for axis, (cluster, name) in zip(axes[0], NAMES.items(), strict=True):
        ways = ("busiest cable", "the cable back") if cluster == MESH else ("port out", "port in")
        for method in METHODS:
            for which, style in enumerate(("-", "--")):
                axis.plot(
                    DIRECTIONS_GPUS,
                    [shares[cluster, n, method][which].known for n in DIRECTIONS_GPUS],
                    style,
                    color=colour[method],
                    marker=marker[method],
                    markerfacecolor="none" if which else None,
                    markersize=7 if which else 4,
                    label=labelled(f"{method}, {ways[which]}", "simulated"),
                )
        axis.set_xscale("log", base=2)
        axis.set(title=name, xlabel="GPUs in a node", xticks=DIRECTIONS_GPUS, ylim=(-0.04, 1.04))
        axis.set_xticklabels(map(str, DIRECTIONS_GPUS))
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=7)
    axes[0, 0].set_ylabel("share of the time busy")
    used = [number for pair in shares.values() for number in pair]
    return Figure(
        "tokenring-directions",
        "How busy links are in each direction, forward",
        canvas,
        sources(used),
        "On a switch out and in of a port coincide. Nodes of 16 and 32 are made up.",
    )


def _about_directions(both: dict[int, Number], shares: dict[tuple[str, int, str], tuple[Number, Number]]) -> Text:
    most = DIRECTIONS_GPUS[-1]
    grows = all(both[a].known <= both[b].known for a, b in zip(DIRECTIONS_GPUS, DIRECTIONS_GPUS[1:], strict=False))
    ring_out, ring_in = shares[SWITCH, BOARD, "ring"]
    even = abs(ring_out.known - ring_in.known) < 1e-9
    back_ring, back_token = shares[MESH, BOARD, "ring"][1], shares[MESH, BOARD, "tokenring"][1]
    return text(
        "TokenRing sends both in {few:.0%} of its steps on 4 GPUs and in {many:.0%} on {most}: the paper's claim "
        + ("is reproduced" if grows else "is not reproduced")
        + ". That Ring leaves one direction idle is true of cables: on the full mesh of {board}, the cable back of its"
        " busiest one is busy {back_ring:.0%} of the time. TokenRing's is busy {back_token:.0%}, as partial outputs go"
        " straight to their owners over all cables rather than back along the ring. On a switch "
        + ("it is not true" if even else "it is")
        + ": every port sends and receives in Ring too ({out:.0%} and {into:.0%}).",
        few=both[4],
        many=both[most],
        most=_setting(most),
        board=_setting(BOARD),
        back_ring=back_ring,
        back_token=back_token,
        out=ring_out,
        into=ring_in,
    )


def topologies(runs: Runs) -> Section:
    """Both methods on a full mesh and on a switch."""
    asked = {
        (cluster, mask, tokens, n, method): point(
            method=method, gpus=n, seqlen=n * tokens, phase="forward", cluster=cluster, **MASKS[mask]
        )
        for cluster in NAMES
        for mask in MASKS
        for tokens in TOPOLOGY_TOKENS
        for n in TOPOLOGY_GPUS
        for method in METHODS
    }
    found = dict(zip(asked, runs.ask(asked.values()), strict=True))
    lines: list[list[Cell]] = []
    gains: dict[tuple[str, str, int, int], Number] = {}
    for cluster, mask, tokens, n, method in asked:
        if method == "ring":
            ring, token = (found[cluster, mask, tokens, n, m] for m in METHODS)
            times = [of_record(record, "forward_ms_median") for record in (ring, token)]
            gains[cluster, mask, tokens, n] = times[0].over(times[1])
            lines.append([NAMES[cluster], mask, tokens, n, times[0], str(ring.bound_by), times[1]])
            lines[-1] += [str(token.bound_by), gains[cluster, mask, tokens, n]]
    columns = [Column("nodes"), Column("mask"), Column("tokens of a GPU"), Column("GPUs"), Column("ring", "ms", ".4g")]
    columns += [Column("ring bound by"), Column("tokenring", "ms", ".4g"), Column("tokenring bound by")]
    columns += [Column("ring / tokenring", "", ".2f")]
    table = Table("tokenring-topologies", "Forward passes within a node", columns, lines, shown_rows=18)
    return Section(
        "Full mesh against NVSwitch",
        [
            text(
                "The paper: the advantage becomes more pronounced with more GPUs and on a full mesh; it had none to"
                " test on. Simulated forward passes within a node of {board}, causal with the zigzag layout (where"
                " TokenRing sends less, see case study II) and full.",
                board=_setting(BOARD),
            ),
            _topologies_figure(gains),
            table,
            *(_about_topology(cluster, gains) for cluster in NAMES),
            _about_blocks(list(found.values()), list(gains.values())),
        ],
    )


def _about_blocks(records: Sequence[Record], gains: Sequence[Number]) -> Text:
    """`records` of ring and tokenring in turn, and their ratios."""
    pairs = zip(records[::2], records[1::2], gains, strict=True)
    bound = [gain for ring, token, gain in pairs if ring.bound_by == token.bound_by == "compute"]
    slower = [gain for gain in bound if gain.known < 1]
    return text(
        "Where blocks set the time of both, TokenRing is the slower one at {slower:.0f} of {bound:.0f} points, down to"
        " {low:.2f}: its partial outputs are folded in kernels of their own when they are home, and the last ones"
        " travel when all blocks are done.",
        slower=derived(lambda *_: len(slower), *bound),
        bound=derived(lambda *_: len(bound), *bound),
        low=_extreme(min, bound),
    )


def _extreme(function: Any, numbers: Sequence[Number]) -> Number:
    return derived(lambda *values: function(values), *numbers)


def _about_topology(cluster: str, gains: dict[tuple[str, str, int, int], Number]) -> Text:
    here = {key[1:]: gain for key, gain in gains.items() if key[0] == cluster}
    faster = [gain for gain in here.values() if gain.known > FASTER]
    high = _extreme(max, list(here.values()))
    mask, tokens, n = next(key for key, gain in here.items() if gain.value == high.value)
    along = [here[mask, tokens, other].known for other in TOPOLOGY_GPUS]
    grows = "grows with the GPUs" if along == sorted(along) else "does not grow steadily with the GPUs"
    what = f"its best is {{high:.2f}} times as fast ({mask} mask, {{tokens:.0f}} tokens, {{n:.0f}} GPUs), and {grows}"
    none = "so it has no advantage there: the best ratio is {high:.2f} ({tokens:.0f} tokens, {n:.0f} GPUs)"
    return text(
        f"{NAMES[cluster]}: TokenRing is more than 2% faster than Ring at {{faster:.0f}} of {{all:.0f}} points; "
        + (what if faster else none)
        + ".",
        faster=derived(lambda *_: len(faster), *here.values()),
        all=derived(lambda *_: len(here), *here.values()),
        high=high,
        tokens=_setting(tokens),
        n=_setting(n),
    )


def _topologies_figure(gains: dict[tuple[str, str, int, int], Number]) -> Figure:
    canvas, axes = new_figure(2, height=3.2, sharey=True)
    tones = colours([f"{tokens} tokens of a GPU" for tokens in TOPOLOGY_TOKENS])
    for axis, (cluster, name) in zip(axes[0], NAMES.items(), strict=True):
        for place, (tokens, tone) in enumerate(zip(TOPOLOGY_TOKENS, tones.values(), strict=True)):
            for mask, style in zip(MASKS, ("-", "--"), strict=True):
                along = [gains[cluster, mask, tokens, n].known for n in TOPOLOGY_GPUS]
                label = f"{tokens} tokens, {mask}"
                axis.plot(TOPOLOGY_GPUS, along, style, color=tone, marker="osD"[place], markersize=5, label=label)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set(title=name, xlabel="GPUs", xticks=TOPOLOGY_GPUS)
        axis.set_xticklabels(map(str, TOPOLOGY_GPUS))
    axes[0, 0].set_ylabel("time of ring / tokenring\n(simulated)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3)
    return Figure(
        "tokenring-topologies",
        "Ring's time over TokenRing's within a node, forward",
        canvas,
        sources(list(gains.values())),
        "Above 1 TokenRing is faster. Tokens are those of a GPU.",
    )
