"""The findings of the Striped Attention study: formulas, plans, simulations and measurements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies.striped.kernels import KERNEL_STEP, SIZES, measured
from sp_bench.analysis.studies.striped.limit import BOUND, fits, maximum, misses, table_2_gaps, tiles
from sp_bench.analysis.studies.striped.model import (
    ASSUMPTIONS,
    RECOMPUTED,
    Cell,
    attention_limit,
    cells,
    maximum_speedup,
    shared_limit,
    tile,
    tiled_speedup,
    tiles_computed,
)
from sp_bench.analysis.studies.striped.rounds import as_the_paper, planned, work, work_by_round
from sp_bench.analysis.studies.striped.simulated import ask_pairs, chosen, estimates, pair, speedups, training
from tests.support.sections import numbers, tables_of, values
from tests.support.typed import Known


def test_all_hundred_maximum_speedups_are_within_a_hundredth() -> None:
    assert len(cells()) == 100
    assert abs(misses()).max() <= 0.01
    assert [passes for passes in ASSUMPTIONS if fits(passes)] == [RECOMPUTED]


def test_the_maximum_is_the_formula_written_out() -> None:
    # 3B on 2 x 4 A100 at 256k: d = 3200, f = 8640.
    cell = Cell("a100", "3B", 2, 4, 2**18, 1.71, 1.45)
    attention, rest = 5 * 2 * 4 * 2**18 * 3200, 4 * 2 * (4 * 3200**2 + 3 * 3200 * 8640)
    assert maximum_speedup(cell) == pytest.approx((rest + attention * 3.5 / 4) / (rest + attention / 2))
    assert maximum_speedup(cell) == pytest.approx(1.71, abs=BOUND)


def test_table_shows_every_cell_with_its_ratio() -> None:
    table = tables_of(maximum())["striped-maximum"]
    assert len(table.rows) == 100
    for row in table.rows:
        paper, ours, ratio = numbers(row[5:8])
        assert (paper.kind, ours.kind) == ("paper", "computed")
        assert ratio.known == pytest.approx(ours.known / paper.known)


def test_table_2_differs_from_table_4_in_one_cell() -> None:
    differing = [(device, model, a.value, b.value) for device, model, a, b in table_2_gaps() if a.value != b.value]
    assert differing == [("TPUv4", "1B", 1.39, 1.37)]
    assert len(table_2_gaps()) == 6


def test_tiles_leave_out_what_the_paper_says() -> None:
    assert 1 - tiles_computed(1536, 512, 512) == pytest.approx(1 / 3)
    assert 1 - tiles_computed(4096, *tile("tpuv4")) == 0.25
    assert tiles_computed(4096, *tile("a100")) == 1
    assert tiles_computed(2**20, 128, 128) == pytest.approx(0.5, abs=1e-4)
    assert all(1 <= tiled_speedup(cell) <= maximum_speedup(cell) for cell in cells())
    table = tables_of(tiles())["striped-claims"]
    shares = [values(row[2:4]) for row in table.rows if row[1] == "%"]
    assert all(paper == pytest.approx(ours, abs=0.5) for paper, ours in shares)


@pytest.mark.parametrize(("block", "tile_queries", "tile_keys"), [(12, 4, 4), (12, 3, 6), (10, 4, 3), (7, 7, 2)])
def test_tiles_are_those_of_a_drawn_mask(block: int, tile_queries: int, tile_keys: int) -> None:
    mask = np.tril(np.ones((block, block), bool))
    drawn = [
        mask[i : i + tile_queries, j : j + tile_keys].any()
        for i in range(0, block, tile_queries)
        for j in range(0, block, tile_keys)
    ]
    assert tiles_computed(block, tile_queries, tile_keys) == pytest.approx(np.mean(drawn))


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", ["ring", "striped"])
def test_plans_have_the_papers_work(name: str, n: int) -> None:
    assert as_the_paper(name, n, 16) == n * n


def test_ring_has_a_full_block_in_every_round_but_the_first() -> None:
    ring, _ = work_by_round(*planned("ring", 8, 64))
    striped, _ = work_by_round(*planned("striped", 8, 64))
    assert (ring.max(axis=1)[1:] == 64 * 64).all() and ring.max(axis=1)[0] == 64 * 65 // 2
    assert ring.sum() == striped.sum() == 512 * 513 // 2
    assert ring.min() == 0 and striped.min() == 64 * 63 // 2
    assert len(tables_of(work())["striped-work"].rows) == 8


def test_limits() -> None:
    assert [attention_limit(n) for n in (2, 4, 8)] == [1.5, 1.75, 1.875]
    assert [shared_limit(n, n) for n in (2, 4, 8)] == [1.5, 1.75, 1.875]
    assert shared_limit(4, 2) == 1 and shared_limit(2, 8) == 1.5
    assert shared_limit(4, 2, tiles_computed(1024, KERNEL_STEP, KERNEL_STEP)) == 0.75
    paired = {n: work_by_round(*planned("ring", n, 4096))[0].sum(axis=0).max() for n in (2, 4, 8)}
    for n, busiest in paired.items():
        assert busiest / (n * 4096 * 4097 / 2) == pytest.approx(attention_limit(n), rel=1e-3)


def test_simulated_speedup_is_below_its_limit_and_grows(tmp_path: Path) -> None:
    found = ask_pairs(Runs(tmp_path, workers=1), [pair(4, 4 * block, heads=16) for block in (4096, 32768)])
    speedups = [Known(ring).step_ms_median / Known(striped).step_ms_median for ring, striped in found]
    assert 1 < speedups[0] < speedups[1] < attention_limit(4)


def test_a_layers_estimate_is_below_the_maximum(tmp_path: Path) -> None:
    chosen = [Cell("a100", model, 2, 4, 2**17, 1.7, 1.35) for model in ("1B", "3B")]
    for cell, estimate in zip(chosen, estimates(Runs(tmp_path, workers=1), chosen), strict=True):
        assert 1 < estimate.known < maximum_speedup(cell) and estimate.kind == "simulated"


@pytest.mark.exhaustive
def test_notebook_runs_and_what_was_measured_is_said_to_be(tmp_path: Path) -> None:
    assert notebooks.execute("striped", tmp_path / "out", tmp_path / "records") == ""
    section = measured(Runs(tmp_path / "records"))
    table = tables_of(section)["striped-measured"]
    assert [(row[0], row[2]) for row in table.rows] == list(SIZES)
    for row in table.rows:
        ring, striped, speedup, low, high = numbers(row[4:9])
        assert speedup.kind == "measured" and low.known <= speedup.known <= high.known
        assert ring.known / striped.known == pytest.approx(speedup.known)


def test_a_cell_with_tensor_parallelism_is_below_the_maximum_and_above_one(tmp_path: Path) -> None:
    """The 3B cell of table 2, shortened."""
    cell = Cell("a100", "3B", 2, 4, 2**17, 1.67, 1.36)
    ((ring, striped, speedup),) = speedups(Runs(tmp_path, workers=1), [cell])
    assert speedup.known == pytest.approx(ring.known / striped.known)
    assert 1 < speedup.known < maximum_speedup(cell)


@pytest.mark.long
def test_training_steps_stand_beside_every_cell(tmp_path: Path) -> None:
    """Those of tables 2, 3, 5 and appendix A; Striped gains with the number of GPUs, and more at twice the length."""
    section = training(Runs(tmp_path))
    devices, table = tables_of(section)["striped-training-devices"], tables_of(section)["striped-training"]
    assert len(table.rows) == len(chosen())
    gains = zip(chosen(), numbers(row[-4] for row in table.rows), strict=True)
    found = {cell: gain.known for cell, gain in gains if gain.value}
    assert len(found) == sum(values(row[2] for row in devices.rows)) == 98, "two of 7B don't fit a TPU v4"
    assert all(1 < speedup < attention_limit(cell.n) for cell, speedup in found.items())
    for cell, speedup in found.items():
        longer = [
            other
            for other in found
            if (other.model, other.mesh) == (cell.model, cell.mesh) and other.seqlen >= 2 * cell.seqlen
        ]
        assert all(found[other] > speedup for other in longer)
