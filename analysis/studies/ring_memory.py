"""What a rank holds with Ring Attention: by its own tokens, not by the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl

from sp_bench.analysis.figure import STYLE, Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.number import Number, derived, formula, of_record
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.table import Column, Table
from sp_bench.records import Record

CLUSTER = "h100_ndr400"
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIXED_SEQLEN = 2**18
FIXED_TOKENS = 2**13
"""Of each rank."""
SETTLED = 4
"""From so many ranks on a plan needs all its buffers."""
SIX_BLOCKS = formula(
    "ring-six-blocks",
    "6 chunks of N/n tokens: Q, K, V, the K and V that arrive, and the output, in the compute dtype",
    "Liu et al. 2023, section 3, memory requirement",
)
SAME = 0.001


def ask(runs: Runs, phase: str, seqlens: Sequence[int]) -> list[Record]:
    """Ring on each number of GPUs of GPUS, at that many tokens."""
    keys = {"method": "ring", "cluster": CLUSTER, "mode": "simulate", "phase": phase}
    return runs.ask(point(gpus=n, seqlen=seqlen, **keys) for n, seqlen in zip(GPUS, seqlens, strict=True))


def chunk_bytes(record: Record) -> Number:
    """One chunk of Q: N/n tokens x heads x head_dim in bfloat16."""
    size = record.seqlen // record.gpus * record.heads * record.head_dim * 2
    source = formula("ring-chunk", "N/n tokens x heads x head_dim x 2 bytes", "sp_bench/plan/problem.py: chunk_bytes")
    return Number(size, "computed", (source,))


def memory(runs: Runs) -> Section:
    """Peak memory at a fixed sequence and at fixed tokens a rank."""
    fixed_seqlen, fixed_tokens = [FIXED_SEQLEN] * len(GPUS), [FIXED_TOKENS * n for n in GPUS]
    whole = ask(runs, "forward_backward", fixed_seqlen)
    each = ask(runs, "forward_backward", fixed_tokens)
    forward = ask(runs, "forward", fixed_tokens)
    table = []
    for n, a, b, f in zip(GPUS, whole, each, forward, strict=True):
        peaks = [of_record(record, "peak_mem_bytes_max") for record in (a, b, f)]
        per_token = peaks[0].times(n / FIXED_SEQLEN)
        chunks = peaks[2].over(chunk_bytes(f))
        table.append([n, FIXED_SEQLEN // n, peaks[0].times(1e-9), per_token.times(1e-3), n * FIXED_TOKENS])
        table[-1] += [peaks[1].times(1e-9), peaks[2].times(1e-9), chunks]
    settled = [row for row in table if row[0] >= SETTLED]
    spread = derived(lambda *values: max(values) / min(values) - 1, *(row[3] for row in settled))
    growth = derived(lambda *values: max(values) / min(values) - 1, *(row[5] for row in settled))
    linear = spread.known <= SAME and growth.known <= SAME
    six = Number(6, "computed", (SIX_BLOCKS,))
    columns = (
        Column("GPUs"),
        *(Column("tokens of a rank at 256k", "tokens"), Column("peak at 256k", "GB", ".3f")),
        *(
            Column("peak of each token of a rank", "kB", ".3f"),
            Column(f"seqlen at {FIXED_TOKENS // 1024}k each", "tokens"),
        ),
        *(Column("peak there", "GB", ".4f"), Column("forward alone", "GB", ".4f"), Column("that", "chunks", ".2f")),
    )
    return Section(
        "Memory of a rank",
        [
            text(
                "Computed from the plans: inputs, buffers, accumulators and results of the attention, forward and"
                f" backward, 32 heads of 128 in bfloat16, causal. From {SETTLED} GPUs on the peak over a rank's tokens"
                " changes by {spread:.3%} while the sequence is fixed and ranks hold fewer tokens, and the peak by"
                " {growth:.3%} while each rank's tokens are fixed and the sequence grows {times:.0f} times: it is"
                + (" linear in the tokens of a rank, whatever the sequence." if linear else " not linear in them.")
                + " Forward alone takes {chunks:.2f} chunks of N/n tokens where the paper counts {six:.0f}: ours"
                " accumulates the output in float32, keeps a rank's own K and V for the backward beside those that"
                " pass, and counts what the kernel returns before it is folded in.",
                spread=spread,
                growth=growth,
                times=derived(lambda *_: GPUS[-1] / SETTLED, *(row[5] for row in settled)),
                chunks=table[-1][7],
                six=six,
            ),
            _figure(table),
            Table("ring-memory", "Peak memory of a rank, Ring Attention", columns, table),
        ],
    )


def _figure(table: list[list]) -> Figure:
    canvas, axes = new_figure(height=3.2)
    axis, palette = axes[0][0], colours(("whole", "each"))
    with mpl.rc_context(STYLE):
        for name, at, label, style in (
            ("whole", 2, "256k tokens in total", "o-"),
            ("each", 5, "8k tokens a rank", "s--"),
        ):
            peaks = [row[at].known for row in table]
            axis.plot(GPUS, peaks, style, label=labelled(label, "computed"), color=palette[name], fillstyle="none")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(GPUS, [str(n) for n in GPUS])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel("GPUs")
        axis.set_ylabel("peak memory of a rank, GB")
        axis.legend()
    shown = [row[at] for row in table for at in (2, 5)]
    return Figure("ring-memory", "Peak memory of a rank by number of GPUs", canvas, sources(shown))
