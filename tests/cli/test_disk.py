"""Folders for records that are full or can't be written: what is said, and what is kept and completed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.__main__ import main
from tests.cli.mounts import fill, read_only, resize, small_disk

SIMULATED = ["-m", "method=ring,mesh", "gpus=4,8,16,32", "seqlen=64k", "trace=0", "logger=none"]
MEASURED = ["cluster=local", "gpus=2", "heads=4", "head_dim=16", "dtype=float32", "iters=3", "warmup=1", "logger=none"]


def kept_in(folder: Path) -> dict[str, int]:
    """The records of a folder, all of them ok, and when each was written."""
    found = records.read_all(folder)
    assert all(record.status == "ok" for record in found)
    return {record.run_id: (folder / f"{record.run_id}.json").stat().st_mtime_ns for record in found}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of what tests before this one left unclosed
@pytest.mark.filterwarnings("error")  # a file that is no record would be warned of
def test_a_disk_that_gets_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep ends with what is kept, lost and not run; with more room the same command runs what is missing."""
    with small_disk(tmp_path / "disk", kb=64) as folder:
        assert main([*SIMULATED, f"results_dir={folder}"]) == 1
        captured = capsys.readouterr()
        kept = kept_in(folder)
        assert 1 <= len(kept) < 7, "the disk is as large as this test needs it"
        assert re.match(
            rf"sp_bench: {folder}/[0-9a-f]{{16}}\.json: can't be written \(No space left on device\)", captured.err
        )
        assert re.search(r"In no record: \w+ gpus=\d+ seqlen=65536\.", captured.err)
        assert f"Of 8 points {len(kept)} are kept and {7 - len(kept)} not run" in captured.err
        assert f"{len(kept) + 1} points, all" in captured.out
        assert "Traceback" not in captured.err
        assert all(json.loads(path.read_text()) for path in folder.glob("*.json"))
        assert not list(folder.glob(".*"))
        resize(folder, kb=4096)
        assert main([*SIMULATED, f"results_dir={folder}"]) == 0
        assert f"reused: {len(kept)} of 8 points" in capsys.readouterr().out
        after = kept_in(folder)
        assert len(after) == 8
        assert {run_id: after[run_id] for run_id in kept} == kept


@pytest.mark.long
def test_measured_points_that_can_not_be_written_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Points that were timed in turn are all lost at once, and none in silence."""
    with small_disk(tmp_path / "disk", kb=8) as folder:
        assert main(["-m", *MEASURED, "method=ring,mesh", "seqlen=64,128", f"results_dir={folder}"]) == 1
        captured = capsys.readouterr()
        assert kept_in(folder) == {}
    assert "In no record: ring gpus=2 seqlen=64; mesh gpus=2 seqlen=64. Of 4 points 0 are kept" in captured.err
    assert len(re.findall(r"[\d.]+ ms \[", captured.out)) == 2, "measured, and in the table"


def test_one_point_that_can_not_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", kb=8) as folder:
        assert main(["gpus=8", "seqlen=64k", "logger=none", f"results_dir={folder}"]) == 1
    captured = capsys.readouterr()
    assert "can't be written (No space left on device)" in captured.err
    assert "exposed communication" in captured.out


@pytest.mark.long
def test_a_folder_for_wandb_that_is_full(tmp_path: Path) -> None:
    """The benchmark is none the worse for it."""
    with small_disk(tmp_path / "wandb", kb=4) as disk:
        fill(disk)
        assert main([*MEASURED[:-1], "method=ring", "seqlen=64", f"results_dir={tmp_path}"]) == 0
    assert len(kept_in(tmp_path)) == 1


class NoRanks:
    """In the place of what opens ranks."""

    def __init__(self, *arguments: object) -> None:
        raise AssertionError("ranks are started")


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_bench.point.measured.open_ranks", NoRanks)


def assert_refused(folder: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is refused before any rank is started."""
    assert main([*MEASURED, "seqlen=64", f"results_dir={folder}"]) == 2
    assert capsys.readouterr().err == f"sp_bench: results_dir={folder}: {message}; results_dir=results would work\n"


@pytest.mark.usefixtures("no_ranks")
def test_a_disk_that_is_full_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", kb=16) as folder:
        fill(folder)
        assert_refused(folder, "can't be written (No space left on device)", capsys)


@pytest.mark.usefixtures("no_ranks")
def test_a_folder_that_is_read_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with read_only(tmp_path / "folder") as folder:
        assert_refused(folder, "can't be written (Read-only file system)", capsys)
        assert_refused(folder / "new", "can't be made (Read-only file system)", capsys)


@pytest.mark.usefixtures("no_ranks")
def test_a_folder_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert_refused(tmp_path / "file", "can't be made (File exists)", capsys)
    assert_refused(tmp_path / "file" / "below", "can't be made (Not a directory)", capsys)
    assert_refused(Path("/proc/results"), "can't be made (No such file or directory)", capsys)
