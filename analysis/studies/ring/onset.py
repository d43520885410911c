"""The hidden share of Ring Attention's communication: by the paper's condition, and simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sp_bench.analysis.figure import MARKERS, Figure, Panels, colours, log2_ticks
from sp_bench.analysis.number import Number, computed, count, derived, least, most, of_record, step_ms, tally
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.studies.ring.model import STEP, Setting, cluster_named, transfers_ms
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.problem import Problem
from sp_bench.records import Record

CLUSTERS = ("a100_hdr200", "h100_ndr400", "h200_ndr400", "b200", "h20", "ascend_oam", "mesh_paper", "a10_pcie")
FACTORS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.5)
"""Simulated block sizes, as multiples of the least block by kernel rates."""
CLOSEST_FACTOR = max(b / a for a, b in pairwise(FACTORS) if a >= 0.8 and b <= 1.1)
"""The simulator agrees with the rates if their least blocks differ by at most this: the spacing of FACTORS there."""
HIDDEN = 0.99
"""Communication counts as hidden if at least this share of it is."""
MOSTLY = 0.95
"""The same with a backward: no block is left to hide its last transfer."""
TAIL = source("ring.tail")
SWEEP = ("a100_hdr200", "h100_ndr400", "b200")
SWEEP_GPUS, SWEEP_SEQLEN = (16, 32, 64, 128, 256), 2**20


def settings() -> list[Setting]:
    """One node of each cluster, and two nodes of each cluster that has several."""
    several = [name for name in CLUSTERS if cluster_named(name).topology.inter]
    return [*(Setting(name, 1) for name in CLUSTERS), *(Setting(name, 2) for name in several)]


@dataclass(frozen=True)
class Onset:
    """Simulations of blocks around the least block by kernel rates."""

    setting: Setting
    least: Number
    """The least block by kernel rates, in tokens."""
    shares: dict[int, Number]
    """The hidden share of the communication by block size in tokens, smallest block first."""

    @property
    def from_block(self) -> Number:
        """The smallest simulated block from which on communication is hidden; NaN if it never is."""
        exposed = [block for block, share in self.shares.items() if share.known < HIDDEN]
        above = [block for block in self.shares if block > max(exposed, default=0)]
        return tally(min(above, default=math.nan), self.shares.values())


def hidden_share(record: Record, transfers: Number) -> Number:
    """The share of the communication that is not exposed."""
    return derived(lambda exposed, total: 1 - max(exposed, 0) / total, of_record(record, "exposed_comm_ms"), transfers)


def onsets(runs: Runs, chosen: Sequence[Setting]) -> list[Onset]:
    """The onset of each setting in the paper's own case: forward, no mask, contiguous layout."""
    keys = {"method": "ring", "layout": "contiguous", "causal": False, "phase": "forward", "mode": "simulate"}
    by_rates = {setting: setting.least_tokens() for setting in chosen}
    asked = {
        (setting, block): point(cluster=setting.cluster, gpus=setting.gpus, seqlen=setting.gpus * block, **keys)
        for setting, number in by_rates.items()
        for block in sorted({max(round(number.known * f / STEP), 1) * STEP for f in FACTORS})
    }
    shares: dict[Setting, dict[int, Number]] = {setting: {} for setting in chosen}
    for (setting, block), record in runs.by_key(asked).items():
        transfers = transfers_ms(setting.cluster, setting.problem(block), ("forward",))
        shares[setting][block] = hidden_share(record, transfers)
    return [Onset(setting, by_rates[setting], of_setting) for setting, of_setting in shares.items()]


def condition(runs: Runs) -> Section:
    """The least block of each cluster: by the paper's condition, by kernel rates, and simulated."""
    all_onsets, rows = onsets(runs, settings()), []
    for onset in all_onsets:
        setting, paper, simulated = onset.setting, onset.setting.paper_tokens(), onset.from_block
        hop = computed(setting.hop_bytes_per_s() / 1e9, *paper.sources)
        by_rates = [paper, onset.least, simulated, simulated.over(onset.least), setting.least_tokens(CAUSAL)]
        rows.append([setting.cluster, setting.nodes, setting.gpus, hop, *by_rates])
    ratios = [row[7] for row in rows]
    peaks = [row[5].over(row[4]) for row in rows if row[4].value is not None]
    masked = [row[8].over(row[5]) for row in rows]
    values = {"tried": len(FACTORS), "hidden": HIDDEN, "factor": CLOSEST_FACTOR, "step": STEP}
    values |= {"low": least(peaks), "high": most(peaks), "masked_low": least(masked), "masked_high": most(masked)}
    values |= {"figure": _by_block([onset for onset in all_onsets if onset.setting.nodes > 1]), "rows": rows}
    return section(
        "ring.condition",
        **values,
        near=count(ratios, lambda ratio: 1 / CLOSEST_FACTOR <= ratio <= CLOSEST_FACTOR),
        all=count(ratios),
        farthest=max(ratios, key=lambda ratio: abs(math.log(ratio.known)) if ratio.known > 0 else math.inf),
    )


def _by_block(found: Sequence[Onset]) -> Figure:
    panels = Panels(height=3.6)
    axis, palette = panels.first, colours([onset.setting.cluster for onset in found])
    axis.plot([0, 1, 1.6], [0, 100, 100], color="black", linewidth=1, label="at constant rates (computed)")
    for onset, marker in zip(found, MARKERS, strict=False):
        shares = {block / onset.least.known: share.times(100) for block, share in onset.shares.items()}
        style = {"marker": marker, "linestyle": "none", "fillstyle": "none", "color": palette[onset.setting.cluster]}
        panels.line(shares, onset.setting.cluster, **style)
    axis.set(xlabel="block / least block by kernel rates", ylabel="communication hidden, %", xlim=(0, 1.6))
    panels.legend(loc="lower right", fontsize=7)
    return panels.figure("ring-hidden", "Hidden share of the communication", "Two nodes, forward, no mask.")


def hidden(runs: Runs) -> Section:
    """The hidden share of a fixed sequence on more and more GPUs, whose blocks get smaller."""
    keys = {"method": "ring", "layout": "striped", "seqlen": SWEEP_SEQLEN, "mode": "simulate"}
    records = runs.grid(lambda cluster, n: point(cluster=cluster, gpus=n, **keys), SWEEP, SWEEP_GPUS)
    shape = {"seqlen": SWEEP_SEQLEN, "heads": 32, "kv_heads": 32, "head_dim": 128, "mask": CAUSAL}
    rows, agree, shares = [], 0, {}
    for (cluster, n), record in records.items():
        problem = Problem(n=n, layout=LAYOUTS["striped"], **shape)
        transfers = transfers_ms(cluster, problem, ("forward", "backward"))
        share, smallest = hidden_share(record, transfers), Setting(cluster, 2).least_tokens(CAUSAL)
        shares[cluster, n] = share
        agree += (SWEEP_SEQLEN // n >= smallest.known) == (share.known >= MOSTLY)
        exposed = of_record(record, "exposed_comm_ms")
        parts = [step_ms(record), transfers, exposed, share.times(100), exposed.over(step_ms(record)).times(100)]
        rows.append([cluster, n, SWEEP_SEQLEN // n, smallest, *parts])
    values = {"agree": tally(agree, shares.values()), "all": count(shares.values()), "mostly": MOSTLY}
    values |= {"lowest": least(shares.values()), "first": SWEEP_GPUS[0]}
    values |= {"tail": computed(1 / (3 * (SWEEP_GPUS[0] - 1)), TAIL), "figure": _by_gpus(shares), "rows": rows}
    return section("ring.hidden", **values)


def _by_gpus(shares: dict[tuple[str, int], Number]) -> Figure:
    panels = Panels(height=3.0)
    axis = panels.first
    for (cluster, colour), marker, style in zip(colours(SWEEP).items(), MARKERS, ("-", "--", ":"), strict=False):
        of_cluster = {n: shares[cluster, n].times(100) for n in SWEEP_GPUS}
        panels.line(of_cluster, cluster, marker=marker, linestyle=style, color=colour)
    log2_ticks(axis, SWEEP_GPUS)
    axis.set(xlabel="GPUs", ylabel="communication hidden, %", ylim=(0, 105))
    panels.legend()
    title = "Hidden share of the communication, 1M tokens, causal, forward and backward"
    return panels.figure("ring-hidden-by-gpus", title)
