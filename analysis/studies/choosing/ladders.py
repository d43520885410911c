"""Where each paper's claim stops holding: the range of links or tokens in which simulated records confirm it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from sp_bench.analysis.figure import Figure, Panels, styles
from sp_bench.analysis.number import Number, count, derived, least, of_record
from sp_bench.analysis.paper_tables import claims
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.choosing.places import CLUSTERS, SEQLENS, grid
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.records import Record

GAIN = 1.02
"""A method counts as faster from this ratio on, as the simulator is not more exact."""
LADDER_GPUS = 64
NIC_GB_PER_S = (3, 6, 12, 24, 47, 94, 188, 370)
NIC_SEQLEN = "512k"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of a GPU, in units of 1024."""
RIVALS = ("striped", "tokenring", "startrail", "usp", "mesh")
STRIPED_GPUS = (8, 64)
STRIPED_TOKENS = tuple(256 * 2**i for i in range(10))
"""Tokens of a GPU."""
RING_POINTS = (("ascend_oam", (2, 4, 8)), ("h100_ndr400", (2, 4, 8)), ("a10_pcie", (2, 4)))
RING_TOKENS = (1, 4, 16)
"""Tokens of a GPU, in units of 1024."""
Axis = tuple[str, str]
"""The unit of a ladder's axis, and the format of its values."""
NIC: Axis = ("GB/s", ".3g")
PER_GPU: Axis = ("tokens of a GPU", ".0f")
Times = dict[tuple[str, float], Record]
"""Records by method and position on the axis."""


@dataclass(frozen=True)
class Ladder:
    """The speed of one method over another's, at positions along an axis."""

    unit: str
    format: str
    """The format of a position."""
    gains: Mapping[float, Number]
    """The ratios of speeds by position, in increasing order of positions."""

    def crossings(self) -> list[Number]:
        """The positions where the ratio crosses GAIN, interpolated between two records in logarithms."""
        found = []
        for (x0, gain0), (x1, gain1) in pairwise(self.gains.items()):
            if (gain0.known > GAIN) != (gain1.known > GAIN):
                found.append(derived(_between(x0, x1), gain0, gain1))
        return found

    def words(self, one: str, other: str) -> Text:
        """A sentence: in which range `one` is faster than `other`, and where the range ends."""
        first, *_, last = self.gains.values()
        low, *_, high = (f"{x:{self.format}}" for x in self.gains)
        numbers = {"first": first, "last": last, "lowest": least(self.gains.values())}
        crossings = self.crossings()
        parts = []
        for i, crossing in enumerate(crossings):
            numbers[f"at{i}"] = crossing
            before = (first.known > GAIN) == (i % 2 == 0)
            parts.append(f"{'stops' if before else 'begins'} being faster from {{at{i}:{self.format}}} {{unit}} on")
        if not crossings:
            parts = [f"is faster {'everywhere' if first.known > GAIN else 'nowhere'} in this range"]
        return text(
            "{one} against {other}: {first:.2f} times as fast at {low} {unit}, {last:.2f} at {high}, {lowest:.2f} at"
            f" least; it {', and '.join(parts)}.",
            **numbers,
            one=one,
            other=other,
            low=low,
            high=high,
            unit=self.unit,
        )


def _between(x0: float, x1: float) -> Callable[[float, float], float]:
    """The position between x0 and x1 where the ratio is GAIN, by the ratios at both, interpolated in logarithms."""

    def at(gain0: float, gain1: float) -> float:
        return x0 * (x1 / x0) ** (math.log(GAIN / gain0) / math.log(gain1 / gain0))

    return at


def limits(runs: Runs) -> Section:
    """The claims of the papers on other clusters and sizes, and where they stop holding."""
    by_nic, by_tokens = _by_nic(runs), _by_tokens(runs)
    return Section(
        "Where the papers' claims stop holding",
        text(
            "Each sentence is found by searching simulated records, forward and backward, causal, 32 heads of 128. A"
            " method counts as faster if it is at least {gain:g} times as fast. The end of a range is interpolated"
            " between the two records around it. The ranges are those of these cluster files, not of the papers'"
            " machines.",
            gain=GAIN,
        ),
        *_about_mesh(runs),
        text(
            "Links between nodes: {seqlen} tokens on {gpus} H100, with slower and faster NICs (GB/s of each GPU in each"
            " direction).",
            seqlen=NIC_SEQLEN,
            gpus=LADDER_GPUS,
        ),
        _ladder_figure(by_nic, NIC, "choosing-nic", "NIC of a GPU, GB/s", "Steps by the rate of the NICs"),
        *(_ladder(by_nic, "mesh", other, NIC).words("Mesh", other) for other in RIVALS[:-1]),
        text("Tokens of a GPU: the same GPUs with cluster=h100_ndr400 as it is."),
        _ladder_figure(by_tokens, PER_GPU, "choosing-tokens", "tokens of a GPU", "Steps by the tokens of a GPU"),
        *(_ladder(by_tokens, "mesh", other, PER_GPU).words("Mesh", other) for other in RIVALS[:-1]),
        *_about_striped(runs),
        *_about_tokenring(runs),
        _table(by_nic, by_tokens),
    )


def _point(method: str, **keys: Any) -> Point:
    nodes = {"nodes": LADDER_GPUS // 8} if method == "tokenring" else {}
    return point(method=method, gpus=LADDER_GPUS, **keys, **nodes)


def _by_nic(runs: Runs) -> Times:
    places = product(RIVALS, map(float, NIC_GB_PER_S))
    return runs.by_key({(m, x): _point(m, seqlen=NIC_SEQLEN, cluster__inter__bytes_per_s=x * 1e9) for m, x in places})


def _by_tokens(runs: Runs) -> Times:
    places = product(RIVALS, TOKENS)
    return runs.by_key({(m, 1024.0 * tokens): _point(m, seqlen=1024 * tokens * LADDER_GPUS) for m, tokens in places})


def _ladder(found: Times, one: str, other: str, axis: Axis) -> Ladder:
    """The speed of `one` over that of `other`, where both can be served."""
    places = [x for method, x in found if method == one]
    ok = [x for x in places if found[one, x].status == found[other, x].status == "ok"]
    return Ladder(*axis, {x: _gain(found[one, x], found[other, x]) for x in ok})


def _gain(one: Record, other: Record) -> Number:
    return of_record(other, "step_ms_median").over(of_record(one, "step_ms_median"))


def _ladder_figure(found: Times, unit: Axis, name: str, label: str, title: str) -> Figure:
    panels = Panels(height=2.9)
    axis = panels.first
    for method, style in styles(RIVALS).items():
        panels.line(_ladder(found, method, "striped", unit).gains, method, markersize=5, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set(xlabel=label, ylabel="times as fast as striped")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    panels.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return panels.figure(name, title)


def _about_mesh(runs: Runs) -> list[Text]:
    """The paper's speedup over Ring on 256 GPUs, on each cluster."""
    found, paper = grid(runs), claims("mesh_claims")["speedup over ring, 256 GPUs, maximum"]
    parts = []
    for cluster in CLUSTERS:
        keys = [(cluster, 32, seqlen, 256) for seqlen in SEQLENS]
        gains = [_gain(found[key, "mesh"], found[key, "striped"]) for key in keys]
        ratios = ", ".join(f"{{g{i}:.2f}}" for i in range(len(gains)))
        parts.append(
            text(
                f"{{cluster}}: Mesh on 256 GPUs is {ratios} times as fast as striped Ring at {{seqlens}} tokens. The"
                " paper has at most {paper} on its cluster; {above:.0f} of these ratios reach it.",
                cluster=cluster,
                seqlens=", ".join(SEQLENS),
                paper=paper,
                above=count(gains, lambda gain: gain >= paper.known),
                **{f"g{i}": gain for i, gain in enumerate(gains)},
            )
        )
    return parts


def _about_striped(runs: Runs) -> list[Text]:
    """The range in which Ring gains from a striped layout."""
    layouts, places = ("striped", "contiguous"), list(product(STRIPED_GPUS, STRIPED_TOKENS))
    found = runs.by_key(
        {
            (gpus, tokens, layout): point(method="ring", gpus=gpus, seqlen=tokens * gpus, layout=layout)
            for gpus, tokens in places
            for layout in layouts
        }
    )
    parts = []
    for gpus in STRIPED_GPUS:
        gains = {tokens: _gain(*(found[gpus, tokens, layout] for layout in layouts)) for tokens in STRIPED_TOKENS}
        where = "in a node" if gpus <= 8 else "across nodes"
        name = f"Ring on {gpus} H100 {where}, a striped layout"
        parts.append(Ladder(*PER_GPU, gains).words(name, "a contiguous one"))
    return parts


def _about_tokenring(runs: Runs) -> list[Text]:
    """By topology, the GPUs and tokens at which TokenRing gains from full duplex links."""
    parts = []
    for cluster, sizes in RING_POINTS:
        asked = {
            (n, tokens, method): point(
                method=method, gpus=n, seqlen=1024 * tokens * n, cluster=cluster, layout="zigzag"
            )
            for n, tokens, method in product(sizes, RING_TOKENS, ("ring", "tokenring"))
        }
        found = runs.by_key(asked)
        gains = {(n, t): _gain(found[n, t, "tokenring"], found[n, t, "ring"]) for n, t in product(sizes, RING_TOKENS)}
        up_to = {n: tokens for (n, tokens), gain in gains.items() if gain.known > GAIN}
        n, tokens = highest = max(gains, key=lambda place: gains[place].known)
        where = "; ".join(f"{n} GPUs up to {tokens}k tokens each" for n, tokens in up_to.items())
        parts.append(
            text(
                "{cluster}, one node, forward and backward, zigzag: TokenRing is faster than Ring {where}. The highest"
                " ratio is {high:.2f}, on {n} GPUs with {tokens}k tokens each.",
                cluster=cluster,
                where=f"at {where}" if where else "nowhere",
                high=gains[highest],
                n=n,
                tokens=tokens,
            )
        )
    return parts


def _table(by_nic: Times, by_tokens: Times) -> Table:
    """All points of both axes, with the reason where a point can't be served."""
    lines: list[list[Cell]] = []
    for axis, found in (("NIC, GB/s", by_nic), ("tokens of a GPU", by_tokens)):
        for (method, x), record in found.items():
            lines.append([axis, int(x), method, of_record(record, "step_ms_median")])
            lines[-1].append(str(record.bound_by or f"{record.status}: {record.error}"))
    heads = columns("what varies; its value; method; step | ms; bound by")
    return Table("choosing-ladders", "Steps by NIC rate and by tokens of a GPU", heads, lines, shown_rows=10)
