"""Ranks of a launch: found, run, blamed and ended as a pool's own are; and what a launch's environment says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.launch import Launch, RankCountError, first_host, launched, tasks_per_node
from sp_bench.measure import agents as agents_module
from sp_bench.measure import rendezvous
from sp_bench.measure.agents import Agents, LaunchedRanks
from sp_bench.measure.pool import RankError, RankFailure, RankPool
from sp_bench.measure.ranks import ranks_by_host
from tests.measure import jobs
from tests.support.marks import exhaustive
from tests.support.processes import LONG_S, SHORT_S, survivors

N = 3
ROOT = Path(__file__).parents[2]
LAUNCH = """
import os
import sys
from dataclasses import replace
from sp_bench.measure.agents import Agents, LaunchedRanks, run_agent
from sp_bench.launch import Launch
rank, n, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
launch = replace(Launch.planned(n), rank=rank, address="localhost", name=name)
"""
AGENT = LAUNCH + "sys.exit(run_agent(launch))"
DRIVER = (
    LAUNCH
    + """
from tests.measure import jobs
pool = LaunchedRanks(Agents(launch))
print(*pool.run(os.getpid), flush=True)
pool.run(jobs.go_wrong, "spin", "barrier")
"""
)
SRUN = {
    "SLURM_CLUSTER_NAME": "box",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "localhost,n[1-2]",
    "SLURM_CPUS_ON_NODE": "1",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a",
}


class Started:
    """A launch of N processes: this one drives, the others are agents."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        command = [sys.executable, "-c", AGENT]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(N), name], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for rank in range(1, N)
        ]
        launch = replace(Launch.planned(N), address="localhost", name=name)
        self.agents = Agents(launch)

    def end(self, code: int = 0) -> None:
        """All agents end with `code`, without output."""
        self.agents.dismiss(code)
        for connection in self.agents.connections.values():
            connection.close()  # as the end of this process would
        assert [process.wait(LONG_S) for process in self.processes] == [code] * (N - 1)
        assert [process.stdout.read() for process in self.processes if process.stdout] == [b""] * (N - 1)


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """One launch, in which pools are opened one after the other."""
    launch = Started()
    yield launch
    launch.end()


@pytest.fixture
def pool(started: Started) -> Iterator[RankPool]:
    with LaunchedRanks(started.agents) as ranks:
        yield ranks


@pytest.mark.long
def test_a_pool_that_goes_on(pool: RankPool) -> None:
    """Answers in rank order, one group, rank 0's progress only; and ranks that raise are named and go on."""
    assert pool.run(jobs.rank_and_world, "a") == [(rank, N, "a") for rank in range(N)]
    assert pool.run("tests.measure.jobs:total") == [3.0] * N
    seen: list[object] = []
    assert pool.run(jobs.report_often, 3, 0.0, progress=seen.append) == [3] * N
    assert seen == [(0, i) for i in range(3)]
    assert len(set(pool.run(os.getpid)) - {os.getpid()}) == N
    with pytest.raises(RankError, match="rank 1: ValueError: seven is not even") as caught:
        pool.run(jobs.fail, "value", 1)
    assert isinstance(caught.value.cause, ValueError)
    with pytest.raises(RankError) as caught:
        pool.run(jobs.report_then_fail, 2)
    assert (caught.value.rank, caught.value.progress) == (2, "before the fall of 2")
    assert pool.run(jobs.total) == [3.0] * N
    assert ranks_by_host(pool) == {os.environ.get("SLURMD_NODENAME", os.uname().nodename): [0, 1, 2]}


@pytest.mark.parametrize(
    ("how", "others", "why"),
    [
        exhaustive("exit", "barrier", "died: exit code 3"),
        ("kill", "attention", "died: killed by SIGKILL"),
        exhaustive("stop", "barrier", "hangs: its process is stopped"),
        exhaustive("sleep", "all_reduce", "hangs (no rank has answered"),
        exhaustive("spin", "attention", "hangs (no rank has answered"),
    ],
)
def test_a_rank_that_dies_or_hangs(started: Started, how: str, others: str, why: str) -> None:
    """It is to blame, its pool's processes end, and a new pool of the same launch works."""
    with LaunchedRanks(started.agents, timeout_s=SHORT_S) as pool:
        pids = pool.run(os.getpid)
        with pytest.raises(RankFailure) as caught:
            pool.run(jobs.go_wrong, how, others)
        assert caught.value.rank == jobs.BAD and caught.value.why.startswith(why), str(caught.value)
        assert not pool.alive
    assert survivors(pids) == []
    with LaunchedRanks(started.agents) as pool:
        assert pool.run(jobs.total) == [3.0] * N


@pytest.mark.long
def test_a_process_of_the_launch_that_dies() -> None:
    """With its rank; the others end, and no pool can be opened any more, which says so."""
    started = Started()
    with LaunchedRanks(started.agents) as pool:
        pids = pool.run(os.getpid)
        started.processes[0].kill()
        assert survivors(pids[1:2]) == []
        with pytest.raises(RankFailure, match="rank 1: died: with its process, or its host"):
            pool.run(jobs.total)
    assert survivors(pids) == []
    with pytest.raises(RankFailure, match="rank 1: its process is gone"):
        LaunchedRanks(started.agents)
    started.agents.dismiss(5)
    started.agents.connections[2].close()
    assert started.processes[1].wait(LONG_S) == 5


def test_a_process_of_the_launch_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_module, "JOIN_S", 0.5)
    launch = replace(Launch.planned(2), address="localhost", name=uuid.uuid4().hex)
    agents = Agents(launch)
    with pytest.raises(RankFailure, match=r"rank 1: its process has not joined for 0\.5 s"):
        LaunchedRanks(agents)
    agents.dismiss(0)


@pytest.mark.long
def test_agents_end_when_rank_0_does() -> None:
    """Killed, rank 0 can't tell them."""
    name, environment = uuid.uuid4().hex, os.environ | {"PYTHONPATH": str(ROOT)}
    sources = [DRIVER] + [AGENT] * (N - 1)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(rank), str(N), name], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank, source in enumerate(sources)
    ]
    try:
        assert processes[0].stdout
        pids = [int(pid) for pid in processes[0].stdout.readline().split()]
        assert len(pids) == N
        time.sleep(0.5)
        processes[0].kill()
        assert [process.wait(LONG_S) for process in processes[1:]] == [1] * (N - 1)
        assert survivors(pids) == []
    finally:
        for process in processes:
            process.kill()


def test_strangers_at_the_ports() -> None:
    """Another program, which never says a word, has the first port: the next one is taken, and found."""
    name, deadline = uuid.uuid4().hex, time.monotonic() + LONG_S
    call = (
        "import sys; from sp_bench.measure.rendezvous import connect; connect('localhost', sys.argv[1], 1e9)[0].send(7)"
    )
    with socket.create_server(("", rendezvous._ports(name)[0])), rendezvous.Listener(name) as listener:
        caller = subprocess.Popen([sys.executable, "-c", call, name], env=os.environ | {"PYTHONPATH": str(ROOT)})
        connection, address = listener.accept(deadline)
        assert (connection.recv(), address) == (7, "127.0.0.1")
        assert caller.wait(LONG_S) == 0


def test_callers_without_the_token_are_turned_away() -> None:
    name = uuid.uuid4().hex
    with rendezvous.Listener(name) as listener:
        with socket.create_connection(("localhost", rendezvous._ports(name)[0])) as stranger:
            stranger.sendall(b"x" * 32)
            with pytest.raises(TimeoutError):
                listener.accept(time.monotonic() + 0.5)
            assert stranger.recv(1) == b""
        with pytest.raises(TimeoutError, match="nobody listens at localhost"):
            rendezvous.connect("localhost", uuid.uuid4().hex, time.monotonic())


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[003-010,12],login", "gpu003"),
        ("r[1-2]n[03,05-9]-ib,x", "r1n03-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_host(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


def test_tasks_per_node() -> None:
    assert tasks_per_node("4") == (4,)
    assert tasks_per_node("2(x3),1") == (2, 2, 2, 1)


def test_what_srun_says() -> None:
    launch = launched(SRUN)
    assert launch
    assert (launch.by, launch.rank, launch.n, launch.ranks_here, launch.cores_here) == ("srun", 3, 5, 2, 1)
    assert (launch.address, launch.name, launch.ranks_by_node) == ("localhost", "box/17/0/", (2, 2, 1))
    others = [launched(SRUN | {key: "9"}) for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    assert len({launch.name, *(other.name for other in others if other)}) == 4, "none meets another"


def test_what_torchrun_says() -> None:
    """Also within a step of srun, which has started one torchrun on each node."""
    for environment in (TORCHRUN, SRUN | TORCHRUN):
        launch = launched(environment)
        assert launch
        assert (launch.by, launch.rank, launch.n, launch.ranks_here, launch.address) == ("torchrun", 2, 4, 2, "n1")


def test_one_process_is_no_launch() -> None:
    assert launched({}) is None
    assert launched(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert launched(TORCHRUN | {"WORLD_SIZE": "1"}) is None
    assert launched({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}) is None, "the batch script itself"


def test_a_launch_has_its_number_of_ranks() -> None:
    with pytest.raises(RankCountError, match="gpus=8: srun has started 4 ranks; gpus=4, or mode=simulate, would work"):
        Launch.planned(4).refuse(8)
    Launch.planned(4).refuse(4)


def by_torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line on 3 ranks. `folder` gets the records."""
    keys = ["cluster=local", "dtype=float32", "heads=6", "head_dim=16", "iters=3", "warmup=1", "logger=none"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={N}", "--master-port=0"]
    return subprocess.run(
        [*torchrun, "-m", "sp_bench", *keys, f"results_dir={folder}", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.long
def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    """A sweep runs all its points of that number of ranks, once, and says what it leaves out."""
    done = by_torchrun(tmp_path, "-m", "method=ring,ulysses", "gpus=2,3", "seqlen=96")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Measured on 3 ranks: torchrun has started them") == 1
    assert "Left out 2 of 4 points: gpus=2: torchrun has started 3 ranks" in done.stdout
    found = records.read_all(tmp_path)
    assert sorted((r.method, r.status, r.mode) for r in found) == [
        ("ring", "ok", "measure"),
        ("ulysses", "ok", "measure"),
    ]
    assert all(r.provenance and r.provenance["ranks_by_host"] == {os.uname().nodename: [0, 1, 2]} for r in found)
    assert all(set(json.loads(path.read_text())["rank"]) == set(range(N)) for path in tmp_path.glob("*.samples.json"))


@pytest.mark.long
def test_a_launch_of_other_ranks_is_refused_once(tmp_path: Path) -> None:
    done = by_torchrun(tmp_path, "gpus=4", "seqlen=96")
    assert done.returncode != 0
    assert (
        done.stderr.count("sp_bench: gpus=4: torchrun has started 3 ranks; gpus=3, or mode=simulate, would work") == 1
    )
    assert done.stderr.count("exitcode: 2") >= 1
    assert not list(tmp_path.iterdir())
