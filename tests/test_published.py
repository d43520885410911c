"""Others' published measurements beside their simulation: the errors that the page states, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from sp_bench.bench import resolve
from sp_bench.bench.backing import FILE, Backing
from sp_bench.cli.compose import Composer
from sp_bench.validate.published import backing, fits, measurements, overrides, pairs, report, simulated, without

PAGE = Path(__file__).parents[1] / "docs" / "results" / "published.csv"
SEEN = pd.read_csv(PAGE, dtype={"causal": str}, keep_default_na=False)


def test_the_page_is_what_is_simulated() -> None:
    rows = measurements()
    chosen = [0, 2, 13, 16, 30, 42, 50, 54, 60, 70, 76]
    found = simulated([rows[i] for i in chosen])
    for column in ("step_measured_ms", "step_simulated_ms", "step_left_out_ms", "error", "error_left_out"):
        assert found[column].tolist() == pytest.approx(SEEN[column].iloc[chosen].tolist(), rel=1e-9), column
    assert len(SEEN) == len(rows)


def test_errors_are_within_what_is_promised() -> None:
    """Medians by links, and the order of pairs whose measured times differ by more than 3%."""
    medians = SEEN.assign(off=SEEN["error"].abs()).groupby("links")["off"].median()
    assert medians["NVLink"] < 0.06 and medians["several nodes"] < 0.08 and medians["PCIe"] < 0.15
    alike, count, _ = pairs(SEEN)
    assert alike / count > 0.9 and count > 300
    text = report(SEEN)
    assert f"{alike} of {count} pairs" in text and text.count("MagiAttention | ") > 30
    assert [Backing(**row) for row in json.loads(FILE.read_text())] == backing(SEEN)


def test_a_source_is_left_out_with_all_that_was_fitted_to_it() -> None:
    rows = {fit["source"]: row for fit in fits() for row in measurements() if fit["source"] in row["source"]}
    assert len(rows) == 4
    with Composer() as composer:
        for fit in fits():
            row = next(
                row
                for row in measurements()
                if fit["source"] in row["source"] and f"cluster={fit['clusters'][0]}" in overrides(row)
            )
            config = composer.compose(overrides(row))
            assert (
                resolve(without(config, row)).cluster.device != resolve(config).cluster.device or "intra" in fit["key"]
            )
            other = next(row for row in measurements() if fit["source"] not in row["source"])
            elsewhere = without(config, {**row, "source": other["source"]})
            again = [f for f in fits() if f["source"] in other["source"] and f["clusters"] == fit["clusters"]]
            assert again or resolve(elsewhere).cluster.topology == resolve(config).cluster.topology
