"""Where each paper's claim stops holding, searched over records: a sentence with numbers for each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sp_bench.analysis.figure import Figure, colours, labelled, markers, new_figure, sources
from sp_bench.analysis.number import Number, derived, of_record
from sp_bench.analysis.paper_tables import claims
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.choosing_grid import CLUSTERS, SEQLENS, grid, setting, tally
from sp_bench.analysis.table import Cell, Column, Table
from sp_bench.records import Record

GAIN = 1.02
"""A method that is faster by less is not faster: the simulator is not better than that."""
LADDER_GPUS = 64
NIC_GB_PER_S = (3, 6, 12, 24, 47, 94, 188, 370)
NIC_SEQLEN = "512k"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Thousands (1024) of tokens of a GPU."""
RIVALS = ("striped", "tokenring", "startrail", "usp", "mesh")
STRIPED_GPUS = (8, 64)
STRIPED_TOKENS = tuple(256 * 2**i for i in range(10))
"""Of a GPU."""
RING_POINTS = (("ascend_oam", (2, 4, 8)), ("h100_ndr400", (2, 4, 8)), ("a10_pcie", (2, 4)))
RING_TOKENS = (1, 4, 16)
Axis = tuple[str, str, str]
"""Of a ladder: name, unit, format."""
NIC: Axis = ("NIC rate", "GB/s", ".3g")
PER_GPU: Axis = ("tokens of a GPU", "tokens of a GPU", ".0f")


@dataclass(frozen=True)
class Ladder:
    """How many times as fast one method is as another, along an axis."""

    axis: str
    unit: str
    format: str
    """How x is written."""
    gains: tuple[tuple[float, Number], ...]
    """(x, gain), x increasing."""

    @property
    def numbers(self) -> list[Number]:
        """The gains."""
        return [gain for _, gain in self.gains]

    def crossings(self) -> list[Number]:
        """Where the gain crosses GAIN, interpolated in the logarithms between two records."""
        found = []
        for (x0, gain0), (x1, gain1) in pairwise(self.gains):
            if (gain0.known > GAIN) != (gain1.known > GAIN):
                found.append(derived(_between(x0, x1), gain0, gain1))
        return found

    def words(self, one: str, other: str) -> Text:
        """The sentence: in which range `one` is faster than `other` and where that ends."""
        (low, first), (high, last) = self.gains[0], self.gains[-1]
        numbers = {"low": setting(low, self.axis), "high": setting(high, self.axis), "first": first, "last": last}
        numbers["least"] = derived(lambda *values: min(values), *self.numbers)
        at_low, at_high = (f"{{{name}:{self.format}}}" for name in ("low", "high"))
        ends = f"{{first:.2f}} times as fast at {at_low} {self.unit}, {{last:.2f}} at {at_high}, {{least:.2f}} at least"
        crossings = self.crossings()
        if not crossings:
            how = "everywhere" if first.known > GAIN else "nowhere"
            return text(f"{one} against {other}: {ends}; it is faster {how} on this ladder.", **numbers)
        parts = []
        for i, crossing in enumerate(crossings):
            numbers[f"at{i}"] = crossing
            before = (first.known > GAIN) == (i % 2 == 0)
            parts.append(f"{'stops' if before else 'begins'} being faster from {{at{i}:{self.format}}} on")
        return text(f"{one} against {other}: {ends}; it {', and '.join(parts)}.", **numbers)


def _between(x0: float, x1: float) -> Any:
    """Where log gain reaches log GAIN between x0 and x1, along log x."""

    def at(gain0: float, gain1: float) -> float:
        share = math.log(GAIN / gain0) / math.log(gain1 / gain0)
        return x0 * (x1 / x0) ** share

    return at


def limits(runs: Runs) -> Section:
    """What the claims of the papers come to elsewhere, and where they stop."""
    by_nic, by_tokens = _nic_ladder(runs), _token_ladder(runs)
    parts = [
        text(
            "Each sentence is searched over simulated records, forward and backward, causal, 32 heads of 128: a method"
            " counts as faster from {gain:.2f} times on. Ends are interpolated between two records that lie on either"
            " side. They are those of these cluster files, not of the papers' machines.",
            gain=setting(GAIN, "gain"),
        ),
        *_about_mesh(runs),
        text(
            f"Links between nodes: {NIC_SEQLEN} tokens on {{gpus:.0f}} H100, whose NICs are made slower and faster"
            " (gigabytes per second each way for each GPU).",
            gpus=setting(LADDER_GPUS, "gpus"),
        ),
        _ladder_figure(by_nic, NIC, "choosing-nic", "NIC of a GPU, GB/s", "Steps by the rate of the NICs"),
        *(_ladder(by_nic, "mesh", other, NIC).words("Mesh", other) for other in RIVALS[:-1]),
        text("Tokens: the same GPUs with cluster=h100_ndr400 as it is, by the tokens of a GPU."),
        _ladder_figure(by_tokens, PER_GPU, "choosing-tokens", "tokens of a GPU", "Steps by the tokens of a GPU"),
        *(_ladder(by_tokens, "mesh", other, PER_GPU).words("Mesh", other) for other in RIVALS[:-1]),
        *_about_striped(runs, by_tokens),
        *_about_tokenring(runs),
        _table(by_nic, by_tokens),
    ]
    return Section("Where the papers' claims stop holding", parts)


Times = dict[tuple[str, float], Record]
"""By method and x."""


def _nic_ladder(runs: Runs) -> Times:
    def asked(method: str, rate: float) -> Any:
        nodes = {"nodes": LADDER_GPUS // 8} if method == "tokenring" else {}
        return point(
            method=method, gpus=LADDER_GPUS, seqlen=NIC_SEQLEN, cluster__inter__bytes_per_s=rate * 1e9, **nodes
        )

    keys = [(method, float(rate)) for method in RIVALS for rate in NIC_GB_PER_S]
    return dict(zip(keys, runs.ask([asked(*key) for key in keys]), strict=True))


def _token_ladder(runs: Runs) -> Times:
    def asked(method: str, tokens: float) -> Any:
        nodes = {"nodes": LADDER_GPUS // 8} if method == "tokenring" else {}
        return point(method=method, gpus=LADDER_GPUS, seqlen=int(tokens) * LADDER_GPUS, **nodes)

    keys = [(method, 1024.0 * tokens) for method in RIVALS for tokens in TOKENS]
    return dict(zip(keys, runs.ask([asked(*key) for key in keys]), strict=True))


def _ladder(found: Times, one: str, other: str, axis: Axis) -> Ladder:
    """How many times as fast as `other` method `one` is."""
    places = [x for method, x in found if method == one]
    ok = [x for x in places if found[one, x].status == found[other, x].status == "ok"]
    return Ladder(*axis, tuple((x, _gain(found[one, x], found[other, x])) for x in ok))


def _gain(one: Record, other: Record) -> Number:
    return of_record(other, "step_ms_median").over(of_record(one, "step_ms_median"))


def _ladder_figure(found: Times, axis_of: Axis, name: str, label: str, title: str) -> Figure:
    canvas, axes = new_figure(height=2.9)
    axis, colour, marker = axes[0, 0], colours(RIVALS), markers(RIVALS)
    used = []
    for method in RIVALS:
        ladder = _ladder(found, method, "striped", axis_of)
        used += ladder.numbers
        axis.plot(
            [x for x, _ in ladder.gains],
            [gain.known for gain in ladder.numbers],
            color=colour[method],
            marker=marker[method],
            markersize=5,
            label=labelled(method, "simulated"),
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set(xlabel=label, ylabel="times as fast as striped")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return Figure(name, title, canvas, sources(used))


def _about_mesh(runs: Runs) -> list[Text]:
    """The paper's speedup over Ring on 256 GPUs, by cluster."""
    found, paper = grid(runs), claims("mesh_claims")["speedup over ring, 256 GPUs, maximum"]
    parts = []
    for cluster in CLUSTERS:
        gains = [
            _gain(found[(cluster, 32, seqlen, 256), "mesh"], found[(cluster, 32, seqlen, 256), "striped"])
            for seqlen in SEQLENS
        ]
        above = sum(gain.known >= paper.known for gain in gains)
        parts.append(
            text(
                f"{cluster}: Mesh on 256 GPUs is "
                + ", ".join(f"{{g{i}:.2f}}" for i in range(len(gains)))
                + f" times as fast as striped Ring at {', '.join(SEQLENS)} tokens. The paper has at most {{paper}} on"
                " its cluster; {above:.0f} of these reach it.",
                above=tally(above, gains, f"ratios on {cluster} as high as the paper's"),
                paper=paper,
                **{f"g{i}": gain for i, gain in enumerate(gains)},
            )
        )
    return parts


def _about_striped(runs: Runs, by_tokens: Times) -> list[Text]:
    """Where the balance of a striped layout is worth nothing."""
    seqlens = {gpus: [tokens * gpus for tokens in STRIPED_TOKENS] for gpus in STRIPED_GPUS}
    asked = {
        (gpus, seqlen, layout): point(method="ring", gpus=gpus, seqlen=seqlen, layout=layout)
        for gpus in STRIPED_GPUS
        for seqlen in seqlens[gpus]
        for layout in ("striped", "contiguous")
    }
    found = dict(zip(asked, runs.ask(asked.values()), strict=True))
    parts = []
    for gpus in STRIPED_GPUS:
        gains = tuple(
            (seqlen / gpus, _gain(found[gpus, seqlen, "striped"], found[gpus, seqlen, "contiguous"]))
            for seqlen in seqlens[gpus]
        )
        where = "in a node" if gpus <= 8 else "across nodes"
        name = f"Ring on {gpus} H100 {where}, a striped layout"
        parts.append(Ladder(*PER_GPU, gains).words(name, "a contiguous one"))
    return parts


def _about_tokenring(runs: Runs) -> list[Text]:
    """By topology, at which GPUs and tokens TokenRing's full duplex brings something."""
    asked = {
        (cluster, n, tokens, method): point(
            method=method, gpus=n, seqlen=1024 * tokens * n, cluster=cluster, layout="zigzag"
        )
        for cluster, sizes in RING_POINTS
        for n in sizes
        for tokens in RING_TOKENS
        for method in ("ring", "tokenring")
    }
    found = dict(zip(asked, runs.ask(asked.values()), strict=True))
    parts = []
    for cluster, sizes in RING_POINTS:
        gains = {
            (n, tokens): _gain(found[cluster, n, tokens, "tokenring"], found[cluster, n, tokens, "ring"])
            for n in sizes
            for tokens in RING_TOKENS
        }
        faster = [key for key, gain in gains.items() if gain.known > GAIN]
        high = derived(lambda *values: max(values), *gains.values())
        n, tokens = next(key for key, gain in gains.items() if gain.value == high.value)
        where = (
            "nowhere"
            if not faster
            else "at "
            + "; ".join(
                f"{n} GPUs up to {max(t for m, t in faster if m == n)}k tokens each" for n in sizes if n in dict(faster)
            )
        )
        parts.append(
            text(
                f"{cluster}, one node, forward and backward, zigzag: TokenRing is faster than Ring {where}. The highest"
                " ratio is {high:.2f}, on {n:.0f} GPUs with {tokens:.0f}k tokens each.",
                high=high,
                n=setting(n, "gpus"),
                tokens=setting(tokens, "thousands of tokens"),
            )
        )
    return parts


def _table(by_nic: Times, by_tokens: Times) -> Table:
    """All points of both ladders, and those that can't be served with their reason."""
    columns = [Column("axis"), Column("at"), Column("method"), Column("step", "ms"), Column("bound by")]
    lines: list[list[Cell]] = []
    for axis, found in (("NIC, GB/s", by_nic), ("tokens of a GPU", by_tokens)):
        for (method, x), record in found.items():
            lines.append([axis, int(x), method, of_record(record, "step_ms_median")])
            lines[-1].append(str(record.bound_by or f"{record.status}: {record.error}"))
    return Table("choosing-ladders", "The points of both ladders", columns, lines, shown_rows=10)
