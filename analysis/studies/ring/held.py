"""Peak memory of a rank with Ring Attention: it depends on the rank's tokens, not on the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

from sp_bench.analysis.figure import Figure, Panels, colours, log2_ticks
from sp_bench.analysis.number import Number, computed, derived, formula, of_record, tally
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.table import Table, columns
from sp_bench.records import Record

CLUSTER = "h100_ndr400"
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIXED_SEQLEN = 2**18
FIXED_TOKENS = 2**13
"""Tokens of each rank."""
SETTLED = 4
"""From this number of ranks on, a plan uses all its buffers."""
SIX_BLOCKS = formula(
    "ring-six-blocks",
    "6 chunks of N/n tokens: Q, K, V, the K and V that arrive, and the output, in the compute dtype",
    "Liu et al. 2023, section 3, memory requirement",
)
SAME = 0.001
"""A peak that changes by less than this share counts as constant."""


def ask(runs: Runs, phase: str, seqlens: Sequence[int]) -> list[Record]:
    """Ring on each number of GPUS, with the sequence length of the same index."""
    keys = {"method": "ring", "cluster": CLUSTER, "mode": "simulate", "phase": phase}
    return runs.ask(point(gpus=n, seqlen=seqlen, **keys) for n, seqlen in zip(GPUS, seqlens, strict=True))


def chunk_bytes(record: Record) -> Number:
    """The size of a chunk of Q: N/n tokens x heads x head_dim in bfloat16."""
    source = formula("ring-chunk", "N/n tokens x heads x head_dim x 2 bytes", "sp_bench/plan/problem.py: chunk_bytes")
    return computed(record.seqlen // record.gpus * record.heads * record.head_dim * 2, source)


def memory(runs: Runs) -> Section:
    """Peak memory by number of GPUs, for a fixed sequence and for fixed tokens of a rank."""
    fixed_seqlen, fixed_tokens = [FIXED_SEQLEN] * len(GPUS), [FIXED_TOKENS * n for n in GPUS]
    whole = ask(runs, "forward_backward", fixed_seqlen)
    each = ask(runs, "forward_backward", fixed_tokens)
    forward = ask(runs, "forward", fixed_tokens)
    table = []
    for n, a, b, f in zip(GPUS, whole, each, forward, strict=True):
        peaks = [of_record(record, "peak_mem_bytes_max") for record in (a, b, f)]
        per_token = peaks[0].times(n / FIXED_SEQLEN)
        table.append([n, FIXED_SEQLEN // n, peaks[0].times(1e-9), per_token.times(1e-3), n * FIXED_TOKENS])
        table[-1] += [peaks[1].times(1e-9), peaks[2].times(1e-9), peaks[2].over(chunk_bytes(f))]
    settled = [row for row in table if row[0] >= SETTLED]
    spread, growth = (derived(lambda *v: max(v) / min(v) - 1, *(row[at] for row in settled)) for at in (3, 5))
    linear = spread.known <= SAME and growth.known <= SAME
    heads = columns(
        "GPUs; tokens of a rank at 256k | tokens; peak at 256k | GB | .3f; peak for each token of a rank | kB | .3f;"
        " seqlen at 8k each | tokens; peak at 8k each | GB | .4f; forward peak | GB | .4f; forward peak | chunks | .2f"
    )
    return Section(
        "Memory of a rank",
        text(
            "Computed from the plans, forward and backward, 32 heads of 128 in bfloat16, causal: inputs, buffers,"
            " accumulators and results of the attention. From {settled} GPUs on, the peak for each token of a rank"
            " changes by {spread:.3%} while the sequence is fixed and each rank holds fewer tokens. With fixed tokens"
            " of a rank, the peak changes by {growth:.3%} while the sequence grows {times:.0f} times. So it is"
            " {linear}. The forward pass alone takes {chunks:.2f} chunks of N/n tokens, where the paper counts"
            " {six:.0f}. Ours accumulates the output in float32, keeps a rank's own K and V for the backward beside"
            " those that pass, and counts what the kernel returns before it is folded.",
            settled=SETTLED,
            spread=spread,
            growth=growth,
            times=tally(GPUS[-1] / SETTLED, (row[5] for row in settled)),
            linear="linear in the tokens of a rank, whatever the sequence" if linear else "not linear in them",
            chunks=table[-1][7],
            six=computed(6, SIX_BLOCKS),
        ),
        _figure(table),
        Table("ring-memory", "Peak memory of a rank, Ring Attention", heads, table),
    )


def _figure(table: list[list]) -> Figure:
    panels = Panels(height=3.2)
    lines = {"256k tokens in total": (2, "o-"), "8k tokens for each rank": (5, "s--")}
    for (name, (at, style)), colour in zip(lines.items(), colours([*lines]).values(), strict=True):
        panels.line(
            {row[0]: row[at] for row in table},
            name,
            linestyle=style[1:],
            marker=style[0],
            color=colour,
            fillstyle="none",
        )
    axis = panels.first
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="GPUs", ylabel="peak memory of a rank, GB")
    log2_ticks(axis, GPUS)
    axis.minorticks_off()
    panels.legend()
    return panels.figure("ring-memory", "Peak memory of a rank by number of GPUs")
