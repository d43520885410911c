"""How much of Ring Attention's communication is hidden: where the condition says so, and where the simulator does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np

from sp_bench.analysis.figure import MARKERS, STYLE, Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.number import Number, derived, formula, of_record
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.ring_model import STEP, Setting, cluster_named, transfers_ms
from sp_bench.analysis.table import Column, Table
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.problem import Problem
from sp_bench.records import Record

CLUSTERS = ("a100_hdr200", "h100_ndr400", "h200_ndr400", "b200", "h20", "ascend_oam", "mesh_paper", "a10_pcie")
FACTORS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.5)
"""Blocks that are simulated, times the least by the kernel's rates."""
HIDDEN = 0.99
"""From this share of the communication on, it counts as hidden."""
MOSTLY = 0.95
"""The same with a backward, whose last transfer no block is left to hide."""
TAIL = formula(
    "ring-tail",
    "1 / (3 (n - 1)): of 3 (n - 1) transfers of equal size, KV twice and dKV once, the last dKV comes after all blocks",
    "methods/ring.py",
)
SWEEP = ("a100_hdr200", "h100_ndr400", "b200")
SWEEP_GPUS, SWEEP_SEQLEN = (16, 32, 64, 128, 256), 2**20


def settings() -> list[Setting]:
    """Each cluster's node, and two of them where it has more."""
    several = [name for name in CLUSTERS if cluster_named(name).topology.inter]
    return [*(Setting(name, 1) for name in CLUSTERS), *(Setting(name, 2) for name in several)]


@dataclass(frozen=True)
class Onset:
    """What the simulator makes of blocks around the least one."""

    setting: Setting
    least: Number
    """Tokens by the kernel's rates."""
    blocks: list[int]
    shares: list[Number]
    """Of the communication, hidden."""

    @property
    def from_block(self) -> Number:
        """The least simulated block from which on communication is hidden."""
        hidden = [share.known >= HIDDEN for share in self.shares]
        first = next((i for i in range(len(hidden)) if all(hidden[i:])), None)
        if first is None:
            return derived(lambda *_: np.nan, *self.shares)
        return derived(lambda *_: self.blocks[first], *self.shares)


def hidden_share(record: Record, transfers: Number) -> Number:
    """The part of the communication that is not exposed."""
    return derived(lambda exposed, total: 1 - max(exposed, 0) / total, of_record(record, "exposed_comm_ms"), transfers)


def onsets(runs: Runs, chosen: Sequence[Setting]) -> list[Onset]:
    """Forward, no mask, contiguous: the paper's own case."""
    least = [setting.least_tokens() for setting in chosen]
    blocks = [sorted({max(round(number.known * f / STEP), 1) * STEP for f in FACTORS}) for number in least]
    points = [
        point(
            method="ring",
            layout="contiguous",
            cluster=setting.cluster,
            gpus=setting.gpus,
            seqlen=setting.gpus * block,
            causal=False,
            phase="forward",
            mode="simulate",
        )
        for setting, tried in zip(chosen, blocks, strict=True)
        for block in tried
    ]
    records = iter(runs.ask(points))
    found = []
    for setting, number, tried in zip(chosen, least, blocks, strict=True):
        shares = [
            hidden_share(next(records), transfers_ms(setting.cluster, setting.problem(block), ("forward",)))
            for block in tried
        ]
        found.append(Onset(setting, number, tried, shares))
    return found


def condition(runs: Runs) -> Section:
    """The least tokens of a GPU for each cluster: by the paper's condition, by kernels' rates, and simulated."""
    found = onsets(runs, settings())
    table, ratios = [], []
    for onset in found:
        setting, simulated = onset.setting, onset.from_block
        paper, by_rates = setting.paper_tokens(), onset.least
        ratios.append(simulated.over(by_rates))
        table.append(
            [
                setting.cluster,
                setting.nodes,
                setting.gpus,
                Number(setting.hop_bytes_per_s() / 1e9, "computed", paper.sources),
                paper,
                by_rates,
                simulated,
                ratios[-1],
                setting.least_tokens(CAUSAL),
            ]
        )
    factor = max(b / a for a, b in zip(FACTORS, FACTORS[1:], strict=False) if a >= 0.8 and b <= 1.1)
    near = sum(1 / factor <= ratio.known <= factor for ratio in ratios)
    peaks = [row[5].over(row[4]) for row in table if row[4].value is not None]
    farthest = max(ratios, key=lambda ratio: abs(np.log(ratio.known)) if ratio.known > 0 else np.inf)
    columns = (
        *(Column("cluster"), Column("nodes"), Column("GPUs"), Column("slowest hop", "GB/s", ".4g")),
        *(Column("least block, F / B", "tokens", ".0f"), Column("by kernels' rates", "tokens", ".0f")),
        *(Column("hidden from, simulated", "tokens", ".0f"), Column("simulated over rates", "", ".2f")),
        Column("causal, striped, by rates", "tokens", ".0f"),
    )
    return Section(
        "From how many tokens on communication is hidden",
        [
            text(
                "The paper's condition is that a block takes as long to compute as to send, c >= F / B. Computed, for"
                " each cluster of conf/cluster and 32 heads of 128; the same with the kernel rates, folds and latencies"
                " of these files instead of the peak; and simulated, forward and without a mask, as the least of"
                f" {len(FACTORS)} blocks from which on {HIDDEN:.0%} of the communication are hidden. In {{near:.0f}} of"
                " {all:.0f} cases the simulator agrees with the rates as closely as the blocks lie that were tried"
                f" (a factor of {factor:.3g}); the farthest is {{farthest:.2f}} times as much. Both take their figures"
                " from the same files, so that this tests the condition and not the figures. The least block by rates"
                " is {low:.0%} to {high:.0%} of F / B: kernels below their peak, and blocks too small to fill a device,"
                " leave the network more time; latencies, which F / B leaves out, take some. With a causal mask there"
                " is about half as much to hide behind: the last column is {masked_low:.2g} to {masked_high:.2g} times"
                " the one without.",
                near=derived(lambda *_: near, *ratios),
                all=derived(lambda *_: len(ratios), *ratios),
                farthest=farthest,
                low=min(peaks, key=lambda number: number.known),
                high=max(peaks, key=lambda number: number.known),
                masked_low=min((row[8].over(row[5]) for row in table), key=lambda number: number.known),
                masked_high=max((row[8].over(row[5]) for row in table), key=lambda number: number.known),
            ),
            _by_block([onset for onset in found if onset.setting.nodes > 1]),
            Table(
                "ring-condition",
                "Least tokens of a GPU for which Ring Attention hides its communication",
                columns,
                table,
                "Where the figures of each cluster are from, and which are assumptions or fitted, is in conf/cluster/."
                f" Blocks of {STEP} tokens are the least that is tried; below the smallest of the kernel figures (512)"
                " rates are taken to be that one's, which is too fast.",
            ),
        ],
    )


def _by_block(found: Sequence[Onset]) -> Figure:
    canvas, axes = new_figure(height=3.6)
    axis = axes[0][0]
    shown: list[Number] = []
    palette = colours([onset.setting.cluster for onset in found])
    with mpl.rc_context(STYLE):
        axis.plot([0, 1, 1.6], [0, 100, 100], color="black", linewidth=1, label="at constant rates (computed)")
        for onset, marker in zip(found, MARKERS, strict=False):
            ratios = [block / onset.least.known for block in onset.blocks]
            axis.plot(
                ratios,
                [100 * share.known for share in onset.shares],
                marker=marker,
                linestyle="none",
                fillstyle="none",
                color=palette[onset.setting.cluster],
                label=labelled(onset.setting.cluster, "simulated"),
            )
            shown += onset.shares
        axis.set_xlabel("tokens of a block over the least one by kernels' rates")
        axis.set_ylabel("communication hidden, %")
        axis.set_xlim(0, 1.6)
        axis.legend(loc="lower right", fontsize=7)
    note = "Two nodes of each cluster, forward, no mask."
    return Figure("ring-hidden", "Share of the communication that is hidden", canvas, sources(shown), note)


def hidden(runs: Runs) -> Section:
    """A fixed sequence on more and more GPUs: blocks get small, and communication comes out."""
    grid = [(cluster, n) for cluster in SWEEP for n in SWEEP_GPUS]
    records = runs.ask(
        point(method="ring", layout="striped", cluster=cluster, gpus=n, seqlen=SWEEP_SEQLEN, mode="simulate")
        for cluster, n in grid
    )
    table, agree = [], 0
    shares: dict[str, list[Number]] = {cluster: [] for cluster in SWEEP}
    for (cluster, n), record in zip(grid, records, strict=True):
        problem = Problem(
            n=n, seqlen=SWEEP_SEQLEN, heads=32, kv_heads=32, head_dim=128, mask=CAUSAL, layout=LAYOUTS["striped"]
        )
        transfers = transfers_ms(cluster, problem, ("forward", "backward"))
        share, least = hidden_share(record, transfers), Setting(cluster, 2).least_tokens(CAUSAL)
        shares[cluster].append(share)
        agree += (SWEEP_SEQLEN // n >= least.known) == (share.known >= MOSTLY)
        step, exposed = of_record(record, "step_ms_median"), of_record(record, "exposed_comm_ms")
        table.append([cluster, n, SWEEP_SEQLEN // n, least, step, transfers, exposed, share.times(100)])
        table[-1].append(exposed.over(step).times(100))
    everything = [share for of_cluster in shares.values() for share in of_cluster]
    columns = (
        *(Column("cluster"), Column("GPUs"), Column("block", "tokens")),
        *(Column("least block, causal, by rates", "tokens", ".0f"), Column("step", "ms")),
        *(Column("transfers alone", "ms"), Column("exposed", "ms"), Column("hidden", "% of transfers", ".1f")),
        Column("exposed", "% of the step", ".1f"),
    )
    return Section(
        "A sequence of 1M tokens on more and more GPUs",
        [
            text(
                "Simulated, forward and backward, causal on the striped layout; what the transfers take alone is"
                " computed. A GPU sends about as much however many there are, and has less to compute: where"
                " its block is below the least one, communication comes out. Whether a block is above it says whether"
                f" {MOSTLY:.0%} are hidden in {{agree:.0f}} of {{all:.0f}} cases; the least that is hidden is"
                " {least:.0%}. A little always comes out: no block is left to hide the last dKV of the backward, which"
                f" at {SWEEP_GPUS[0]} GPUs is {{tail:.1%}} of all that is sent.",
                agree=derived(lambda *_: agree, *everything),
                all=derived(lambda *_: len(everything), *everything),
                least=min(everything, key=lambda number: number.known),
                tail=Number(1 / (3 * (SWEEP_GPUS[0] - 1)), "computed", (TAIL,)),
            ),
            _by_gpus(shares),
            Table("ring-hidden-by-gpus", "Ring Attention at 1M tokens", columns, table),
        ],
    )


def _by_gpus(shares: dict[str, list[Number]]) -> Figure:
    canvas, axes = new_figure(height=3.0)
    axis, palette = axes[0][0], colours(SWEEP)
    with mpl.rc_context(STYLE):
        for (cluster, of_cluster), marker, style in zip(shares.items(), MARKERS, ("-", "--", ":"), strict=False):
            values = [100 * share.known for share in of_cluster]
            label = labelled(cluster, "simulated")
            axis.plot(SWEEP_GPUS, values, marker=marker, linestyle=style, label=label, color=palette[cluster])
        axis.set_xscale("log", base=2)
        axis.set_xticks(SWEEP_GPUS, [str(n) for n in SWEEP_GPUS])
        axis.minorticks_off()
        axis.set_ylim(0, 105)
        axis.set_xlabel("GPUs")
        axis.set_ylabel("communication hidden, %")
        axis.legend()
    shown = [share for of_cluster in shares.values() for share in of_cluster]
    title = "Hidden share of the communication, 1M tokens, causal, forward and backward"
    return Figure("ring-hidden-by-gpus", title, canvas, sources(shown))
