"""Shared by the scripts that write docs/results/: running points, and formatting their numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sp_bench.analysis.verdict import Ratio
from sp_bench.bench import resolve, run_points
from sp_bench.cli.compose import Composer
from sp_bench.records import Record

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
"""The folder of the pages that the scripts write."""


def run(points: Sequence[Sequence[str]], folder: Path) -> list[Record]:
    """The records of points, given by their overrides, in order. Points with a record in `folder` are not run again."""
    with Composer() as composer:
        requests = [resolve(composer.compose(point)) for point in points]
    return [outcome.record for outcome in run_points(requests, folder=folder, reuse=True)]


def run_ok(points: Sequence[Sequence[str]], folder: Path) -> list[Record]:
    """The records of points, like `run`. Raises RuntimeError for a point that is not ok."""
    found = run(points, folder)
    for record in found:
        if record.status != "ok":
            raise RuntimeError(f"{record.method} {record.variant}: {record.status}: {record.error}")
    return found


def interval(record: Record) -> str:
    """The median step with its 95% interval, in milliseconds."""
    return f"{record.step_ms_median:.0f} [{record.step_ms_ci95_low:.0f}, {record.step_ms_ci95_high:.0f}]"


def ratio(found: Ratio, digits: int) -> str:
    """A ratio with its 95% interval."""
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def records_folder(docstring: str | None, name: str) -> Path:
    """The folder of a script's records: results/<name>, or FOLDER of its option --records FOLDER."""
    parser = argparse.ArgumentParser(description=docstring)
    parser.add_argument("--records", type=Path, default=Path("results", name))
    return parser.parse_args().records


def about(docstring: str | None) -> str:
    """A script's docstring without its first line, which says how to run it."""
    return (docstring or "").split("\n", 2)[2].strip()


def known(number: float | None) -> float:
    """The number, which a measured point with status ok always has."""
    assert number is not None
    return number
