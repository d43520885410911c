"""How much of Ring Attention's communication is hidden: by the paper's condition, and simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sp_bench.analysis.figure import MARKERS, Figure, Panels, colours, log2_ticks
from sp_bench.analysis.number import Number, computed, count, derived, formula, least, most, of_record, tally
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.ring.model import STEP, Setting, cluster_named, transfers_ms
from sp_bench.analysis.table import Table, columns
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
TAIL = formula(
    "ring-tail",
    "1 / (3 (n - 1)): of 3 (n - 1) transfers of equal size, KV twice and dKV once, the last dKV comes after all blocks",
    "methods/ring.py",
)
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
    found = onsets(runs, settings())
    table = []
    for onset in found:
        setting, paper, simulated = onset.setting, onset.setting.paper_tokens(), onset.from_block
        hop = computed(setting.hop_bytes_per_s() / 1e9, *paper.sources)
        table.append([setting.cluster, setting.nodes, setting.gpus, hop, paper, onset.least])
        table[-1] += [simulated, simulated.over(onset.least), setting.least_tokens(CAUSAL)]
    ratios = [row[7] for row in table]
    peaks = [row[5].over(row[4]) for row in table if row[4].value is not None]
    masked = [row[8].over(row[5]) for row in table]
    heads = columns(
        "cluster; nodes; GPUs; slowest hop | GB/s; smallest block by F / B | tokens | .0f;"
        " smallest block by kernel rates | tokens | .0f;"
        " smallest block, simulated | tokens | .0f; simulated / by kernel rates || .2f;"
        " smallest block by kernel rates, causal and striped | tokens | .0f"
    )
    return Section(
        "The least block that hides communication",
        text(
            "The paper's condition is that a block takes as long to compute as to send: c >= F / B. The table has the"
            " least block c of each cluster of conf/cluster, for 32 heads of 128, in three ways. F / B is computed"
            " from the peak. The second uses the cluster file's kernel rates, folds and latencies instead. The third is"
            " simulated, forward and without a mask: the smallest of {tried} blocks from which on {hidden:.0%} of the"
            " communication is hidden. In {near:.0f} of {all:.0f} cases the simulator agrees with the rates within a"
            " factor of {factor:.3g}, the spacing of the simulated blocks. The farthest is {farthest:.2f} times as"
            " much. Both take their figures from the same files: this tests the condition, not the figures. By kernel"
            " rates the least block is {low:.0%} to {high:.0%} of F / B. Kernels below their peak leave the network"
            " more time, and latencies, which F / B leaves out, take some of it. With a causal mask the least block is"
            " {masked_low:.2g} to {masked_high:.2g} times as large, since a block computes about half as much.",
            tried=len(FACTORS),
            hidden=HIDDEN,
            near=count(ratios, lambda ratio: 1 / CLOSEST_FACTOR <= ratio <= CLOSEST_FACTOR),
            all=count(ratios),
            factor=CLOSEST_FACTOR,
            farthest=max(ratios, key=lambda ratio: abs(math.log(ratio.known)) if ratio.known > 0 else math.inf),
            low=least(peaks),
            high=most(peaks),
            masked_low=least(masked),
            masked_high=most(masked),
        ),
        _by_block([onset for onset in found if onset.setting.nodes > 1]),
        Table(
            "ring-condition",
            "Least block for which Ring Attention hides its communication",
            heads,
            table,
            "conf/cluster/ says where the figures of each cluster are from, and which are assumed or fitted. Blocks are"
            f" multiples of {STEP} tokens. Below the smallest block that kernel figures cover (512), its rate is used,"
            " which is too fast.",
        ),
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
    asked = {(cluster, n): point(cluster=cluster, gpus=n, **keys) for cluster in SWEEP for n in SWEEP_GPUS}
    shape = {"seqlen": SWEEP_SEQLEN, "heads": 32, "kv_heads": 32, "head_dim": 128, "mask": CAUSAL}
    table, agree, shares = [], 0, {}
    for (cluster, n), record in runs.by_key(asked).items():
        problem = Problem(n=n, layout=LAYOUTS["striped"], **shape)
        transfers = transfers_ms(cluster, problem, ("forward", "backward"))
        share, smallest = hidden_share(record, transfers), Setting(cluster, 2).least_tokens(CAUSAL)
        shares[cluster, n] = share
        agree += (SWEEP_SEQLEN // n >= smallest.known) == (share.known >= MOSTLY)
        step, exposed = of_record(record, "step_ms_median"), of_record(record, "exposed_comm_ms")
        table.append([cluster, n, SWEEP_SEQLEN // n, smallest, step, transfers, exposed, share.times(100)])
        table[-1].append(exposed.over(step).times(100))
    heads = columns(
        "cluster; GPUs; block | tokens; smallest block by kernel rates, causal | tokens | .0f; step | ms;"
        " transfers alone | ms; exposed communication | ms; hidden communication | % of transfers | .1f;"
        " exposed communication | % of the step | .1f"
    )
    return Section(
        "A sequence of 1M tokens on more and more GPUs",
        text(
            "Simulated, forward and backward, causal on the striped layout; the time of the transfers alone is"
            " computed. A GPU sends about as much on any number of GPUs, but has less to compute on more of them. Once"
            " its block is below the least block, communication is exposed. In {agree:.0f} of {all:.0f} cases, at least"
            " {mostly:.0%} is hidden exactly where the block is above the least one. The lowest hidden share is"
            " {lowest:.0%}. A little is always exposed: no block is left to hide the last dKV of the backward, which on"
            " {first} GPUs is {tail:.1%} of all that is sent.",
            agree=tally(agree, shares.values()),
            all=count(shares.values()),
            mostly=MOSTLY,
            lowest=least(shares.values()),
            first=SWEEP_GPUS[0],
            tail=computed(1 / (3 * (SWEEP_GPUS[0] - 1)), TAIL),
        ),
        _by_gpus(shares),
        Table("ring-hidden-by-gpus", "Ring Attention at 1M tokens", heads, table),
    )


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
