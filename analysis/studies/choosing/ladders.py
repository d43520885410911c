"""The limits of each paper's claim: the range of links or tokens in which simulated records confirm it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from sp_bench.analysis.figure import Figure, Panels, styles
from sp_bench.analysis.number import Number, count, derived, least, step_ms
from sp_bench.analysis.paper_tables import claims
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, Text, listed, section, words
from sp_bench.analysis.studies.choosing.places import CLUSTERS, SEQLENS, grid
from sp_bench.analysis.table import Cell
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
        return [
            derived(_between(x0, x1), gain0, gain1)
            for (x0, gain0), (x1, gain1) in pairwise(self.gains.items())
            if (gain0.known > GAIN) != (gain1.known > GAIN)
        ]

    def words(self, one: str, other: str) -> Text:
        """A sentence: in which range `one` is faster than `other`, and where the range ends."""
        first, *_, last = self.gains.values()
        low, *_, high = (f"{x:{self.format}}" for x in self.gains)
        parts = []
        for i in range(len(crossings := self.crossings())):
            before = (first.known > GAIN) == (i % 2 == 0)
            parts.append(f"{'stops' if before else 'begins'} being faster from {{at{i}:{self.format}}} {self.unit} on")
        if not crossings:
            parts = [f"is faster {'everywhere' if first.known > GAIN else 'nowhere'} in this range"]
        ends = Text(", and ".join(parts), {f"at{i}": crossing for i, crossing in enumerate(crossings)})
        gains = {"first": first, "last": last, "lowest": least(self.gains.values())}
        return words("choosing.ladder", **gains, one=one, other=other, low=low, high=high, unit=self.unit, ends=ends)


def _between(x0: float, x1: float) -> Callable[[float, float], float]:
    """The position between x0 and x1 where the ratio is GAIN, by the ratios at both, interpolated in logarithms."""
    return lambda gain0, gain1: x0 * (x1 / x0) ** (math.log(GAIN / gain0) / math.log(gain1 / gain0))


def limits(runs: Runs) -> Section:
    """The claims of the papers on other clusters and sizes, and where they stop holding."""
    by_nic, by_tokens = _by_nic(runs), _by_tokens(runs)
    rows: list[list[Cell]] = []
    for axis, by_place in (("NIC, GB/s", by_nic), ("tokens of a GPU", by_tokens)):
        for (method, x), record in by_place.items():
            bound = str(record.bound_by or f"{record.status}: {record.error}")
            rows.append([axis, int(x), method, step_ms(record), bound])
    values = {"gain": GAIN, "about_mesh": _about_mesh(runs), "seqlen": NIC_SEQLEN, "gpus": LADDER_GPUS}
    values |= {"about_striped": _about_striped(runs), "about_tokenring": _about_tokenring(runs), "rows": rows}
    return section(
        "choosing.limits",
        **values,
        nics=_figure(by_nic, NIC, "choosing-nic", "NIC of a GPU, GB/s", "Steps by the rate of the NICs"),
        about_nics=[_ladder(by_nic, "mesh", other, NIC).words("Mesh", other) for other in RIVALS[:-1]],
        tokens=_figure(by_tokens, PER_GPU, "choosing-tokens", "tokens of a GPU", "Steps by the tokens of a GPU"),
        about_tokens=[_ladder(by_tokens, "mesh", other, PER_GPU).words("Mesh", other) for other in RIVALS[:-1]],
    )


def _point(method: str, **keys: Any) -> Point:
    nodes = {"nodes": LADDER_GPUS // 8} if method == "tokenring" else {}
    return point(method=method, gpus=LADDER_GPUS, **keys, **nodes)


def _by_nic(runs: Runs) -> Times:
    def at(method: str, nic: float) -> Point:
        return _point(method, seqlen=NIC_SEQLEN, cluster__inter__bytes_per_s=nic * 1e9)

    return runs.grid(at, RIVALS, map(float, NIC_GB_PER_S))


def _by_tokens(runs: Runs) -> Times:
    by_tokens = runs.grid(lambda method, tokens: _point(method, seqlen=1024 * tokens * LADDER_GPUS), RIVALS, TOKENS)
    return {(method, 1024.0 * tokens): record for (method, tokens), record in by_tokens.items()}


def _ladder(found: Times, one: str, other: str, axis: Axis) -> Ladder:
    """The speed of `one` over that of `other`, where both can be served."""
    ok = [x for method, x in found if method == one and found[one, x].status == found[other, x].status == "ok"]
    return Ladder(*axis, {x: _gain(found[one, x], found[other, x]) for x in ok})


def _gain(one: Record, other: Record) -> Number:
    return step_ms(other).over(step_ms(one))


def _figure(found: Times, unit: Axis, name: str, label: str, title: str) -> Figure:
    panels = Panels(height=2.9)
    for method, style in styles(RIVALS).items():
        panels.line(_ladder(found, method, "striped", unit).gains, method, markersize=5, **style)
    axis = panels.first
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set(xlabel=label, ylabel="times as fast as striped")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    panels.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return panels.figure(name, title)


def _about_mesh(runs: Runs) -> list[Text]:
    """The paper's speedup over Ring on 256 GPUs, on each cluster."""
    records, paper = grid(runs), claims("mesh_claims")["speedup over ring, 256 GPUs, maximum"]
    parts = []
    for cluster in CLUSTERS:
        keys = [(cluster, 32, seqlen, 256) for seqlen in SEQLENS]
        gains = {f"g{i}": _gain(records[key, "mesh"], records[key, "striped"]) for i, key in enumerate(keys)}
        above, seqlens = count(gains.values(), lambda gain: gain >= paper.known), ", ".join(SEQLENS)
        ratios = listed(gains, "{value:.2f}")
        parts.append(words("choosing.mesh", cluster=cluster, ratios=ratios, seqlens=seqlens, paper=paper, above=above))
    return parts


def _about_striped(runs: Runs) -> list[Text]:
    """The range in which Ring gains from a striped layout."""
    records = runs.grid(
        lambda gpus, tokens, layout: point(method="ring", gpus=gpus, seqlen=tokens * gpus, layout=layout),
        *(STRIPED_GPUS, STRIPED_TOKENS, ("striped", "contiguous")),
    )
    parts = []
    for gpus in STRIPED_GPUS:
        gains = {t: _gain(records[gpus, t, "striped"], records[gpus, t, "contiguous"]) for t in STRIPED_TOKENS}
        where = "in a node" if gpus <= 8 else "across nodes"
        name = f"Ring on {gpus} H100 {where}, a striped layout"
        parts.append(Ladder(*PER_GPU, gains).words(name, "a contiguous one"))
    return parts


def _about_tokenring(runs: Runs) -> list[Text]:
    """By topology, the GPUs and tokens at which TokenRing gains from full duplex links."""
    parts = []
    for cluster, sizes in RING_POINTS:

        def at(n: int, tokens: int, method: str, cluster: str = cluster) -> Point:
            return point(method=method, gpus=n, seqlen=1024 * tokens * n, cluster=cluster, layout="zigzag")

        records = runs.grid(at, sizes, RING_TOKENS, ("ring", "tokenring"))
        gains = {
            (n, t): _gain(records[n, t, "tokenring"], records[n, t, "ring"]) for n, t in product(sizes, RING_TOKENS)
        }
        up_to = {n: tokens for (n, tokens), gain in gains.items() if gain.known > GAIN}
        n, tokens = highest = max(gains, key=lambda place: gains[place].known)
        where = "; ".join(f"{n} GPUs up to {tokens}k tokens each" for n, tokens in up_to.items())
        where = f"at {where}" if where else "nowhere"
        best = {"high": gains[highest], "n": n, "tokens": tokens}
        parts.append(words("choosing.tokenring", cluster=cluster, where=where, **best))
    return parts
