"""The table that reviewers of a change ask for: two sets of records as Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from sp_bench.analysis.number import RECORD_KINDS
from sp_bench.analysis.pairs import Paired, Point, provenance_of
from sp_bench.analysis.verdict import ENOUGH_RUNS, Row
from sp_bench.cli.words import amount, largest_error, number
from sp_bench.markdown import table

HEAD = (
    "point",
    "step A, ms",
    "step B, ms",
    "B / A",
    "verdict",
    "error against fp64",
    "peak memory",
    "sent by each GPU",
)


def markdown(names: Sequence[str], found: Paired, rows: Sequence[Sequence[Row]], notes: Iterable[str]) -> str:
    """Markdown with the software and hardware of both sets, a row for each pair, the verdicts, and the notes below.

    `names` are those of A and B, `rows` the quantities of each pair of `found`, the step first.
    """
    sides = [[pair[side] for pair in found.pairs] for side in (0, 1)]
    about = [_made_with([*side, *only]) for side, only in zip(sides, (found.only_a, found.only_b), strict=True)]
    made_with = [(key, *(each[key] for each in about)) for key in about[0]]
    lines = [
        table(("", f"A: `{names[0]}`", f"B: `{names[1]}`"), made_with),
        "",
        table(HEAD, [_cells(a, b, of_pair) for (a, b), of_pair in zip(found.pairs, rows, strict=True)]),
        "",
        f"**{summary(rows)}**",
    ]
    fewest = min((len(point.runs) for pair in found.pairs for point in pair if point.record.measured), default=None)
    few = [f"fewest runs of a measured point: {fewest}; {ENOUGH_RUNS} say how far apart runs are"]
    for name, points in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"- only in {name}: {point.label}" for point in points]
    known = [*(few if fewest and fewest < ENOUGH_RUNS else ()), *notes]
    return "\n".join((*lines, "", *(f"- {note}" for note in known))).rstrip()


def summary(rows: Sequence[Sequence[Row]]) -> str:
    """The number of steps by verdict."""
    counts = Counter(of_pair[0].verdict for of_pair in rows)
    failed = counts.pop("-", 0)
    words = [f"{count} {verdict}" for verdict, count in counts.most_common()]
    return f"steps: {', '.join(words + [f'{failed} without step'] * bool(failed))}"


def _made_with(points: Sequence[Point]) -> dict[str, str]:
    """Commit, hardware, software and command of a set's records; several of each if they differ."""
    values_of: dict[str, dict[str, None]] = {}
    for record in (run.record for point in points for run in point.runs or (point,)):
        known = provenance_of(record)
        commit = (known.get("git_commit") or "unknown")[:10] + " with changes" * bool(known.get("git_dirty"))
        versions = known.get("versions") or {}
        software = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        about = {
            "commit": commit,
            "mode": RECORD_KINDS[record.mode],
            "hardware": f"{record.gpus} x {record.device_name or record.cluster}" if record.measured else "-",
            "host": known.get("host") if record.measured else "-",
            "system": known.get("platform"),
            "software": f"{software}, kernel {record.kernel}",
            "environment": " ".join(f"{key}={value}" for key, value in (known.get("environment") or {}).items()),
            "command": f"`python -m sp_bench {' '.join(known.get('argv') or ())}`",
        }
        for key, value in about.items():
            values_of.setdefault(key, {})[str(value or "-")] = None
    return {key: "<br>".join(values) for key, values in values_of.items()}


def _cells(a: Point, b: Point, of_pair: Sequence[Row]) -> tuple[str, ...]:
    step = of_pair[0]
    interval = "-"
    if step.ratio:
        interval = f"{step.ratio.value:.3f}" + (step.ratio.ends if a.record.measured else "")
    error = _both(largest_error(a.record), largest_error(b.record))
    memory = _both(amount(a.record.peak_mem_bytes_max), amount(b.record.peak_mem_bytes_max))
    sent = _both(amount(a.record.comm_bytes_per_gpu), amount(b.record.comm_bytes_per_gpu))
    label = a.label if a.label == b.label else f"{a.label}<br>{b.label}"
    return label, _step(a), _step(b), interval, step.verdict, error, memory, sent


def _both(a: str, b: str) -> str:
    return a if a == b else f"{a} → {b}"


def _step(point: Point) -> str:
    """The median step; of several runs the mean of their medians, their standard deviation and number."""
    steps = [run.record.step_ms_median for run in point.runs or (point,)]
    known = [step for step in steps if step is not None]
    if not known:
        return point.record.status
    if len(known) == 1 or not point.record.measured:
        return number(known[-1], 5)
    return f"{number(statistics.mean(known), 5)} ± {number(statistics.stdev(known), 2)}, {len(known)} runs"
