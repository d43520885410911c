"""Peak memory of a rank with Ring Attention: it depends on the rank's tokens, not on the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

from sp_bench.analysis.figure import Figure, Panels, colours, log2_ticks
from sp_bench.analysis.number import Number, computed, derived, formula, of_record, tally
from sp_bench.analysis.runs import Runs, point
from sp_bench.analysis.section import Section, section, source
from sp_bench.records import Record

CLUSTER = "h100_ndr400"
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIXED_SEQLEN = 2**18
FIXED_TOKENS = 2**13
"""Tokens of each rank."""
SETTLED = 4
"""From this number of ranks on, a plan uses all its buffers."""
SIX_BLOCKS = source("ring.six-blocks")
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
    asked = (("forward_backward", fixed_seqlen), ("forward_backward", fixed_tokens), ("forward", fixed_tokens))
    rows = []
    for n, *records in zip(GPUS, *(ask(runs, phase, seqlens) for phase, seqlens in asked), strict=True):
        whole, each, forward = (of_record(record, "peak_mem_bytes_max") for record in records)
        per_token = whole.times(n / FIXED_SEQLEN).times(1e-3)
        rows.append([n, FIXED_SEQLEN // n, whole.times(1e-9), per_token, n * FIXED_TOKENS, each.times(1e-9)])
        rows[-1] += [forward.times(1e-9), forward.over(chunk_bytes(records[2]))]
    settled = [row for row in rows if row[0] >= SETTLED]
    spread, growth = (derived(lambda *v: max(v) / min(v) - 1, *(row[at] for row in settled)) for at in (3, 5))
    linear = spread.known <= SAME and growth.known <= SAME
    values = {"settled": SETTLED, "spread": spread, "growth": growth}
    values |= {"chunks": rows[-1][7], "six": computed(6, SIX_BLOCKS), "figure": _figure(rows), "rows": rows}
    return section(
        "ring.memory",
        **values,
        times=tally(GPUS[-1] / SETTLED, (row[5] for row in settled)),
        linear="linear in the tokens of a rank, whatever the sequence" if linear else "not linear in them",
    )


def _figure(rows: list[list]) -> Figure:
    panels = Panels(height=3.2)
    axis = panels.first
    lines = {"256k tokens in total": (2, "o-"), "8k tokens for each rank": (5, "s--")}
    for (name, (at, style)), colour in zip(lines.items(), colours([*lines]).values(), strict=True):
        look = {"linestyle": style[1:], "marker": style[0], "color": colour, "fillstyle": "none"}
        panels.line({row[0]: row[at] for row in rows}, name, **look)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="GPUs", ylabel="peak memory of a rank, GB")
    log2_ticks(axis, GPUS)
    axis.minorticks_off()
    panels.legend()
    return panels.figure("ring-memory", "Peak memory of a rank by number of GPUs")
