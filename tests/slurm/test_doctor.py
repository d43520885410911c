"""The doctor and the first hour as SLURM steps: they use every node of the allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.methods import REGISTRY
from sp_bench.resources import ROOT
from tests.slurm.testcluster import SlurmBox
from tests.support.typed import Known

SRUN = ["srun", "--nodelist=n[1-2]", "--ntasks-per-node=1", "--gres=gpu:3", "--kill-on-bad-exit=1", f"--chdir={ROOT}"]
SRUN += [sys.executable, "-m"]
DOCTOR = ["sp_bench.doctor", "--json", "dtype=float32", "head_dim=16"]


@pytest.mark.long
def test_a_step_of_two_nodes(box: SlurmBox) -> None:
    """Their GPUs are pretend ones, and it says so."""
    done = subprocess.run([*SRUN, *DOCTOR], env=box.environment(), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["check"]: row for row in found["findings"]}
    assert rows["ranks"]["found"] == "2 ranks on 2 hosts, started by srun"
    assert rows["SLURM"]["found"].endswith("on n[1-2], 2 nodes")
    assert [host["host"] for host in found["hosts"]] == ["n1", "n2"]
    assert rows["GPUs"]["status"] == "warn"
    assert rows["GPUs"]["found"].startswith("CUDA_VISIBLE_DEVICES=0,1,2, and no such device is in /dev")
    assert rows["between hosts"]["found"].startswith("1 pair, ")
    assert rows["measured"]["found"].startswith("gpus=2 on CPU ranks: python -m sp_bench gpus=2")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_first_hour_of_two_nodes(box: SlurmBox, tmp_path: Path) -> None:
    """Each step runs on the step's ranks, one a node."""
    folder = tmp_path / "hour"
    command = [*SRUN, "sp_bench.first_hour", f"out={folder}", "quick=true"]
    done = subprocess.run(command, env=box.environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    steps = json.loads((folder / "manifest.json").read_text())["steps"]
    assert {name: step["exit_code"] for name, step in steps.items()} == dict.fromkeys(
        ("doctor", "calibrate", "exactness", "headline", "simulated"), 0
    )
    examined = json.loads((folder / "doctor.json").read_text())
    assert [rank["host"] for rank in examined["ranks"]] == ["n1", "n2"]
    for name, mode, settings in (("exactness", "measure", 2), ("headline", "measure", 1), ("simulated", "simulate", 1)):
        found = records.read_all(folder / name)
        assert len(found) == settings * (len(REGISTRY) - 1)
        assert {(record.status, record.mode, record.gpus) for record in found} == {("ok", mode, 2)}
        if mode == "measure":
            assert all([*Known(record).provenance["ranks_by_host"]] == ["n1", "n2"] for record in found)
    assert "## Measured" in (folder / "report.md").read_text()
