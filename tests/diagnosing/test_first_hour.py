"""The first hour: its steps are commands that can be served, and what is done is not done again."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sp_bench import first_hour, records
from sp_bench.cli.arguments import config_dir
from sp_bench.cli.compose import Composer
from sp_bench.diagnosing.findings import STATUSES, counts, finding
from sp_bench.first_hour import SHAPES, main, steps
from sp_bench.launch import Launch
from sp_bench.methods import REGISTRY
from sp_bench.point import resolve
from sp_bench.resources import ROOT

SMALL = ("quick=true", "device=cpu", "ranks=2")
NAMES = ["doctor", "calibrate", "exactness", "headline", "simulated"]


class Commands:
    """Stands in for the commands of steps: they succeed, or return the next of `codes`, and do nothing."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        """The files that each step was to write."""
        self.codes: list[int] = []

    def __call__(self, arguments: list[str]) -> int:
        self.ran += [x.rpartition("/")[2] for x in arguments if x.startswith(("results_dir=", "out="))]
        return self.codes.pop(0) if self.codes else 0


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands()
    monkeypatch.setattr(first_hour, "COMMANDS", dict.fromkeys(first_hour.COMMANDS, found))
    return found


ALL = ["doctor.json", "here.yaml", "exactness", "headline", "simulated"]


def test_what_is_done_is_not_done_again(commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands.codes = [0, 0, 1]
    assert main([*SMALL, f"out={tmp_path}"]) == 1
    assert commands.ran == ALL and "see exactness" in capsys.readouterr().out
    commands.ran.clear()
    assert main([*SMALL, f"out={tmp_path}"]) == 0
    assert commands.ran == ["exactness"] and "all steps ended well" in capsys.readouterr().out
    commands.ran.clear()
    assert main([*SMALL, f"out={tmp_path}"]) == 0
    assert commands.ran == [] and capsys.readouterr().out.count("done before") == 5


def test_a_cut_off_step_is_begun_again(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(first_hour, "COMMANDS", {**first_hour.COMMANDS, "sp_bench": killed})
    with pytest.raises(KeyboardInterrupt):
        main([*SMALL, f"out={tmp_path}"])
    assert json.loads((tmp_path / "manifest.json").read_text())["steps"]["exactness"]["exit_code"] is None
    monkeypatch.setattr(first_hour, "COMMANDS", dict.fromkeys(first_hour.COMMANDS, commands))
    assert main([*SMALL, f"out={tmp_path}"]) == 0
    assert commands.ran == ALL


def test_a_doctor_that_fails_ends_it_unless_forced(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.codes = [1]
    assert main([*SMALL, f"out={tmp_path}"]) == 1
    assert commands.ran == ALL[:1]
    assert "the doctor failed: it ended without" in capsys.readouterr().err
    rows = [finding("ranks", f"{name} link", f"{name} GB/s", name, "a fix") for name in STATUSES]
    (tmp_path / "doctor.json").write_text(
        json.dumps({"findings": [asdict(row) for row in rows], "counts": counts(rows)})
    )
    commands.codes = [1]
    assert main([*SMALL, f"out={tmp_path}"]) == 1
    assert "the doctor failed: fail link: fail GB/s; force=true would go on" in capsys.readouterr().err
    commands.ran.clear()
    commands.codes = [1]
    assert main([*SMALL, f"out={tmp_path}", "force=true"]) == 0
    assert commands.ran == ALL


def test_a_folder_belongs_to_its_options_and_code(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, f"out={tmp_path}"]) == 0
    assert main([*SMALL[:2], "ranks=3", f"out={tmp_path}"]) == 2
    assert "belongs to device=cpu ranks=2 cluster=null quick=True; these keys, or another" in capsys.readouterr().err
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    for spoiled, message in (
        (json.dumps({**content, "code_version": "0" * 16}), "belongs to version 0000000000000000 of the code"),
        (json.dumps({**content, "schema_version": 99}), "is of another version"),
        ("{", "is not JSON"),
    ):
        manifest.write_text(spoiled)
        assert main([*SMALL, f"out={tmp_path}"]) == 2
        assert message in capsys.readouterr().err
    assert commands.ran == ALL, "nothing ran meanwhile"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("quick=true", "out: a folder is needed; out=first_hour would work"),
        ("out=/proc/x", "out=/proc/x: can't be made"),
        ("out=build/x quick=maybe device=cpu", "quick=maybe: must be true or false"),
        ("out=build/x ranks=0 device=cpu", "ranks=0: must be a whole number of at least 1"),
        ("out=build/x gpu=2", "gpu: there is no such key"),
    ],
)
def test_bad_arguments_exit_2(
    commands: Commands, arguments: str, message: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    assert f"sp_bench.first_hour: {message}" in capsys.readouterr().err
    assert commands.ran == []


def served(folder: Path, device: str, ranks: int, *, quick: bool) -> dict[str, list[str]]:
    """The methods of each sweep's points that the simulator serves on H100s, by step."""
    found: dict[str, list[str]] = {}
    for step in steps(folder, device=device, ranks=ranks, cluster="null", quick=quick)[2:]:
        _, keys = config_dir(step.arguments[1:])
        changed = {
            "cluster=here": "cluster=h100_ndr400",
            "mode=measure": "mode=simulate",
            "mode=alone": "mode=simulate",
        }
        keys = [changed.get(key, key) for key in keys if key != f"device={device}"]
        with Composer() as composer:
            configs = [composer.compose(point) for point in composer.points(keys, sweep=True)]
        found[step.name] = [resolve(config, None).method.name for config in configs]
    return found


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2, 8, 16])
def test_all_points_of_gpus_can_be_served(n: int, tmp_path: Path) -> None:
    methods = [name for name in REGISTRY if name != "reference"]
    found = served(tmp_path, "cuda", n, quick=False)
    if n == 1:
        assert found == {
            "exactness": ["ring"] * 2,
            "headline": ["ring"] * 3,
            "simulated": ["ring"] * 3,
            "alone": methods,
        }
    else:
        assert found == {"exactness": methods * 2, "headline": methods * 3, "simulated": methods * 3}


def test_hosts_of_a_launch_are_nodes_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(
        by="srun", rank=0, n=8, ranks_by_node=(4, 4), ranks_here=4, cores_here=8, address="localhost", name="x"
    )
    monkeypatch.setattr(first_hour, "launched", lambda: launch)
    found = steps(tmp_path, device="cuda", ranks=8, cluster="null", quick=False)
    assert all("cluster.gpus_per_node=4" in step.arguments for step in found[2:])


def test_shapes_are_larger_than_their_quick_forms() -> None:
    for device in ("cpu", "cuda"):
        whole, quick = SHAPES[device, False], SHAPES[device, True]
        assert max(whole.tokens) > max(quick.tokens) and whole.iters > quick.iters


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_and_started_again(tmp_path: Path) -> None:
    """On real ranks: SIGKILL in the first sweep; then the same folder is completed, and nothing finished is redone."""
    folder = tmp_path / "hour"
    command = [sys.executable, "-m", "sp_bench.first_hour", f"out={folder}", *SMALL]

    def written() -> list[Path]:
        """The records, without the files beside them, which are written first."""
        return [path for path in (folder / "exactness").glob("*.json") if "." not in path.stem]

    named: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True, **named) as process:
        deadline = time.monotonic() + 150
        while not written():
            assert time.monotonic() < deadline and process.poll() is None, "waited for a record"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    before = json.loads((folder / "manifest.json").read_text())["steps"]
    assert [name for name, step in before.items() if step["exit_code"] == 0] == NAMES[:2]
    kept = {path: path.stat().st_mtime_ns for path in written()}
    kept |= {
        path: path.stat().st_mtime_ns for path in (folder / "doctor.json", folder / "conf" / "cluster" / "here.yaml")
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, **named)
    assert done.returncode == 0, done.stderr
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {name: step["exit_code"] for name, step in manifest["steps"].items()} == dict.fromkeys(NAMES, 0)
    methods = len(REGISTRY) - 1
    sweeps = (("exactness", "measure", 2), ("headline", "measure", 1), ("simulated", "simulate", 1))
    for name, mode, settings in sweeps:
        found = records.read_all(folder / name)
        assert {(record.status, record.mode) for record in found} == {("ok", mode)} and len(found) == settings * methods
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])
    text = (folder / "report.md").read_text()
    assert "## Errors against fp64" in text and "## Measured" in text and text.count("| ok |") == 2 * methods
