"""Uploading records to W&B later: each once, whatever ends it, and again where a record has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sp_bench import records, wandb_upload
from sp_bench.loggers import Logger, open_logger
from tests.support.made_records import columns, made
from tests.support.wandb_runs import FAKE, read_runs, shadow_wandb

ROOT = Path(__file__).parents[1]
COUNTS_RUNS = (
    FAKE
    + """
import os, time
class Run:
    summary = {}
    def __init__(self, id): self.id = id
    def __enter__(self): return self
    def log(self, _): pass
    def __exit__(self, *exception):
        time.sleep(float(os.environ.get("RUN_S", "0")))
        with open(os.environ["RUNS"], "a") as file: print(self.id, file=file)
def init(id, mode, project, **_):
    if id in os.environ.get("REFUSED", "").split(): raise RuntimeError("no more quota")
    if id == os.environ.get("FATAL"): os.abort()
    return Run(f"{id} {mode} {project}")
"""
)
"""A wandb that writes down which runs there were."""


class Uploads:
    """Uploads from a folder to a wandb that counts runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *keys: str) -> int:
        return wandb_upload.main([str(self.folder), *keys])

    def runs(self) -> list[str]:
        """The runs since the last call."""
        log = Path(os.environ["RUNS"])
        found = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.removesuffix(" offline sp_bench") for line in found]


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uploads:
    """A folder with three records, a, b and c."""
    shadow_wandb(tmp_path, monkeypatch, COUNTS_RUNS)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    for run_id in "abc":
        records.write(tmp_path / "results", made(run_id))
    return Uploads(tmp_path / "results")


def test_each_record_is_uploaded_once(uploads: Uploads, capsys: pytest.CaptureFixture[str]):
    assert uploads() == 0
    assert uploads.runs() == ["a", "b", "c"]
    said = capsys.readouterr().out
    assert "written: 3 of 3 runs, offline, project sp_bench" in said
    assert f"nothing was sent: `wandb sync {uploads.folder}/wandb/offline-run-*` sends them" in said
    assert uploads() == 0
    assert uploads.runs() == []
    said = capsys.readouterr().out
    assert "skipped: 3, written offline before" in said
    assert "W&B has" not in said


def test_wandb_mode_holds(uploads: Uploads, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """WANDB_MODE=disabled writes nothing, whoever asks; otherwise it is the mode unless another is asked for."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert uploads("mode=online") == 0
    assert uploads.runs() == []
    assert capsys.readouterr().out == "nothing was written or sent: WANDB_MODE=disabled\n"
    assert type(open_logger({"name": "wandb"})) is Logger
    monkeypatch.setenv("WANDB_MODE", "online")
    assert uploads() == 0
    assert uploads.runs() == ["a online sp_bench", "b online sp_bench", "c online sp_bench"]


def test_a_record_that_changed_is_uploaded_again(uploads: Uploads):
    assert uploads() == 0
    uploads.runs()
    records.write(uploads.folder, made("b", step_ms_median=1.0))
    records.write(uploads.folder, made("c"), samples=columns({"forward": [[1.0]]}))
    assert uploads() == 0
    assert uploads.runs() == ["b", "c"]


def test_each_destination_has_its_own(uploads: Uploads):
    assert uploads() == 0
    assert uploads.runs() == ["a", "b", "c"]
    assert uploads("project=other") == 0
    assert uploads.runs() == ["a offline other", "b offline other", "c offline other"]
    assert uploads("mode=online", "entity=team") == 0
    assert uploads.runs() == ["a online sp_bench", "b online sp_bench", "c online sp_bench"]
    assert uploads("mode=online", "entity=team") == uploads("project=other", "entity=null") == 0
    assert uploads.runs() == []


def test_a_run_that_fails_is_named_and_tried_again(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("REFUSED", "b")
    assert uploads() == 1
    assert uploads.runs() == ["a", "c"]
    assert f"not written: {uploads.folder}/b.json: run b: RuntimeError: no more quota" in capsys.readouterr().err
    monkeypatch.delenv("REFUSED")
    assert uploads() == 0
    assert uploads.runs() == ["b"]


def test_when_all_fail_it_gives_up(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("REFUSED", "b c d e")
    for run_id in "def":
        records.write(uploads.folder, made(run_id))
    assert uploads() == 1
    assert uploads.runs() == ["a"]
    out, err = capsys.readouterr()
    assert "written: 1 of 6 runs" in out
    assert "given up after 3 failures in a row" in err
    assert "e.json" not in err


def test_a_writer_that_crashes_loses_nothing(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FATAL", "b")
    assert uploads() == 1
    assert uploads.runs() == ["a"]
    assert "sp_bench.wandb_upload: the writer process was ended by SIGABRT" in capsys.readouterr().err
    monkeypatch.delenv("FATAL")
    assert uploads() == 0
    assert uploads.runs() == ["b", "c"]


def test_without_wandb_it_says_so(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shadow_wandb(tmp_path, monkeypatch, 'raise ModuleNotFoundError("No module named wandb", name="wandb")')
    assert uploads() == 1
    assert 'it is not installed: pip install "sp-bench[wandb]"' in capsys.readouterr().err
    assert not list(uploads.folder.glob("*.wandb.json"))


def test_a_wandb_that_hangs_is_given_up(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RUN_S", "60")
    assert uploads("timeout_s=0.3") == 1
    assert "not done after 0.3 s, given up" in capsys.readouterr().err


@pytest.mark.long
def test_a_killed_upload_goes_on_where_it_stopped(uploads: Uploads, monkeypatch: pytest.MonkeyPatch):
    ids = [f"{i:02}" for i in range(20)]
    for run_id in ids:
        records.write(uploads.folder, made(run_id))
    monkeypatch.setenv("RUN_S", "0.1")
    path = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))
    command = [sys.executable, "-m", "sp_bench.wandb_upload", str(uploads.folder)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as upload:
        while len(list(uploads.folder.glob("*.wandb.json"))) < 5:
            assert upload.poll() is None
            time.sleep(0.01)
        upload.kill()
    assert uploads() == 0
    found = uploads.runs()
    assert sorted(set(found)) == sorted([*ids, "a", "b", "c"])
    assert len(found) <= len(set(found)) + 1  # the one that its writer was at


def test_broken_records_are_named_and_stay(uploads: Uploads, capsys: pytest.CaptureFixture[str]):
    (uploads.folder / "half.json").write_text('{"run_id": "half"')
    records.write(uploads.folder, made("old", schema_version=1))
    assert uploads() == 0
    assert uploads.runs() == ["a", "b", "c"]
    err = capsys.readouterr().err
    assert f"left out: {uploads.folder}/half.json: not a whole JSON object" in err
    assert f"left out: {uploads.folder}/old.json: schema_version=1" in err
    assert (uploads.folder / "half.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"offline /sp_bench": 1}', "{"])
def test_what_is_remembered_can_be_broken(uploads: Uploads, text: str):
    (uploads.folder / "b.wandb.json").write_text(text)
    assert uploads() == 0
    assert uploads.runs() == ["a", "b", "c"]
    assert uploads() == 0
    assert uploads.runs() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no folder: there is nothing to upload"),
        (["nowhere"], "nowhere: is not a folder"),
        ([".", "mode=on"], "logger.mode=on: there is no such mode; did you mean online"),
        ([".", "proyect=p"], "proyect: there is no such key; did you mean project"),
        ([".", "timeout_s=soon"], "logger.timeout_s=soon"),
    ],
)
def test_what_cannot_be_served(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
):
    monkeypatch.chdir(tmp_path)
    assert wandb_upload.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_the_group_is_the_sweep_of_the_record_unless_one_is_given(tmp_path: Path):
    pytest.importorskip("wandb")
    config = {"logger": {"name": "none", "group": "mesh_table3"}}
    for run_id in "ab":
        records.write(
            tmp_path, made(run_id, config=config), samples=columns({"forward": [[1.0]]}), trace={"traceEvents": []}
        )
    assert wandb_upload.main([str(tmp_path)]) == 0
    assert wandb_upload.main([str(tmp_path), "group=mine", "project=p", f"dir={tmp_path / 'out'}"]) == 0
    for folder, group, project in ((tmp_path, "mesh_table3", "sp_bench"), (tmp_path / "out", "mine", "p")):
        found = read_runs(folder)
        assert [(run.run.run_id, run.run.run_group, run.run.project) for run in found] == [
            ("a", group, project),
            ("b", group, project),
        ]
        assert all(run.table["data"] == [[0, 0, "forward", "step", 0.001]] for run in found)
        assert all(set(run.artifacts) == {"run_table", "timeline"} for run in found)
    remembered: dict[str, Any] = json.loads((tmp_path / "a.wandb.json").read_text())
    assert set(remembered) == {"offline /sp_bench", "offline /p"}
