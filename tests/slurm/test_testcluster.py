"""The SLURM in a box: that it is one, and that nothing of it is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sp_bench.errors import RequestError
from tests.slurm import testcluster
from tests.slurm.testcluster import Host, SlurmBox, main, refuse_without_root_and_packages

DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "munged")


def test_tasks_run_on_nodes_of_pretend_gpus(box: SlurmBox) -> None:
    command = 'echo "$SLURM_PROCID $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES"'
    out = box.run("srun", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:3", "sh", "-c", command)
    ranks, nodes, local, gpus = zip(*sorted(line.split() for line in out.splitlines()), strict=True)
    assert (ranks, local, set(gpus)) == (("0", "1", "2", "3"), ("0", "1", "0", "1"), {"0,1,2"})
    first, _, second, _ = nodes  # which they are depends on jobs that are just ending
    assert nodes == (first, first, second, second) and first != second


def test_up_twice_is_up_once(box: SlurmBox) -> None:
    pids = [box._pids(name) for name in ("slurmctld", "slurmd", "munged")]
    assert list(map(len, pids)) == [1, 4, 1]
    box.up()
    assert [box._pids(name) for name in ("slurmctld", "slurmd", "munged")] == pids
    assert set(box.nodes()) == {"n1", "n2", "n3", "n4"}


@pytest.mark.long
def test_another_box_beside_it(box: SlurmBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Down, it leaves no process and no file, even of a job that runs; and the first box goes on."""
    other = SlurmBox(tmp_path / "other", hosts=[Host(name="a"), Host(name="b")], gpus_per_node=2)
    other.up()
    assert other.nodes() == {"a": "idle", "b": "idle"}
    started = tmp_path / "started"
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\nsrun sh -c 'touch {started}.$SLURM_PROCID; trap \"\" TERM; sleep 1234 & wait; wait'\n"
    )
    other.run("sbatch", "--nodes=2", f"--output={tmp_path}/out", str(script))
    testcluster._wait_for(lambda: len(list(tmp_path.glob("started.*"))) == 2, "the job to start")
    below = testcluster._descendants(other._pids("slurmstepd"))
    assert below
    assert main(["status", "--folder", str(other.folder)]) == 0
    assert f"export SLURM_CONF={other.conf}" in capsys.readouterr().out
    assert main(["down", "--folder", str(other.folder)]) == 0
    assert not other.folder.exists()
    assert not any(other._pids(name) for name in DAEMONS)
    testcluster._wait_for(
        lambda: not any(testcluster._arguments_and_environment(pid) for pid in below), "its processes to be gone"
    )
    assert "no cluster in" in capsys.readouterr().out
    assert len(box.nodes()) == 4


@pytest.mark.long
def test_the_controller_comes_back(box: SlurmBox) -> None:
    before = box._pids("slurmctld")
    box.restart_controller()
    assert box._pids("slurmctld") not in ([], before)
    assert box.run("srun", "echo", "here") == "here\n"


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testcluster, "_path", lambda: "/nowhere")
    with pytest.raises(RequestError, match="munge and slurm-wlm; apt-get install -y munge slurm-wlm would"):
        refuse_without_root_and_packages()


def test_without_root(box: SlurmBox, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        assert main(["up", "--folder", str(tmp_path / "mine")]) == 2
    finally:
        os.seteuid(0)
    assert "needs root" in capsys.readouterr().err
