"""The study "Which method, honestly": intervals, ties, and its sections on a few points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import honest, study_named
from sp_bench.analysis.studies.honest import places as honest_grid
from sp_bench.analysis.studies.honest.places import Step, steps, tied, widest
from sp_bench.plan.mask import WHOLE
from sp_bench.point.backing import known
from sp_bench.records.interval import Interval
from tests.support.sections import code_of, sections_of, tables_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: honest_grid.METHODS[name] for name in ("zigzag", "usp", "mesh", "mesh with heads")}
    values = {
        "CLUSTERS": ("h100_ndr400",), "KV_HEADS": (8,), "GPUS": (8, 16), "METHODS": few, "NIC_GB_PER_S": (25, 50),
        "KEYS": (("h100_ndr400", 8, 8), ("h100_ndr400", 8, 16)), "SEQLEN": "64k",
        "NIC_AT": {**honest_grid.NIC_AT, "gpus": 16},
    }  # fmt: skip
    for module in (honest_grid, honest):
        for name, value in values.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.mark.long
def test_a_tie_is_an_overlap_of_intervals(runs: Runs) -> None:
    record = runs.one(method="zigzag", gpus=8, seqlen="64k")
    ms = record.step_ms_median or 0.0
    exact = Interval(ms, ms, ms)
    assert tied([Step("a", record, exact), Step("b", record, exact)])[1:]
    assert not tied([Step("a", record, exact), Step("b", record, Interval(2 * ms, 2 * ms, 2 * ms))])[1:]
    ranked = next(iter(honest_grid.grid(runs).values()))
    assert [s.ms.known for s in ranked] == sorted(s.ms.known for s in ranked)
    for step in ranked:
        assert step.low < step.ms.known < step.high
        assert (step in tied(ranked)) == (step.low <= ranked[0].high)


@pytest.mark.long
def test_what_nobody_measured_is_assumed_to_have_the_widest_interval(runs: Runs) -> None:
    (ulysses,) = steps({"ulysses": runs.one(method="ulysses", gpus=16, seqlen="64k")})
    error = ulysses.record.validation_error
    assert ulysses.backed and error is not None and ulysses.low == pytest.approx(ulysses.ms.known / (1 + error))
    mesh = steps({"mesh": runs.one(method="mesh", tile=[2, 8], gpus=16, seqlen="64k")})[0]
    assert not mesh.backed and mesh.high == pytest.approx(mesh.ms.known / (1 - widest("several nodes")))
    assert widest("several nodes") >= error
    whole = [row for row in known() if row.kind.workload == "attention" and row.kind.mask == WHOLE]
    assert widest("cables") == max(row.two_of_three for row in whole)
    assert widest("several nodes") < max(row.two_of_three for row in known() if row.kind.links == "several nodes")


@pytest.mark.long
def test_every_place_has_a_method_that_wins_or_ties(runs: Runs) -> None:
    tables = tables_of(honest.regions(runs))
    wins, ties = (sum(int(str(row[i])) for row in tables["honest-where"].rows) for i in (1, 3))
    places = len(honest_grid.KEYS)
    assert wins <= places and wins + ties // 2 >= places
    assert len(tables["honest-regions"].rows) == places


def test_places_are_said_by_gpus() -> None:
    both, one = [("h100_ndr400", 8, 8), ("h100_ndr400", 8, 16)], [("h100_ndr400", 8, 16)]
    everywhere = "all clusters with any number of KV heads"
    assert honest._places(both) == f"8 GPUs: {everywhere}; 16 GPUs: {everywhere}"
    assert honest._places(one).startswith("16 GPUs") and honest._places([]) == "nowhere"


@pytest.mark.long
def test_the_article_has_all_sections_and_figures(runs: Runs, tmp_path: Path) -> None:
    page = study_named("honest").write(runs, tmp_path).read_text()
    sections = sections_of("honest", runs)
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [one.title for one in sections]
    shown = re.findall(r"\]\((.*?\.svg)\)", page)
    assert len(shown) == 3 and sorted(shown) == sorted(path.name for path in tmp_path.glob("*.svg"))
    assert "{" not in page


@pytest.mark.exhaustive
def test_the_notebook_runs(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notebooks.RECORDS, str(runs.folder))
    names: dict[str, object] = {}
    for cell in code_of("honest"):
        exec(cell, names)
    assert names["runs"] and all(section.to_html() for section in sections_of("honest", runs))
