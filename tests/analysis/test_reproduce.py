"""Points that studies ask for, and the command that makes the report."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import nbformat
import pytest

from sp_bench import records
from sp_bench.analysis import notebooks, paper_tables, reproduce, studies
from sp_bench.analysis import runs as runs_module
from sp_bench.analysis.number import of_record
from sp_bench.analysis.runs import FEW, Runs, from_both_ends, is_measured, point
from sp_bench.analysis.section import Section
from sp_bench.machine import cores_here
from sp_bench.resources import ROOT

SMALL = {"seqlen": "8k", "heads": 8, "gpus": 4}
SCRIPT = f"""
from pathlib import Path
from sp_bench.analysis.runs import Runs, point
runs = Runs(Path("records"), workers=2)
found = runs.ask([point(method="ring", seqlen="8k", heads=n, gpus=4) for n in range(1, {2 * FEW + 1})])
print([record.heads for record in found])
"""
STUDY = """
from sp_bench.analysis.figure import Figure, labelled, new_figure, sources
from sp_bench.analysis.number import of_record
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.table import Table, columns

OPTIONS = {"heads": "8"}
SAID = "A constant."

def said(runs):
    return f"asked for {runs.options['heads']} heads"

def step(runs):
    heads = runs.options["heads"]
    found = of_record(runs.one(method="ring", seqlen="8k", gpus=4, heads=heads), "step_ms_median")
    canvas, axes = new_figure()
    axes[0, 0].bar(["ring"], [found.known], label=labelled("step", found.kind))
    picture = Figure("tiny-step", "A step", canvas, sources([found]))
    table = Table("tiny", "T", columns("step | ms"), [[found]])
    return Section("A step", text("{step} ms, heads={heads}", step=found, heads=heads), table, picture)

def printed(runs):
    return list(rows("tiny_table"))

def wrong(runs):
    runs.failed.append("all of it")
    return "That went wrong."
"""
PAGE = """\
report: 99

# Tiny

Made by `{command}` on {cores} cores, with torch {torch}. It says "{said}", and {numerics.PROBLEM}.

{step}

{SAID}

{printed}

```python
print(runs.one(method="ring", seqlen="8k", heads=8, gpus=4).run_id, "{step}")
```
"""
TABLE = "claim,value\na,1.5\n"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a study, which is all that a study is."""
    folder = tmp_path / "studies" / "tiny"
    folder.mkdir(parents=True)
    for name, content in (("__init__.py", STUDY), ("page.md", PAGE), ("tiny_table.csv", TABLE)):
        (folder / name).write_text(content)
    here = str(folder.parent)
    monkeypatch.setattr(studies, "__path__", [*studies.__path__, here])
    monkeypatch.setattr(paper_tables, "STUDIES", folder.parent)
    found = f"import sp_bench.analysis.studies as all_studies\nfrom pathlib import Path\n\nhere = {here!r}\n"
    found += "all_studies.__path__.append(here)\nimport sp_bench.analysis.paper_tables as tables\n\n"
    monkeypatch.setattr(notebooks, "FIRST", f"{found}tables.STUDIES = Path(here)\n{notebooks.FIRST}")
    monkeypatch.delitem(sys.modules, "sp_bench.analysis.studies.tiny", raising=False)
    return folder


def test_a_study_is_found_by_its_folder(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(studies.papers())[-1] == "tiny" and "tiny" not in Path(studies.__file__).read_text()
    assert reproduce.main(["study=tiny", "heads=4", f"pages={tmp_path}", f"records={tmp_path / 'records'}"]) == 0
    page = (tmp_path / "tiny.md").read_text()
    assert page.startswith("# Tiny\n\nMade by `python -m analysis.reproduce study=tiny` on ")
    assert "ms, heads=4" in page and "![A step](tiny-step.svg)" in page and "| claim | value |" in page
    assert '.run_id, "{step}")' in page
    assert (tmp_path / "tiny-step.svg").exists()
    assert reproduce.main(["study=tiny", "gpus=4"]) == 2
    assert "gpus" in capsys.readouterr().err


def test_what_goes_wrong_in_a_study_is_the_exit_code(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny / "page.md").write_text("# Tiny\n\n{wrong}\n")
    assert reproduce.main(["study=tiny", f"pages={tmp_path}"]) == 1
    assert capsys.readouterr().out.endswith("tiny.md\nall of it\n")
    assert "tiny" not in studies.papers()
    assert reproduce.main(["paper=tiny", f"pages={tmp_path}"]) == 1
    assert capsys.readouterr().out.endswith("tiny.md\nall of it\n")


@pytest.mark.parametrize("name", studies.studies())
def test_every_slot_of_a_page_is_a_figure(name: str) -> None:
    """Figures of the study's module, or of another's, or a constant; and the notebook shows each figure of its own."""
    study = studies.study_named(name)
    for slot in study.slots:
        other, _, figure = slot.rpartition(".")
        assert callable(getattr(studies.study_named(other or name).module, figure)) != figure.isupper()
    code = [cell.source for cell in notebooks.notebook(study).cells if cell.cell_type == "code"]
    alone = re.findall(r"^\{([a-z_0-9]+)\}$", study.page, re.MULTILINE)
    assert [line for line in code if line.startswith(f"{name}.")] == [f"{name}.{slot}(runs)" for slot in alone]


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


def test_points_that_are_in_the_folder_start_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [point(method="ring", **{**SMALL, "heads": heads}) for heads in range(1, 2 * FEW + 1)]
    first = Runs(tmp_path, workers=1).ask(asked)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert [record.run_id for record in Runs(tmp_path, workers=2).ask(asked)] == [record.run_id for record in first]
    (tmp_path / f"{first[0].run_id}.json").unlink()
    with pytest.raises(pytest.fail.Exception, match="a process was started"):
        Runs(tmp_path, workers=2).ask(asked)


@pytest.mark.long
def test_processes_are_kept_for_the_next_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few they are then. Processes end with the runs that asked."""
    started, start = list[subprocess.Popen[str]](), subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **keys: started.append(start(*a, **keys)) or started[-1])
    runs = Runs(tmp_path, workers=2)
    for heads in (range(1, 2 * FEW + 1), range(2 * FEW + 1, 2 * FEW + 3)):
        found = runs.ask(point(method="ring", **{**SMALL, "heads": n}) for n in heads)
        assert [record.heads for record in found] == [*heads]
    assert len(started) == 2 and [process.poll() for process in started] == [None, None]
    del runs
    assert [process.poll() for process in started] == [0, 0]


@pytest.mark.long
def test_large_points_are_simulated_by_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[subprocess.Popen[str]](), subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **keys: started.append(start(*a, **keys)) or started[-1])
    monkeypatch.setattr(runs_module, "LARGE", 8)
    runs = Runs(tmp_path, workers=2)
    for gpus, alive in ((4, [None, None]), (8, [0, 0, None, None])):
        runs.ask(point(method="ring", **{**SMALL, "heads": n, "gpus": gpus}) for n in range(1, 2 * FEW + 1))
        assert [process.poll() for process in started] == alive


def test_nothing_else_runs_while_points_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    monkeypatch.setattr(runs_module, "run_points", lambda *_, **__: done.append("measured") or [])
    runs = Runs(tmp_path, leave_alone=lambda: done.append("left alone"))
    runs.ask([point(mode="measure", gpus=10**6, seqlen="1M")])  # which is refused
    with pytest.raises(KeyError):  # the record that run_points would have made
        runs.ask([point(mode="measure", cluster="local", gpus=2, seqlen="4k", heads=4, head_dim=64)])
    assert done == ["measured", "left alone", "measured"]


def test_points_on_most_gpus_are_run_first(tmp_path: Path) -> None:
    """Those that differ by their clusters alone follow one another; records come as they were asked for."""
    ran = list[str]()
    asked = [
        point(method=method, cluster=cluster, **{**SMALL, "gpus": gpus})
        for gpus in (2, 4)
        for cluster in ("b200", "h20")
        for method in ("ring", "ulysses")
    ]
    found = Runs(tmp_path, workers=1, progress=ran.append).ask(asked)
    assert [record.gpus for record in found] == [2] * 4 + [4] * 4
    expected = [
        (gpus, method, cluster) for gpus in (4, 2) for method in ("ring", "ulysses") for cluster in ("b200", "h20")
    ]
    given = [dict(text.split("=") for text in one.split()) for one in ran]
    assert [(int(one["gpus"]), one["method"], one["cluster"]) for one in given] == expected


def test_half_of_the_processes_begin_with_the_smallest_points() -> None:
    first, last, third = from_both_ends("abcdefg", 3)
    assert [next(first), next(last), next(third), next(last), next(first)] == [*"agbfc"]
    assert [*third] == ["d", "e"] and [*first] == [*last] == []


def test_what_is_no_record_is_measured_once_too(tmp_path: Path) -> None:
    made = iter([{"ms": 1.5}, {"ms": 2.5}])
    runs = Runs(tmp_path / "records")
    assert [runs.kept("times", lambda: next(made)) for _ in range(2)] == [{"ms": 1.5}] * 2
    (tmp_path / "records" / "times.json").unlink()
    assert runs.kept("times", lambda: next(made)) == {"ms": 2.5}


def test_refused_points_are_records(tmp_path: Path) -> None:
    simulated, measured = Runs(tmp_path).ask(
        [point(method="ulysses", gpus=6, heads=8, seqlen="6k"), point(mode="measure", gpus=10**6, seqlen="1M")]
    )
    for record in (simulated, measured):
        assert (record.status, record.step_ms_median) == ("unsupported", None)
        assert record.error
    assert of_record(simulated, "step_ms_median").why == simulated.error


@pytest.mark.long
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


@pytest.mark.long
def test_one_command_makes_everything(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert reproduce.main(["paper=tiny", f"out={out}"]) == 0
    (record,) = records.read_all(out / "records")
    assert f'<a href="#source-{record.run_id}"' in (out / "report.html").read_text()
    assert {path.name for path in (out / "tables").iterdir()} == {f"tiny.{e}" for e in ("md", "tex", "html", "csv")}
    assert {path.name for path in (out / "figures").iterdir()} == {f"tiny-step.{e}" for e in ("pdf", "svg", "png")}
    cells = nbformat.read(out / "notebooks" / "tiny.ipynb", 4).cells
    assert cells[-1]["outputs"][0]["text"] == f"{record.run_id} {{step}}\n"
    made = [x["data"].get("text/markdown", "") for cell in cells for x in cell.get("outputs", ()) if "data" in x]
    assert f"on {cores_here()} cores" in made[0] and 'It says "asked for 8 heads", and cluster=local' in made[0]
    assert "A constant.\n" in made
    assert not any(slot in text for slot in ("{cores}", "{torch}", "{SAID}", "{said}", "{numerics") for text in made)
    assert not any("{" in cell.source for cell in cells if cell.cell_type == "markdown")
    assert "1 points" in capsys.readouterr().out

    (tiny / "page.md").write_text("report: 99\n\n# Tiny\n\n```python\n1 / 0\n```\n")
    assert reproduce.main(["paper=tiny", f"out={out}"]) == 1
    assert "notebook tiny: ZeroDivisionError: division by zero" in capsys.readouterr().out
    assert [found.run_id for found in records.read_all(out / "records")] == [record.run_id]


def test_notebooks_are_executed_while_points_of_the_next_study_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, executed = Event(), list[str]()

    def execute(name: str, out: Path, records: Path) -> str:
        assert (out, records) == (tmp_path / "notebooks", tmp_path / "records")
        executed.append(name)
        first.set()
        return "" if name == "one" else f"{name} is wrong"

    @dataclass
    class Fake:
        name: str
        title: str = "A study"
        options: Mapping[str, str] = field(default_factory=dict)

        def sections(self, runs: Runs) -> list[Section]:
            assert self.name == "one" or first.wait(60)
            runs.leave_alone()
            assert self.name == "one" or executed == ["one"]
            return []

    monkeypatch.setattr(notebooks, "execute", execute)
    chosen: list[Any] = [Fake("one"), Fake("two", "Another one")]
    assert reproduce.reproduce(chosen, tmp_path, with_notebooks=True) == 1
    assert executed == ["one", "two"]
    assert "notebook two: two is wrong\n" in capsys.readouterr().out


def test_a_notebook_is_written_without_running_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert notebooks.main(["ring", f"out={tmp_path}"]) == 0
    cells = nbformat.read(tmp_path / "ring.ipynb", 4).cells
    assert cells[0].source.startswith("# Ring Attention") and not any(cell.get("outputs") for cell in cells)
    assert notebooks.main(["rings"]) == 2
    assert "study=rings: there is no such study" in capsys.readouterr().err
