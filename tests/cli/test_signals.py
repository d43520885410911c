"""Processes that are killed, told to end, stopped, or out of memory: rows, exit codes, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.analysis.studies.killed_processes import MARK, Trial, marked, run, undisturbed_s
from tests.support.marks import exhaustive
from tests.support.processes import LONG_S, wait_for

ROOT = Path(__file__).parents[2]
POINT = ["cluster=local", "dtype=float32", "heads=4", "head_dim=16", "warmup=1", "logger=none"]
SEQLENS = (64, 128, 256, 512, 1024, 2048)


@pytest.fixture(scope="module")
def lasts_s() -> float:
    """How long the ranks of a point live that nobody disturbs."""
    return undisturbed_s("mesh", 4)


@pytest.mark.parametrize(
    ("victim", "moment"), [exhaustive(*kill) for kill in ((0, 0.02), (3, 0.3), (1, 0.6), (None, 0.4))]
)
def test_kills_at_several_moments(victim: int | None, moment: float, lasts_s: float) -> None:
    """As `study=killed_processes` does it more often: a rank is named, nothing is left, the next run is ok."""
    trial = Trial(method="mesh", n=4, victim=victim, moment=moment)
    ended = run(trial, lasts_s)
    assert ended.fault(trial) is None, ended
    assert victim is None or ended.late or ended.said == f"failed: rank {victim}: died: killed by SIGKILL"


class Sweep:
    """Six measured points that a command of its own runs."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        keys = [*POINT, "method=ring", "gpus=2", "iters=10", f"seqlen={','.join(map(str, SEQLENS))}"]
        self.command = [sys.executable, "-m", "sp_bench", "-m", *keys, f"results_dir={folder}"]
        self.environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}

    def start(self) -> subprocess.Popen[str]:
        """In a process group of its own."""
        return subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kept(self) -> dict[int, int]:
        """When each record was written, by its seqlen; all of them are ok."""
        found = records.read_all(self.folder)
        assert {record.status for record in found} <= {"ok"}
        return {r.seqlen: (self.folder / f"{r.run_id}.json").stat().st_mtime_ns for r in found}


@pytest.mark.parametrize("told", [os.kill, exhaustive(os.killpg)])
@pytest.mark.long
def test_a_sweep_that_is_told_to_end(told: Callable[[int, int], None], tmp_path: Path) -> None:
    """By SIGTERM, to itself or to all its processes: finished points are kept, and the next run does the others."""
    sweep = Sweep(tmp_path, mark := f"term-{tmp_path.name}-{os.getpid()}")
    process = sweep.start()
    try:
        wait_for(sweep.kept, "the first point")
        told(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=LONG_S)
        assert process.returncode == 128 + signal.SIGTERM
        assert err.endswith("\nsp_bench: ended by SIGTERM; finished points are kept\n"), err
        wait_for(lambda: not marked(mark), "all its processes to end")
        kept = sweep.kept()
        assert 1 <= len(kept) < len(SEQLENS)
        again = sweep.start()
        out, err = again.communicate(timeout=LONG_S)
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    assert again.returncode == 0, err
    assert f"reused: {len(kept)} of {len(SEQLENS)} points" in out
    after = sweep.kept()
    assert sorted(after) == sorted(SEQLENS)
    assert {seqlen: after[seqlen] for seqlen in kept} == kept


@pytest.mark.long
def test_a_rank_without_memory(tmp_path: Path) -> None:
    """The row says oom and which rank; the point that is timed in turn with it is ok."""
    keys = [*POINT, "gpus=3", "seqlen=96", "iters=2", "impl=tests.cli.jobs:needs_much", f"results_dir={tmp_path}"]
    command = [sys.executable, "-m", "sp_bench", "-m", "method=ring,peer", *keys]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 1, done.stderr
    by_status = {record.status: record for record in records.read_all(tmp_path)}
    assert set(by_status) == {"ok", "oom"}, done.stdout
    assert by_status["ok"].method == "ring"
    assert re.match(r"rank 1: RuntimeError: .*allocate memory", by_status["oom"].error or ""), by_status["oom"].error
