"""The study "Which method, honestly": intervals, ties, and its sections on a few points."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import honest, honest_grid
from sp_bench.analysis.studies.honest_grid import Step, steps, tied
from sp_bench.bench.backing import Interval, widest
from tests.support.sections import words_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: honest_grid.METHODS[name] for name in ("zigzag", "usp", "mesh", "mesh with heads")}
    values = {
        "CLUSTERS": ("h100_ndr400",), "KV_HEADS": (8,), "GPUS": (8, 16), "METHODS": few, "NIC_GB_PER_S": (25, 50),
        "KEYS": (("h100_ndr400", 8, 8), ("h100_ndr400", 8, 16)), "SEQLEN": "64k", "SCALE_GPUS": (8, 16),
        "NIC_AT": {**honest_grid.NIC_AT, "gpus": 16},
    }  # fmt: skip
    for module in (honest_grid, honest):
        for name, value in values.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.mark.exhaustive
def test_a_tie_is_an_overlap_of_intervals(runs: Runs) -> None:
    record = runs.one(method="zigzag", gpus=8, seqlen="64k")
    ms = record.step_ms_median or 0.0
    exact = Interval(ms, ms, ms, True)
    assert tied([Step("a", record, exact), Step("b", record, exact)])[1:]
    assert not tied([Step("a", record, exact), Step("b", record, Interval(2 * ms, 2 * ms, 2 * ms, True))])[1:]
    ranked = next(iter(honest_grid.grid(runs).values()))
    assert [s.ms.known for s in ranked] == sorted(s.ms.known for s in ranked)
    for step in ranked:
        assert step.low < step.ms.known < step.high
        assert (step in tied(ranked)) == (step.low <= ranked[0].high)


@pytest.mark.exhaustive
def test_what_nobody_measured_has_the_widest_interval(runs: Runs) -> None:
    found = {step.name: step for step in honest_grid.grid(runs)["h100_ndr400", 8, 16]}
    zigzag, error = found["zigzag"], found["zigzag"].record.validation_error
    assert zigzag.backed and error is not None and zigzag.low == pytest.approx(zigzag.ms.known / (1 + error))
    mesh = steps({"mesh": runs.one(method="mesh", tile=[2, 8], gpus=16, seqlen="64k")})[0]
    assert not mesh.backed and mesh.high == pytest.approx(mesh.ms.known / (1 - widest("several nodes")))
    assert widest("several nodes") >= error


@pytest.mark.exhaustive
def test_all_sections_render_and_the_notebook_shows_them(runs: Runs) -> None:
    for section in (make(runs) for make in honest.SECTIONS):
        assert "{" not in words_of(section) and section.to_html()
    code = [cell.source for cell in jupytext.read(Path(notebooks.HERE) / "honest.py").cells if cell.cell_type == "code"]
    shown = [line.split(".")[1].split("(")[0] for line in code if line.startswith("honest.")]
    assert shown == [section.__name__ for section in honest.SECTIONS]
