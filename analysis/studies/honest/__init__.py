"""Which method, honestly: regions in which a method wins, and those in which it is too close to call.

All times are simulated. Each has the interval that two of three measurements like it were in
(`python -m sp_bench.validate published`) or, where there are none, one that the study assumes and marks as such.
Methods whose intervals overlap the fastest one's are tied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.patches import Patch, Rectangle

from sp_bench.analysis.figure import Figure, Panels, colours, labelled, log2_ticks, new_figure, sources, styles
from sp_bench.analysis.number import Number, derived, least, most, of_record, tally, written
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.honest.places import (
    CLUSTERS,
    GPUS,
    HEADS_SPLIT,
    KEYS,
    KV_HEADS,
    METHODS,
    NIC_AT,
    NIC_GB_PER_S,
    SCALE_AT,
    SEQLEN,
    WHOLE_HEADS,
    Key,
    Step,
    asked,
    by_gpus,
    by_nic,
    grid,
    tied,
)
from sp_bench.analysis.table import Cell, Table, columns

LIGHT = 0.45
"""How far faces are mixed with white, so that words on them can be read."""


def regions(runs: Runs) -> Section:
    """Who wins where, and where nobody can say."""
    found = grid(runs)
    ties = {key: tied(ranked) for key, ranked in found.items()}
    clear = Counter(one[0].name for one in ties.values() if len(one) == 1)
    among = Counter(step.name for one in ties.values() for step in one)
    numbers = [step.ms for ranked in found.values() for step in ranked]
    validated = [step for ranked in found.values() for step in ranked if step.backed]
    return Section(
        "Regions",
        text(
            "One causal attention of {seqlen} tokens, forward and backward, 32 heads of 128 in bfloat16, at {keys:.0f}"
            " places: clusters, GPUs and KV heads. Every step is simulated. {validated:.0f} of {steps:.0f} steps are"
            " validated: others have published measurements of such transfers on such a cluster, and the interval is"
            " what two of three errors of their simulations are within. The others are not validated. For them the"
            " study assumes the widest error of anything that was measured over such links.",
            seqlen=SEQLEN,
            keys=tally(len(KEYS), numbers),
            validated=tally(len(validated), numbers),
            steps=tally(len(numbers), numbers),
        ),
        _map(ties, numbers),
        text(
            "{clear:.0f} of {keys:.0f} places have one winner; in the others the intervals of the first and of others"
            " overlap. Clear wins: {wins}. Places in which a method is the fastest or tied with it: {among}.",
            clear=tally(sum(clear.values()), numbers),
            keys=tally(len(KEYS), numbers),
            wins=_counts(clear),
            among=_counts(among),
        ),
        _where(ties),
        _table(found, ties),
    )


def _where(ties: Mapping[Key, list[Step]]) -> Table:
    """For each method, the places where it wins and those where it is too close to call."""
    lines: list[list[Cell]] = []
    for name in METHODS:
        there = {key: one for key, one in ties.items() if name in {step.name for step in one}}
        alone = [key for key, one in there.items() if len(one) == 1]
        shared = [key for key in there if key not in alone]
        lines.append([name, len(alone), _places(alone), len(shared), _places(shared)])
    heads = columns("method; wins; where; ties with the fastest; where that is")
    return Table("honest-where", "Where each method wins, and where it is too close to call", heads, lines)


def _places(keys: Sequence[Key]) -> str:
    """Places by GPUs: on which clusters, with how many KV heads."""
    found = []
    for gpus in GPUS:
        by_cluster = {c: [kv for cluster, kv, n in keys if (cluster, n) == (c, gpus)] for c in CLUSTERS}
        alike: dict[tuple[int, ...], list[str]] = {}
        for cluster, kv_heads in by_cluster.items():
            alike.setdefault(tuple(kv_heads), []).append(cluster)
        parts = [
            f"{', '.join(clusters) if len(clusters) < len(CLUSTERS) else 'all clusters'} with {_listed(kv)} KV heads"
            for kv, clusters in alike.items()
            if kv
        ]
        found += [f"{gpus} GPUs: {' and '.join(parts)}"] if parts else []
    return "; ".join(found) or "nowhere"


def _listed(kv_heads: Sequence[int]) -> str:
    return "any number of" if len(kv_heads) == len(KV_HEADS) else " or ".join(map(str, kv_heads))


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{name} {counted[name]}" for name in METHODS if counted[name]) or "none"


def _map(ties: Mapping[Key, list[Step]], numbers: list[Number]) -> Figure:
    """A cell has a stripe for each method that may be the fastest."""
    canvas, axes = new_figure(len(CLUSTERS), width=7.2, height=3.0, sharey=True)
    tones = {name: tuple(LIGHT + (1 - LIGHT) * np.array(rgb)) for name, rgb in colours(list(METHODS)).items()}
    for axis, cluster in zip(axes[0], CLUSTERS, strict=True):
        for (y, kv_heads), (x, gpus) in product(enumerate(KV_HEADS), enumerate(GPUS)):
            one = ties[cluster, kv_heads, gpus]
            width = 0.96 / len(one)
            for i, step in enumerate(one):
                left = x - 0.48 + i * width
                axis.add_patch(Rectangle((left, y - 0.48), width, 0.96, facecolor=tones[step.name], linewidth=0))
            words = one[0].name.replace("mesh with heads", "mesh\nheads") if len(one) == 1 else f"tie\nof {len(one)}"
            axis.text(x, y, words, ha="center", va="center", fontsize=6.5)
        axis.set(xlim=(-0.5, len(GPUS) - 0.5), ylim=(-0.5, len(KV_HEADS) - 0.5), xlabel="GPUs")
        axis.set_title(cluster, fontsize=8.5)
        axis.set_xticks(range(len(GPUS)), map(str, GPUS))
        axis.set_yticks(range(len(KV_HEADS)), map(str, KV_HEADS))
        axis.grid(visible=False)
    axes[0, 0].set_ylabel("KV heads, of 32")
    there = [name for name in METHODS if any(step.name == name for one in ties.values() for step in one)]
    legend = [Patch(color=tones[name], label=labelled(name, "simulated")) for name in there]
    canvas.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    note = "A cell with several colours is too close to call between these methods."
    return Figure("honest-regions", f"Which method is the fastest, {SEQLEN} tokens", canvas, sources(numbers), note)


def _table(found: Mapping[Key, list[Step]], ties: Mapping[Key, list[Step]]) -> Table:
    lines: list[list[Cell]] = []
    for (cluster, kv_heads, gpus), ranked in found.items():
        first, one = ranked[0], ties[cluster, kv_heads, gpus]
        others = ", ".join(step.name for step in one[1:]) or "-"
        beaten = next((step for step in ranked if step not in one), None)
        margin: Cell = beaten.ms.over(first.ms) if beaten else "-"
        lines.append([cluster, kv_heads, gpus, first.name, first.record.variant or "-", first.ms])
        ends = f"[{written(first.low)}, {written(first.high)}]" + " (assumed)" * (not first.backed)
        lines[-1] += [ends, others, beaten.name if beaten else "-", margin]
    heads = columns(
        "cluster; KV heads; GPUs; fastest; variant; step | ms; interval (ms); too close to call; next;"
        " next over fastest || .2f"
    )
    title = "The fastest, what ties with it, and the first that doesn't"
    return Table("honest-regions", title, heads, lines, shown_rows=12)


def nics(runs: Runs) -> Section:
    """What the network between nodes changes."""
    found = by_nic(runs)
    ties = {nic: tied(ranked) for nic, ranked in found.items()}
    numbers = [step.ms for ranked in found.values() for step in ranked]
    lone = [f"{nic} GB/s: {one[0].name}" for nic, one in ties.items() if len(one) == 1]
    spread = {nic: ranked[-1].ms.over(ranked[0].ms) for nic, ranked in found.items()}
    return Section(
        "The network between nodes",
        text(
            "{gpus} H100 with {kv} KV heads and network cards of 25 to 800 GB/s a GPU. Bands are the intervals.",
            gpus=str(NIC_AT["gpus"]),
            kv=str(NIC_AT["kv_heads"]),
        ),
        _lines("honest-nic", found, "network card of a GPU, GB/s", f"Steps by the network card, {SEQLEN} tokens"),
        text(
            "The slowest method takes {slow:.2f} times as long as the fastest at {low} GB/s and {fast:.2f} times at"
            " {high}. {ties:.0f} of {all:.0f} cards have no clear winner; with one: {lone}.",
            slow=spread[NIC_GB_PER_S[0]],
            fast=spread[NIC_GB_PER_S[-1]],
            low=str(NIC_GB_PER_S[0]),
            high=str(NIC_GB_PER_S[-1]),
            ties=tally(sum(len(one) > 1 for one in ties.values()), numbers),
            all=tally(len(ties), numbers),
            lone="; ".join(lone) or "none",
        ),
    )


def scale(runs: Runs) -> Section:
    """More GPUs for the same tokens."""
    found = by_gpus(runs)
    lines: list[list[Cell]] = []
    for gpus, ranked in found.items():
        names = {step.name for step in tied(ranked)}
        for step in ranked:
            place = "fastest or tied" if step.name in names else ""
            lines.append([gpus, step.name, step.record.variant or "-", step.ms, step.ms.over(ranked[0].ms), place])
    heads = columns("GPUs; method; variant; step | ms; over the fastest || .2f; verdict")
    first, last = (found[gpus][0] for gpus in (GPUS[0], GPUS[-1]))
    return Section(
        f"From {GPUS[0]} to {GPUS[-1]} GPUs",
        text(
            "The same tokens on more H100, with {kv} KV heads. With {high} GPUs a chunk is {few} tokens: latencies and"
            " small blocks set the time. {name} takes {first:.4g} ms on {low} GPUs; {other} takes {last:.4g} ms on"
            " {high}.",
            kv=str(SCALE_AT["kv_heads"]),
            few=str(2**20 // GPUS[-1]),
            name=first.name,
            first=first.ms,
            low=str(GPUS[0]),
            other=last.name,
            last=last.ms,
            high=str(GPUS[-1]),
        ),
        _lines("honest-scale", found, "GPUs", f"Steps by GPUs, {SEQLEN} tokens"),
        Table("honest-scale", "Steps by GPUs", heads, lines, shown_rows=12),
    )


def _lines(name: str, found: Mapping[int, list[Step]], label: str, title: str) -> Figure:
    panels, axis_styles = Panels(height=3.6), styles(list(METHODS))
    for method in METHODS:
        there = {x: step for x, ranked in found.items() for step in ranked if step.name == method}
        if not there:
            continue
        style = axis_styles[method]
        panels.line({x: step.ms for x, step in there.items()}, method, markersize=4.5, linewidth=1, **style)
        low, high = [step.low for step in there.values()], [step.high for step in there.values()]
        panels.first.fill_between([*there], low, high, color=style["color"], alpha=0.12, linewidth=0)
    panels.first.set_yscale("log")
    log2_ticks(panels.first, [*found])
    panels.first.yaxis.set_major_formatter("{x:g}")
    panels.first.yaxis.set_minor_formatter("{x:g}")
    panels.first.set(xlabel=label, ylabel="step, ms")
    panels.legend_below(3, fontsize=8)
    return panels.figure(name, title, "Bands: two of three measurements like a point are within, or are assumed to be.")


def heads(runs: Runs) -> Section:
    """What splitting heads adds to Mesh, and what whole tiles add to USP."""
    found = grid(runs)
    by_name = {key: {step.name: step for step in ranked} for key, ranked in found.items()}
    parts: list[Text] = []
    for other, words in ((WHOLE_HEADS, "Mesh with whole heads"), ("usp", "USP")):
        there = [one for one in by_name.values() if other in one and HEADS_SPLIT in one]
        ratios = [one[other].ms.over(one[HEADS_SPLIT].ms) for one in there]
        apart = sum(one[other].low > one[HEADS_SPLIT].high for one in there)
        parts.append(
            text(
                "{words} takes {low:.3f} to {high:.3f} times as long as Mesh with heads; in {apart:.0f} of {all:.0f}"
                " places by more than both intervals.",
                words=words,
                low=least(ratios),
                high=most(ratios),
                apart=tally(apart, ratios),
                all=tally(len(ratios), ratios),
            )
        )
    u = Counter(one[HEADS_SPLIT].record.tile_a == 1 for one in by_name.values() if HEADS_SPLIT in one)
    numbers = [one[HEADS_SPLIT].ms for one in by_name.values() if HEADS_SPLIT in one]
    return Section(
        "What heads as an axis add",
        text(
            "Mesh with heads has USP (tiles of one row) and Mesh (no split) among its variants, so that it can't be"
            " slower than either by more than a schedule's difference. In {rows:.0f} of {all:.0f} places its fastest"
            " variant has one row: it is a ring between head groups, as USP is.",
            rows=tally(u[True], numbers),
            all=tally(sum(u.values()), numbers),
        ),
        *parts,
    )


FUSED_AT = {"cluster": "h100_ndr400", "gpus": 64}


def fusion(runs: Runs) -> Section:
    """What fused blocks change, where methods have the option."""
    places = list(product(KV_HEADS, (name for name in METHODS if name != "ulysses")))
    both = {
        (kv, name, fuse): asked(name, kv_heads=kv, fuse=fuse, **FUSED_AT)
        for (kv, name), fuse in product(places, (False, True))
    }
    found = runs.by_key(both)
    lines: list[list[Cell]] = []
    gains = []
    for kv, name in places:
        alone, fused = found[kv, name, False], found[kv, name, True]
        before, after = (of_record(record, "step_ms_median") for record in (alone, fused))
        gain = derived(lambda a, b: a / b, before, after)
        gains += [gain] if gain.value is not None else []
        lines.append([kv, name, alone.variant or "-", before, fused.variant or "-", after, gain])
    heads_ = columns(
        "KV heads; method; variant; step | ms; variant when fused; step when fused | ms; times as fast || .3f"
    )
    return Section(
        "What fused blocks change",
        text(
            "Blocks that are ready together become one kernel call (method.fuse). On {gpus} H100 a step is {low:.3f} to"
            " {high:.2f} times as fast. Variants are chosen anew.",
            gpus=str(FUSED_AT["gpus"]),
            low=least(gains),
            high=most(gains),
        ),
        Table("honest-fusion", "Steps with and without fused blocks", heads_, lines),
    )


def limits(runs: Runs) -> Section:
    """What the study can't say."""
    return Section(
        "What this can't say",
        text(
            "Nothing here was measured. Most intervals are assumed, from simulations of others' measurements over the"
            " same kind of links, and not of these clusters or transfers: what nobody has measured may be off by more."
            " One sequence length ({seqlen}), one mask (causal) and one shape of heads (32 of 128) stand for all;"
            " layouts are zigzag but for Ulysses, which needs none. Memory is checked against the device and otherwise"
            " left out. Kernels are the library's, the same for all methods, so that a fused or persistent kernel of"
            " one method isn't in it. All clusters have 8 GPUs in a node, and no other jobs load their links."
            " Above {most} GPUs nothing was simulated.",
            seqlen=SEQLEN,
            most=str(GPUS[-1]),
        ),
    )
