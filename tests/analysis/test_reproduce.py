"""Points that studies ask for, and the command that makes the report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from sp_bench import records
from sp_bench.analysis import notebooks, reproduce
from sp_bench.analysis.figure import Figure, labelled, new_figure, sources
from sp_bench.analysis.number import of_record
from sp_bench.analysis.runs import FEW, Runs, is_measured, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies import STUDIES
from sp_bench.analysis.table import Table, columns
from sp_bench.resources import ROOT

SMALL = {"seqlen": "8k", "heads": 8, "gpus": 4}
SCRIPT = f"""
from pathlib import Path
from sp_bench.analysis.runs import Runs, point
runs = Runs(Path("records"), workers=2)
found = runs.ask([point(method="ring", seqlen="8k", heads=n, gpus=4) for n in range(1, {2 * FEW + 1})])
print([record.heads for record in found])
"""
NOTEBOOK = """
# %% [markdown]
# # Tiny
# %%
import os
from pathlib import Path
from sp_bench.analysis.runs import Runs
runs = Runs(Path(os.environ["SP_BENCH_RECORDS"]))
# %%
print(runs.one(method="ring", seqlen="8k", heads=8, gpus=4).run_id)
"""


def test_a_point_is_written_as_on_the_command_line() -> None:
    found = point(method="mesh", gpus=4, tile=[2, 2], causal=False, kv_heads=None, cluster__nics_per_node=4)
    assert found == (
        "causal=false",
        "cluster.nics_per_node=4",
        "gpus=4",
        "kv_heads=null",
        "method=mesh",
        "method.tile=[2,2]",
    )
    assert "stragglers={ranks:{3:1.5}}" in point(stragglers={"ranks": {3: 1.5}})


def test_only_points_of_this_machine_are_measured() -> None:
    assert is_measured(point(mode="measure"))
    assert is_measured(point(cluster="local"))
    assert not is_measured(point(cluster="local", mode="simulate"))
    assert not is_measured(point(method="mesh"))


def test_records_are_taken_from_the_folder(tmp_path: Path) -> None:
    ran: list[str] = []
    runs = Runs(tmp_path, progress=ran.append)
    first = runs.one(method="ring", **SMALL)
    assert runs.one(method="ring", **SMALL) is first
    assert ran == ["gpus=4 heads=8 method=ring seqlen=8k"]
    path = tmp_path / f"{first.run_id}.json"
    path.write_text(path.read_text().replace(f'"step_ms_median": {first.step_ms_median}', '"step_ms_median": 1.25'))
    assert Runs(tmp_path).one(method="ring", **SMALL).step_ms_median == 1.25


def test_refused_points_are_records(tmp_path: Path) -> None:
    simulated, measured = Runs(tmp_path).ask(
        [point(method="ulysses", gpus=6, heads=8, seqlen="6k"), point(mode="measure", gpus=10**6, seqlen="1M")]
    )
    for record in (simulated, measured):
        assert (record.status, record.step_ms_median) == ("unsupported", None)
        assert record.error
    assert of_record(simulated, "step_ms_median").why == simulated.error


@pytest.mark.exhaustive
def test_a_script_without_main_guard_can_ask_workers(tmp_path: Path) -> None:
    """Worker processes must not run the script again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == f"{[*range(1, 2 * FEW + 1)]}\n", done.stderr
    assert len(records.read_all(tmp_path / "records")) == 2 * FEW


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["papers=mesh"], "did you mean paper?"),
        (["paper=nothing"], "paper=nothing: there is no such paper"),
        (["notebooks=maybe"], "must be true or false"),
        (["out"], "out: is not of the form key=value; paper=all would work"),
    ],
)
def test_bad_keys_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(arguments) == 2
    assert said in capsys.readouterr().err


def tiny(runs: Runs) -> Section:
    """A section with one point as text, table and figure."""
    step = of_record(runs.one(method="ring", **SMALL), "step_ms_median")
    canvas, axes = new_figure()
    axes[0, 0].bar(["ring"], [step.known], label=labelled("step", step.kind))
    picture = Figure("tiny-step", "A step", canvas, sources([step]))
    return Section("Tiny", text("{step} ms", step=step), Table("tiny", "T", columns("step | ms"), [[step]]), picture)


@pytest.mark.exhaustive
def test_one_command_makes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STUDIES, "tiny", ("A tiny study", (tiny,)))
    monkeypatch.setattr(notebooks, "HERE", tmp_path)
    (tmp_path / "tiny.py").write_text(NOTEBOOK)
    out = tmp_path / "out"
    assert reproduce.main(["paper=tiny", f"out={out}"]) == 0
    (record,) = records.read_all(out / "records")
    assert f'<a href="#source-{record.run_id}"' in (out / "report.html").read_text()
    assert {path.name for path in (out / "tables").iterdir()} == {f"tiny.{e}" for e in ("md", "tex", "html", "csv")}
    assert {path.name for path in (out / "figures").iterdir()} == {f"tiny-step.{e}" for e in ("pdf", "svg", "png")}
    last = nbformat.read(out / "notebooks" / "tiny.ipynb", 4).cells[-1]
    assert last["outputs"][0]["text"] == f"{record.run_id}\n"
    assert "1 points" in capsys.readouterr().out

    (tmp_path / "tiny.py").write_text("# %%\n1 / 0\n")
    assert reproduce.main(["paper=tiny", f"out={out}"]) == 1
    assert "notebook tiny: ZeroDivisionError: division by zero" in capsys.readouterr().out
    assert [found.run_id for found in records.read_all(out / "records")] == [record.run_id]
