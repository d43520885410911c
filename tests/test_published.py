"""Others' published measurements beside their simulation: the errors that the page states, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from sp_bench.cli.compose import Composer
from sp_bench.point import resolve
from sp_bench.point.backing import FILE, PACKS, known, written
from sp_bench.point.choose import choose
from sp_bench.validate import steps
from sp_bench.validate.common import published_rows
from sp_bench.validate.left_out import LeftOut, fits
from sp_bench.validate.published import backing, measured_here, overrides, pairs, simulated
from tests.support.frames import rows_of

PAGE = Path(__file__).parents[1] / "docs" / "results" / "published.csv"
SEEN = pd.read_csv(PAGE, dtype={"causal": str}, keep_default_na=False)
GIVEN = rows_of(SEEN, set="given")
MEASUREMENTS, HELD_OUT, SECOND = map(published_rows, ("measurements", "held_out", "second"))


@pytest.mark.long
def test_the_page_is_what_is_simulated() -> None:
    rows = [*MEASUREMENTS, *HELD_OUT, *SECOND]
    chosen = [2, 13, 16, 42, 50, 60, 70, 85, 97, 108, 128, 180, 210, 240, 300]
    found = simulated([rows[i] for i in chosen])
    for column in ("step_measured_ms", "step_simulated_ms", "step_left_out_ms", "error", "error_left_out"):
        assert found[column].tolist() == pytest.approx(SEEN[column].iloc[chosen].tolist(), rel=1e-9), column
    assert len(SEEN) == len(rows)


@pytest.mark.long
def test_errors_are_within_what_is_promised() -> None:
    """Medians by links, and the order of pairs whose measured times differ by more than 3%."""
    medians = GIVEN.assign(off=GIVEN["error"].abs()).groupby("links")["off"].median().to_dict()
    assert medians["NVLink"] < 0.06 and medians["several nodes"] < 0.08 and medians["PCIe"] < 0.15
    alike, count, _ = pairs(GIVEN)
    assert alike / count > 0.9 and count > 300
    text = PAGE.with_suffix(".md").read_text()
    assert f"{alike} of {count} pairs" in " ".join(text.split()) and text.count("MagiAttention | ") > 30
    of_packs = [row for row in known() if row.kind.mask == PACKS]
    of_steps = steps.backing(pd.read_csv(PAGE.with_name("published_steps.csv"), keep_default_na=False))
    assert known() == [*backing(SEEN), *of_steps, *measured_here(), *of_packs]
    assert FILE.read_text() == written(known())
    assert sum(row.points for row in measured_here()) == 61, "docs/results/validation.md"


@pytest.mark.long
def test_tiles_and_larger_machines_are_within_what_is_promised() -> None:
    """Medians by machine: with all that was fitted, and without what was fitted to their own source."""
    more = rows_of(SEEN, set="second")
    off = {name: rows[["error", "error_left_out"]].abs().median().to_dict() for name, rows in more.groupby("hardware")}
    assert off["8xA800 NVLink"]["error"] < 0.06 and off["16xA800, 8 to a node"]["error"] < 0.06
    assert all(of["error_left_out"] < 0.12 for of in off.values()) and len(off) == 6
    alike, count, _ = pairs(more)
    assert alike / count > 0.9 and count > 100


def test_nothing_is_fitted_to_what_is_held_out() -> None:
    given = {(row["source"], row["method"], row["seqlen"], row["heads"], row["phase"]) for row in MEASUREMENTS}
    held = {(row["source"], row["method"], row["seqlen"], row["heads"], row["phase"]) for row in HELD_OUT}
    assert not given & held and len(SEEN) - len(GIVEN) == len(HELD_OUT) + len(SECOND)
    left_out = LeftOut([(row, {"cluster": {"name": "a100_hdr200"}}) for row in MEASUREMENTS])
    for fit in fits():
        assert all(row in MEASUREMENTS for row, _ in left_out.others(fit, "forward"))


@pytest.mark.long
def test_a_source_is_left_out_with_all_that_was_fitted_to_it() -> None:
    """Rates that another source has measured too are fitted again to it; what no other has becomes the prior."""
    rows = [*MEASUREMENTS, *SECOND]
    by_source = {fit["source"]: [row for row in rows if fit["source"] in row["source"]] for fit in fits()}
    assert all(by_source.values())
    with Composer() as composer:
        points = [(row, composer.compose(overrides(row))) for row in MEASUREMENTS if "A100" in row["hardware"]]
        for fit in fits():
            row = next(row for row in by_source[fit["source"]] if f"cluster={fit['clusters'][0]}" in overrides(row))
            config = composer.compose(overrides(row))
            left_out = LeftOut(points[12:20])
            found, other = resolve(left_out.without(row, config)).cluster, resolve(config).cluster
            assert found.device != other.device or "intra" in fit["key"]
            elsewhere = next(row for row in MEASUREMENTS if not any(fit["source"] in row["source"] for fit in fits()))
            same = left_out.without({**row, "source": elsewhere["source"]}, config)
            assert resolve(same).cluster.topology == other.topology


def test_a_factor_is_fitted_again_until_the_other_source_is_met() -> None:
    """The other A100 source's middle point is met by rates that know nothing of ring-flash-attention's."""
    index = next(i for i, fit in enumerate(fits()) if fit["source"] == "zhuzilin/ring-flash-attention")
    rows = [row for row in MEASUREMENTS if "benchmark_results.png" in row["source"]][:1]
    with Composer() as composer:
        config = composer.compose(overrides(rows[0]))
    left_out = LeftOut([(rows[0], config)])
    met = left_out.without({**rows[0], "source": fits()[index]["source"]}, config)
    assert 1e3 * choose(resolve(met)).total_s == pytest.approx(float(rows[0]["measured_ms"]), rel=1e-3)
    assert left_out.refitted(index, "backward") is None
