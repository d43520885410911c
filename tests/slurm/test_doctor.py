"""The doctor as a SLURM step: it examines every node of the allocation."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sp_bench.resources import ROOT
from sp_bench.slurm.testcluster import SlurmBox

SRUN = ["srun", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:3", "--kill-on-bad-exit=1", f"--chdir={ROOT}"]
SRUN += [sys.executable, "-m", "sp_bench.doctor", "--json", "dtype=float32", "head_dim=16"]


@pytest.mark.exhaustive
def test_a_step_of_two_nodes(box: SlurmBox) -> None:
    """Their GPUs are pretend ones, and it says so."""
    done = subprocess.run(SRUN, env=box.environment(), capture_output=True, text=True, timeout=150)
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
