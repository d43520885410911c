"""The printed advice for a data set: the answer, the ranking, and how many ranks a document asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sp_bench.advise.packs import SLOWER, OnPacks, PacksAnswer, Spans
from sp_bench.cli.words import widths
from sp_bench.measure.stats import summarise
from sp_bench.records import Record

WHERE_THERE_IS_ROOM = ("balance", "fastest on", "peak mem", "layout", "95% of it", "worst balance")
"""Columns that are left out of a ranking that would be too wide, those that matter most first."""
NAMED = 0.25
"""Numbers of ranks that at least this share of a class's documents have are named."""


def heading(found: PacksAnswer, data: str) -> list[str]:
    """The request, the answer by all packs, and what packs don't tell from it."""
    record, first, seeds = found.methods[0].feasible.record, found.methods[0], found.packs.seeds
    drawn = f"{len(seeds)} packs of {record.seqlen:,} tokens from {data} (seeds {seeds[0]} to {seeds[-1]})"
    lines = [f"{drawn}, {shape(record)}. All times are simulated.", ""]
    wins = f"the fastest on {found.wins(first)} of {len(seeds)} packs"
    lines.append(f"{first.name} has the least median step, and is {wins}.")
    if others := [each.name for each in found.tied if each is not first]:
        lines.append(f"These packs don't tell it from: {', '.join(others)}.")
    chosen = f"on the pack of middle work (seed {found.packs.middle}) or of most (seed {found.packs.heaviest})"
    balance = "Balance is the time that the busiest rank computes over the mean."
    lines.append(f"Degrees and layouts are the fastest {chosen}. {balance}")
    return [*lines, *(f"note: {note}" for note in record.notes or ())]


def ranking(found: PacksAnswer) -> dict[str, list[str]]:
    """The columns of the methods on all packs, that with the least median first."""
    methods = found.methods
    return {
        "method": [each.name for each in methods],
        "layout": [each.feasible.record.layout or "-" for each in methods],
        "median, ms": [f"{each.median_ms:,.1f}" for each in methods],
        "95% of it": ["{0.ci95_low:,.1f} to {0.ci95_high:,.1f}".format(summarise(each.steps_ms)) for each in methods],
        "worst, ms": [f"{each.steps_ms.max():,.1f}" for each in methods],
        "balance": [f"{np.median(each.balance):.2f}" for each in methods],
        "worst balance": [f"{each.balance.max():.2f}" for each in methods],
        "fastest on": [str(found.wins(each)) for each in methods],
        "peak mem": [f"{each.peak_bytes / 1e9:,.2f} GB" for each in methods],
    }


def too_slow(found: PacksAnswer) -> list[str]:
    """The methods that were simulated on the middle pack alone."""
    if not found.slower:
        return []
    each = ", ".join(f"{one.name} ({one.time.step_ms:,.0f} ms)" for one in found.slower)
    why = f"where they take over {SLOWER:g} times as long as the fastest"
    return ["", f"Simulated on the pack of middle work alone, {why}: {each}."]


def shape(record: Record) -> str:
    """The attention, but its tokens, and where it runs."""
    mask = f"{record.mask}, {record.dtype}, {record.phase.replace('_', ' + ')}"
    heads = f"{record.heads} heads ({record.kv_heads} of keys) of {widths(record)}"
    return f"batch {record.batch}, {heads}, {mask}, on {record.gpus} GPUs of {record.cluster}"


def rank_table(methods: Iterable[OnPacks]) -> dict[str, list[str]]:
    """The columns of documents' classes and the ranks that each method of SPANS gives a document; empty without one."""
    spans = {each.feasible.method.name: each.spans for each in methods if each.spans}
    if not spans:
        return {}
    first = next(iter(spans.values()))
    classes = sorted({longest for longest, _ in first})
    totals = {c: np.sum([amount for (longest, _), amount in first.items() if longest == c], axis=0) for c in classes}
    tokens = sum(int(total[1]) for total in totals.values())
    columns = {
        "method": _ranges(classes),
        "documents": [f"{int(totals[c][0]):,}" for c in classes],
        "of tokens": [f"{totals[c][1] / tokens:.1%}" for c in classes],
    }
    return columns | {
        f"ranks, {name}": [_ranks(spans_of_method, c) for c in classes] for name, spans_of_method in spans.items()
    }


def _ranges(classes: Sequence[int]) -> list[str]:
    ends = [0, *classes]
    return [f"{a + 1:,} to {b:,}" for a, b in zip(ends, ends[1:], strict=False)]


def _ranks(spans: Spans, longest: int) -> str:
    """The ranks of a class's documents: all numbers that NAMED of them have, the most frequent first."""
    count = {ranks: documents for (c, ranks), (documents, _) in spans.items() if c == longest}
    order = sorted(count, key=lambda ranks: (-count[ranks], ranks))
    named = [ranks for ranks in order if count[ranks] >= NAMED * sum(count.values())] or order[:1]
    few = f" ({min(count)} to {max(count)})" if len(count) > len(named) else ""
    return " or ".join(map(str, named)) + few
