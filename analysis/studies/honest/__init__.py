"""An honest choice of a method: regions in which a method wins, and those in which it is too close to call.

All times are simulated. Each has the interval that two of three measurements like it were in
(`python -m sp_bench.validate published`) or, where there are none, one that the study assumes and marks as such.
Methods whose intervals overlap the fastest one's are tied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Patch, Rectangle

from sp_bench.analysis.figure import Figure, Panels, colours, labelled, lattice, log2_ticks, new_figure, sources, styles
from sp_bench.analysis.number import Number, ends, step_ms, tally, valued, written
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section, words
from sp_bench.analysis.studies.honest import places
from sp_bench.analysis.studies.honest.places import HEADS_SPLIT, WHOLE_HEADS, Key, Step, tied
from sp_bench.analysis.table import Cell

LIGHT = 0.45
"""The share of white that is mixed into faces, so that words on them can be read."""
FUSED_AT = {"cluster": "h100_ndr400", "gpus": 64}


def _times(ranked: Mapping[Any, list[Step]]) -> list[Number]:
    return [step.ms for steps in ranked.values() for step in steps]


def regions(runs: Runs) -> Section:
    """The winner of each place, and the places where nobody can say."""
    ranked = places.grid(runs)
    ties = {key: tied(steps) for key, steps in ranked.items()}
    clear = Counter(one[0].name for one in ties.values() if len(one) == 1)
    among = Counter(step.name for one in ties.values() for step in one)
    numbers, validated = _times(ranked), [step for steps in ranked.values() for step in steps if step.backed]
    where: list[list[Cell]] = []
    for name in places.METHODS:
        in_tie = {key: one for key, one in ties.items() if name in {step.name for step in one}}
        wins = [key for key, one in in_tie.items() if len(one) == 1]
        shared = [key for key in in_tie if key not in wins]
        where.append([name, len(wins), _places(wins), len(shared), _places(shared)])
    values = {"seqlen": places.SEQLEN, "keys": tally(len(places.KEYS), numbers)}
    values |= {"validated": tally(len(validated), numbers), "steps": tally(len(numbers), numbers)}
    values |= {"map": _map(ties, numbers), "clear": tally(sum(clear.values()), numbers), "wins": _counts(clear)}
    values |= {"among": _counts(among), "where": where}
    return section(
        "honest.regions", **values, fastest=[_fastest(key, steps, ties[key]) for key, steps in ranked.items()]
    )


def _places(keys: Sequence[Key]) -> str:
    """The places by GPUs: on which clusters, with how many KV heads."""
    lines = []
    for gpus in places.GPUS:
        alike: dict[tuple[int, ...], list[str]] = {}
        for one in places.CLUSTERS:
            alike.setdefault(tuple(kv for cluster, kv, n in keys if (cluster, n) == (one, gpus)), []).append(one)
        parts = [
            f"{', '.join(clusters) if len(clusters) < len(places.CLUSTERS) else 'all clusters'} with"
            f" {' or '.join(map(str, kv)) if len(kv) < len(places.KV_HEADS) else 'any number of'} KV heads"
            for kv, clusters in alike.items()
            if kv
        ]
        lines += [f"{gpus} GPUs: {' and '.join(parts)}"] if parts else []
    return "; ".join(lines) or "nowhere"


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{name} {counted[name]}" for name in places.METHODS if counted[name]) or "none"


def _map(ties: Mapping[Key, list[Step]], numbers: list[Number]) -> Figure:
    """A map whose cells have a stripe for each method that may be the fastest."""
    canvas, axes = new_figure(len(places.CLUSTERS), width=7.2, height=3.0, sharey=True)
    tones = {name: tuple(LIGHT + (1 - LIGHT) * np.array(rgb)) for name, rgb in colours(list(places.METHODS)).items()}
    for axis, cluster in zip(axes[0], places.CLUSTERS, strict=True):
        for x, y, gpus, kv_heads in lattice(axis, places.GPUS, places.KV_HEADS, xlabel="GPUs"):
            one = ties[cluster, kv_heads, gpus]
            width = 0.96 / len(one)
            for i, step in enumerate(one):
                left = x - 0.48 + i * width
                axis.add_patch(Rectangle((left, y - 0.48), width, 0.96, facecolor=tones[step.name], linewidth=0))
            name = one[0].name.replace("mesh with heads", "mesh\nheads") if len(one) == 1 else f"tie\nof {len(one)}"
            axis.text(x, y, name, ha="center", va="center", fontsize=6.5)
        axis.set_title(cluster, fontsize=8.5)
    axes[0, 0].set_ylabel("KV heads, of 32")
    drawn = [name for name in places.METHODS if any(step.name == name for one in ties.values() for step in one)]
    legend = [Patch(color=tones[name], label=labelled(name, "simulated")) for name in drawn]
    canvas.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    title = f"Which method is the fastest, {places.SEQLEN} tokens"
    note = "A cell with several colours is too close to call between these methods."
    return Figure("honest-regions", title, canvas, sources(numbers), note)


def _fastest(key: Key, ranked: list[Step], ties: list[Step]) -> list[Cell]:
    """The row of a place: its fastest method, what ties with it, and the first that doesn't."""
    first, beaten = ranked[0], next((step for step in ranked if step not in ties), None)
    interval = f"[{written(first.low)}, {written(first.high)}]" + " (assumed)" * (not first.backed)
    others = ", ".join(step.name for step in ties[1:]) or "-"
    slower: list[Cell] = [beaten.name, beaten.ms.over(first.ms)] if beaten else ["-", "-"]
    return [*key, first.name, first.record.variant or "-", first.ms, interval, others, *slower]


def nics(runs: Runs) -> Section:
    """The steps by the network between nodes."""
    ranked, (low, *_, high) = places.by_nic(runs), places.NIC_GB_PER_S
    ties, numbers = {nic: tied(steps) for nic, steps in ranked.items()}, _times(ranked)
    title = f"Steps by the network card, {places.SEQLEN} tokens"
    values = {"gpus": places.NIC_AT["gpus"], "kv": places.NIC_AT["kv_heads"]}
    values |= {"fast": ranked[high][-1].ms.over(ranked[high][0].ms), "low": low, "high": high}
    values |= {"ties": tally(sum(len(one) > 1 for one in ties.values()), numbers), "all": tally(len(ties), numbers)}
    return section(
        "honest.nics",
        **values,
        lines=_lines("honest-nic", ranked, "network card of a GPU, GB/s", title),
        slow=ranked[low][-1].ms.over(ranked[low][0].ms),
        lone="; ".join(f"{nic} GB/s: {one[0].name}" for nic, one in ties.items() if len(one) == 1) or "none",
    )


def scale(runs: Runs) -> Section:
    """The same tokens on more GPUs."""
    ranked, (low, *_, high) = places.by_gpus(runs), places.GPUS
    first, last, lines = ranked[low][0], ranked[high][0], []
    for gpus, steps in ranked.items():
        for step in steps:
            verdict = "fastest or tied" if step in tied(steps) else ""
            lines.append([gpus, step.name, step.record.variant or "-", step.ms, step.ms.over(steps[0].ms), verdict])
    values = {"kv": places.SCALE_AT["kv_heads"], "few": 2**20 // high, "name": first.name, "first": first.ms}
    values |= {"low": low, "other": last.name, "last": last.ms, "high": high}
    return section(
        "honest.scale",
        **values,
        lines=_lines("honest-scale", ranked, "GPUs", f"Steps by GPUs, {places.SEQLEN} tokens"),
        steps=lines,
    )


def _lines(name: str, ranked: Mapping[int, list[Step]], label: str, title: str) -> Figure:
    panels, looks = Panels(height=3.6), styles(list(places.METHODS))
    for method, style in ((name, looks[name]) for name in places.METHODS):
        steps_of_method = {x: step for x, steps in ranked.items() for step in steps if step.name == method}
        if steps_of_method:
            panels.line(
                {x: step.ms for x, step in steps_of_method.items()}, method, markersize=4.5, linewidth=1, **style
            )
            low, high = (
                [step.low for step in steps_of_method.values()],
                [step.high for step in steps_of_method.values()],
            )
            panels.first.fill_between([*steps_of_method], low, high, color=style["color"], alpha=0.12, linewidth=0)
    panels.first.set_yscale("log")
    log2_ticks(panels.first, [*ranked])
    panels.first.yaxis.set_major_formatter("{x:g}")
    panels.first.yaxis.set_minor_formatter("{x:g}")
    panels.first.set(xlabel=label, ylabel="step, ms")
    panels.legend_below(3, fontsize=8)
    return panels.figure(name, title, "Bands: two of three measurements like a point are within, or are assumed to be.")


def heads(runs: Runs) -> Section:
    """The gain of Mesh from splitting heads, and of USP from whole tiles."""
    by_name = [{step.name: step for step in ranked} for ranked in places.grid(runs).values()]
    split, parts = [one for one in by_name if HEADS_SPLIT in one], []
    for other, name in ((WHOLE_HEADS, "Mesh with whole heads"), ("usp", "USP")):
        both = [(one[other], one[HEADS_SPLIT]) for one in split if other in one]
        ratios = [one.ms.over(mesh.ms) for one, mesh in both]
        apart = tally(sum(one.low > mesh.high for one, mesh in both), ratios)
        counts = {"apart": apart, "all": tally(len(ratios), ratios)}
        parts.append(words("honest.others", words=name, **counts, **ends(ratios)))
    numbers = [one[HEADS_SPLIT].ms for one in split]
    one_row = tally(sum(one[HEADS_SPLIT].record.tile_a == 1 for one in split), numbers)
    return section("honest.heads", rows=one_row, all=tally(len(split), numbers), others=parts)


def fusion(runs: Runs) -> Section:
    """The gain from fused blocks, for methods that have the option."""
    names = [name for name in places.METHODS if name != "ulysses"]
    records = runs.grid(
        lambda kv, name, fuse: places.asked(name, kv_heads=kv, fuse=fuse, **FUSED_AT),
        *(places.KV_HEADS, names, (False, True)),
    )
    lines: list[list[Cell]] = []
    gains = []
    for (kv, name, fuse), alone in records.items():
        if not fuse:
            fused = records[kv, name, True]
            gains.append(step_ms(alone).over(step_ms(fused)))
            times = [alone.variant or "-", step_ms(alone), fused.variant or "-", step_ms(fused)]
            lines.append([kv, name, *times, gains[-1]])
    gains = valued(gains)
    return section("honest.fusion", gpus=FUSED_AT["gpus"], **ends(gains), rows=lines)


def limits(_: Runs) -> Section:
    """The limits of the study."""
    return section("honest.limits", seqlen=places.SEQLEN, most=places.GPUS[-1])
