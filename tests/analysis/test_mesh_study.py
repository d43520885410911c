"""The findings of the Mesh-Attention study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.number import Number
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import mesh
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.memory import (
    DOUBTFUL,
    NEAR,
    ROUNDING_GB,
    WITHIN,
    by_chance,
    kept,
    kept_bytes,
    nearest_tile,
    tiles_of_table5,
)
from sp_bench.analysis.studies.mesh.paper import TOKENS, Cell
from sp_bench.analysis.studies.mesh.rivals import METHODS
from sp_bench.analysis.studies.mesh.scaling import weak_cells
from sp_bench.analysis.studies.mesh.tables import our_claims, reproduced
from sp_bench.analysis.studies.mesh.volume import (
    PAYLOAD,
    POINTS,
    WIDE,
    Accounting,
    choices_that_match,
    reduced,
    reductions,
)
from sp_bench.plan.method import PHASES
from sp_bench.resources import ROOT
from tests.support.marks import exhaustive
from tests.support.sections import tables_of, words_of

PAGE = ROOT / "docs" / "results" / "mesh_paper.md"

LONG256 = Cell(True, cells.LONG, 256, "mesh")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def memory() -> dict[tuple[Cell, str], tuple[float, float]]:
    """Our count of held bytes and the printed peak, both in GB, by cell and phase."""
    return {
        (cell, phase): (kept(cell, phase).known / 1e9, value.known)
        for cell, values in cells.printed(5).items()
        for phase, value in zip(PHASES, values, strict=True)
    }


def value(entry: object) -> float:
    assert isinstance(entry, Number)
    return entry.known


def test_table2_is_counted_exactly() -> None:
    section = mesh.table2()
    rows = tables_of(section)["mesh-table2"].rows
    assert len(rows) == 12
    for method, _, n, _, formula, mean, busiest, _ in rows:
        assert value(busiest) == pytest.approx(value(formula), abs=1e-12)
        assert isinstance(n, int)
        # Of StarTrail, one rank in C needs no exchange at the start.
        assert value(mean) == pytest.approx(value(formula) - (2 / n if method == "startrail" else 0), abs=1e-12)
    assert "12 of 12 rows: reproduced" in words_of(section)
    units = [[value(entry) for entry in row[1:3]] for row in tables_of(section)["mesh-nine-gpus"].rows]
    assert units == [[144, 144], [84, 84], [72, 72]]


@pytest.mark.parametrize("gpus", [32, exhaustive(128)])
@pytest.mark.parametrize("method", ["ring", "mesh"])
def test_records_say_what_the_fit_says(runs: Runs, method: str, gpus: int) -> None:
    cell = Cell(True, TOKENS["512k"], gpus, method)
    (record,) = cells.cell_records(runs, [cell]).values()
    section = PAGE.read_text().split("## Table 3")[1].split("## ")[0]
    (line,) = (row for row in section.splitlines() if row.startswith(f"| yes | 512k | {gpus} | {method} |"))
    *_, tile, which, paper, ours, _, _ = line.split("|")
    number = cells.throughput(record)
    assert (record.variant, cells.which(cell)) == (tile.strip(), which.strip())
    assert number.known == pytest.approx(float(ours), abs=0.051) and number.kind == "simulated"
    assert cells.printed(3)[cell][0].known == float(paper)


@pytest.mark.long
def test_table3_has_the_errors_of_the_fit(runs: Runs) -> None:
    section = mesh.table3(runs)
    rows = [
        line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith(("| fitted: ", "| held out: "))
    ]
    assert [int(row[1]) for row in rows] == [30, 18]
    for _, number, median, largest, _ in rows:
        assert f"{number} {'fitted' if number == '30' else 'held-out'} cells" in words_of(section)
        assert f" is {median} in the median and at most {largest}" in words_of(section)
    assert len(tables_of(section)["mesh-table3"].rows) == 48


@pytest.mark.long
def test_volume_reductions_of_the_paper_need_its_tiles() -> None:
    paper = {claim: cells.stated(claim).known for claim in reductions(tiles_of_table5(), PAYLOAD)}
    assert list(paper.values()) == [85.4, 79.0, 85.5, 78.2, 51.8]
    for accounting in (PAYLOAD, WIDE):
        found = reductions(tiles_of_table5(), accounting)
        assert all(abs(found[claim].known - stated) <= POINTS for claim, stated in paper.items())
    *_, maximum, average, ends = (number.known for number in reductions(tiles_of_table5(), WIDE).values())
    assert (round(maximum, 1), round(average, 1), round(ends, 1)) == (85.5, 78.2, 51.8)
    matching, choices = choices_that_match()
    assert 0 < matching < choices * 1e-4


def test_volume_reductions_are_the_closed_form() -> None:
    assert reduced(LONG256, dict.fromkeys(PHASES, (16, 16)), PAYLOAD).known == pytest.approx(100 * (1 - 30 / 255))
    ring = 6 * 255
    wide = reduced(LONG256, dict.fromkeys(PHASES, (8, 32)), Accounting(gradients="float32", statistics=False))
    assert wide.known == pytest.approx(100 * (1 - (76 + 7 * 5 + 31 * 6) / (ring + 2 * 255)))


def test_rings_peaks_are_explained(memory: dict[tuple[Cell, str], tuple[float, float]]) -> None:
    ring = {key: both for key, both in memory.items() if key[0].method == "ring"}
    assert len(ring) == 48
    for ours, paper in ring.values():
        assert abs(ours - paper) <= WITHIN * paper + ROUNDING_GB


def test_meshs_peaks_are_those_of_a_tile(memory: dict[tuple[Cell, str], tuple[float, float]]) -> None:
    sure = {key: both for key, both in memory.items() if key[0].method == "mesh" and key not in DOUBTFUL}
    near = [abs(ours / paper - 1) <= NEAR for ours, paper in sure.values()]
    assert len(near) == 45 and sum(near) >= 40
    # Far more than peaks at random would be.
    assert sum(by_chance(*key) for key in sure) < 0.5 * sum(near)


def test_a_peak_names_its_tile() -> None:
    for phase in PHASES:
        for tile in ((8, 32), (32, 8), (64, 4)):
            assert nearest_tile(LONG256, phase, kept_bytes(LONG256.problem, phase, tile) / 1e9) == tile


@pytest.mark.long
def test_ours_of_each_claim_is_there(runs: Runs) -> None:
    found = our_claims(runs)
    section = mesh.claims(runs)
    rows = tables_of(section)["mesh-claims"].rows
    claims = {str(row[0]) for row in rows}
    assert len(claims) == len(found) == 18
    for claim in claims:
        of_claim = [row for row in rows if row[0] == claim]
        assert any(any(abs(value(row[4]) - number.known) < 1e-9 for _, number in found.values()) for row in of_claim)
    assert "30 cells fitted, 18 held out" in words_of(section)
    volumes = [row for row in rows if "volume" in str(row[0])]
    assert all(row[-1] == "reproduced" for row in volumes if "table 5" in str(row[6])) and len(volumes) == 15


def test_a_claim_is_reproduced_within_its_bound() -> None:
    assert reproduced(84.0, 85.5, "%") and not reproduced(83.0, 85.5, "%")
    assert reproduced(12.9, 11.9, "s") and not reproduced(13.4, 11.9, "s")
    assert reproduced(72, 72, "chunks") and not reproduced(73, 72, "chunks")


def test_weak_scaling_keeps_the_work_of_a_gpu() -> None:
    per_gpu = [cell.seqlen**2 / cell.gpus for cell in weak_cells("ring")]
    assert per_gpu == pytest.approx([per_gpu[0]] * 4, rel=1e-3)
    assert weak_cells("mesh")[2].seqlen == cells.LONG


@pytest.mark.long
def test_breakdown_adds_up(runs: Runs) -> None:
    section = mesh.figure9a(runs)
    (record,) = cells.cell_records(runs, [LONG256]).values()
    row = next(row for row in tables_of(section)["mesh-figure9a-values"].rows if row[:2] == [256, "mesh"])
    assert sum(value(entry) for entry in row[2:6]) == pytest.approx(cells.seconds(record).known)
    assert {number.kind for number in row[2:] if isinstance(number, Number)} == {"simulated"}


@pytest.mark.long
def test_other_methods_are_beside_the_paper(runs: Runs) -> None:
    found = cells.cell_records(runs, [replace(LONG256, gpus=32, method=method) for method in METHODS])
    assert all(record.status == "ok" for record in found.values())
    (refused,) = cells.cell_records(runs, [replace(LONG256, gpus=64, method="ulysses")]).values()
    number = cells.throughput(refused)
    assert number.value is None and "heads=32" in number.why


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_notebook_runs(runs: Runs, tmp_path: Path) -> None:
    assert notebooks.execute("mesh", tmp_path, runs.folder) == ""
