"""Ranks under srun or torchrun: a pool like RankPool, over all hosts of a launch.

Each process of the launch is the agent of one rank, and the rank is its child. So a rank can die or hang, and a new
pool can still be opened. Rank 0's process also drives: it tells all agents to start their ranks, talks to each rank
directly, and asks the agents why a rank is silent. The other processes only run `run_agent`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sp_bench.launch import Launch, host_name, launched
from sp_bench.machine import CPUS, Devices, exit_reason, oom_kills
from sp_bench.measure.devices import group_backend, local_rank
from sp_bench.measure.pool import (
    GRACE_S,
    RankFailure,
    RankPool,
    forkserver,
    prepare_to_join,
    rank_process,
    run_requests,
)
from sp_bench.measure.rendezvous import Listener, connect, interface_of
from sp_bench.measure.thread_dump import NO_DUMP, ThreadDump, dump

JOIN_S = 120.0
"""Seconds that processes of a launch wait for each other, and a pool for its ranks to start."""
ANSWER_S = 10.0
"""Seconds an agent has to answer. It may be starting a rank, on a busy host."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """The message from rank 0's process to an agent about a new pool."""

    pool: int
    """The number of the pool among those of the launch."""
    own_address: str | None
    """The address of the network interface to use; None: the one that leads to rank 0."""
    timeout_s: float
    devices: Devices


class Agents:
    """The agents of all ranks of a launch, as rank 0's process reaches them. Its own agent is a thread."""

    def __init__(self, launch: Launch) -> None:
        """Wait for all agents to connect. Raises OSError if no port is free to listen at."""
        self.launch, self.pools_opened = launch, 0
        self.lost: RankFailure | None = None
        """The first process found gone. After that no pool can be opened."""
        self.listener = Listener(launch.name)
        ours, theirs = multiprocessing.Pipe()
        threading.Thread(target=_serve_driver, args=(launch, theirs), daemon=True).start()
        self.connections: dict[int, Connection] = {0: ours}
        self.own_address = LOOPBACK
        """The address of the interface by which ranks on other hosts reach rank 0."""
        self._ranks_here: set[int] = {0}
        """The ranks on rank 0's host, which all use that interface."""
        deadline = time.monotonic() + JOIN_S
        while len(self.connections) < launch.n:
            try:
                agent, address = self.listener.accept(deadline)
                rank, host = agent.recv()
            except TimeoutError:
                absent = min(set(range(launch.n)) - set(self.connections))
                self.lost = RankFailure(absent, f"its process has not joined for {JOIN_S:g} s")
                break
            except (EOFError, OSError):
                continue
            self.connections[rank] = agent
            if host == host_name():
                self._ranks_here.add(rank)
            if not address.startswith("127."):
                self.own_address = address

    def ask(self, ranks: list[int], what: str) -> dict[int, Any]:
        """The answers of some ranks' agents. None stands for an agent that is gone or silent; it counts as lost."""
        answers: dict[int, Any] = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.connections[rank].send((what, None))
        deadline = time.monotonic() + ANSWER_S
        for rank in ranks:
            answers[rank] = None
            with contextlib.suppress(EOFError, OSError):
                if self.connections[rank].poll(max(0.0, deadline - time.monotonic())):
                    answers[rank] = self.connections[rank].recv()
                    continue
            self.lost = self.lost or RankFailure(rank, "its process is gone, or does not react")
        return answers

    def start_ranks(self, timeout_s: float, devices: Devices) -> None:
        """Have every agent start its rank for a new pool. Raises RankFailure if an agent is lost."""
        if self.lost:
            raise RankFailure(self.lost.rank, self.lost.why)
        self.pools_opened += 1
        for rank, agent in self.connections.items():
            own_address = self.own_address if rank in self._ranks_here else None
            request = StartRequest(
                pool=self.pools_opened, own_address=own_address, timeout_s=timeout_s, devices=devices
            )
            with contextlib.suppress(OSError):
                agent.send(("start", request))

    def dismiss(self, code: int) -> None:
        """Have all other processes exit with `code`, as soon as this one has ended."""
        for agent in self.connections.values():
            with contextlib.suppress(OSError):
                agent.send(("leave", code))
        self.listener.close()


@cache
def agents_of_launch() -> Agents:
    """The agents of the launch that this process drives. They connect at the first call."""
    launch = launched()
    assert launch and launch.rank == 0
    return Agents(launch)


class LaunchedRanks(RankPool):
    """The ranks of this process's launch, in one gloo group. Use it as a context manager, or close it."""

    def __init__(self, agents: Agents, timeout_s: float = 60.0, devices: Devices = CPUS) -> None:
        """Start the ranks. They count as hung once all have been silent for `timeout_s`. Raises RankFailure."""
        self.n, self.timeout_s, self._agents = agents.launch.n, timeout_s, agents
        self._processes, self._pipes = [], []
        self._agents.start_ranks(timeout_s, devices)
        ranks: dict[int, Connection] = {}
        try:
            self._connect(ranks)
        except (TimeoutError, EOFError, OSError):
            absent = min(set(range(self.n)) - set(ranks), default=0)
            raise RankFailure(absent, f"did not start: {self._stop()[absent]}") from None
        self._pipes = [ranks[rank] for rank in range(self.n)]

    @property
    def alive(self) -> bool:
        """Whether the pool is open."""
        return bool(self._pipes)

    def close(self) -> None:
        """End all ranks."""
        if self._pipes:
            self._stop()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []

    def _connect(self, ranks: dict[int, Connection]) -> None:
        """Set `ranks` to the pipe to each rank. Tell them the port of rank 0's store, by which they form a group."""
        deadline = time.monotonic() + JOIN_S
        while len(ranks) < self.n:
            pipe, _ = self._agents.listener.accept(deadline)
            pool, rank = pipe.recv()
            if pool == self._agents.pools_opened:
                ranks[rank] = pipe
        port = ranks[0].recv()
        for rank in range(1, self.n):
            ranks[rank].send(port)

    def _stop(self) -> dict[int, str]:
        """End all ranks; return how each had ended before, or "killed by SIGKILL" if it had not."""
        reasons = self._agents.ask(list(range(self.n)), "stop")
        return {rank: reason or "its process is gone" for rank, reason in reasons.items()}

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            reason = self._agents.ask([rank], "why")[rank]
            raise RankFailure(rank, f"died: {reason or 'with its process, or its host'}") from None

    def _dumps(self, ranks: list[int]) -> dict[int, ThreadDump]:
        return {rank: dump or NO_DUMP for rank, dump in self._agents.ask(ranks, "dump").items()}


def run_agent(launch: Launch) -> int:
    """Run a process of the launch other than rank 0's, without output; return the exit code that rank 0 sends."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent_to_all, signal.SIG_IGN)  # rank 0 ends in order, and this process after it
    try:
        driver, _ = connect(launch.address, launch.name, time.monotonic() + JOIN_S)
    except TimeoutError:
        return 1
    driver.send((launch.rank, host_name()))
    return _serve_driver(launch, driver)


def _serve_driver(launch: Launch, driver: Connection) -> int:
    """Start, watch and end this agent's rank as the driver says, until the driver ends. Return the exit code it sent.

    An agent must not end first: srun may take that for a failure and end the others.
    """
    with tempfile.TemporaryDirectory(prefix="sp_bench-rank-") as folder, contextlib.ExitStack() as at_the_end:
        worker, code = _Worker(launch, Path(folder, "rank")), 1
        at_the_end.callback(worker.stop)
        answers = {"dump": worker.dump, "why": worker.why, "stop": worker.stop}
        with contextlib.suppress(EOFError, OSError):
            while True:
                what, value = driver.recv()
                if what == "start":
                    worker.start(value)
                elif what == "leave":
                    code = value
                else:
                    driver.send(answers[what]())
    return code


class _Worker:
    """The child process of an agent that executes its rank: not started, running, or ended."""

    def __init__(self, launch: Launch, dump_path: Path) -> None:
        """Thread dumps are written to files beside `dump_path`."""
        self._launch, self._dump_path = launch, dump_path
        self._process: Any = None
        self._lifeline: Connection | None = None
        self._oom_kills = 0

    def start(self, request: StartRequest) -> None:
        """Start a new process, after ending a running one."""
        self.stop()
        self._oom_kills = oom_kills()
        context = forkserver()
        theirs, self._lifeline = context.Pipe(duplex=False)
        arguments = (self._launch, request, theirs, self._dump_path)
        process = context.Process(target=_run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._process = process

    def dump(self) -> ThreadDump:
        """The threads of the process."""
        return dump([(self._process.pid, self._dump_path)])[0] if self._process else NO_DUMP

    def why(self) -> str:
        """How the process ended, or is about to end."""
        if self._process:
            self._process.join(GRACE_S)
        return self.stop()

    def stop(self) -> str:
        """End the process; return how it ended."""
        if not self._process:
            return "it was not started"
        by_itself = not self._process.is_alive()
        self._process.kill()
        self._process.join()
        if self._lifeline:
            self._lifeline.close()
        return exit_reason(self._process.exitcode, self._oom_kills if by_itself else oom_kills())


def _run_rank(launch: Launch, request: StartRequest, lifeline: Connection, dump_path: Path) -> None:
    """The process of a rank: join the group, then run what the pool sends until its pipe closes."""
    address = launch.address if launch.rank else LOOPBACK
    with rank_process(lifeline, dump_path):
        driver, own_address = connect(address, launch.name, time.monotonic() + JOIN_S)
        driver.send((request.pool, launch.rank))
        if interface := interface_of(request.own_address or own_address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            _join_group(launch.rank, launch.n, address, request, driver)
        except (EOFError, ConnectionError):  # the driver has ended before all have joined
            os._exit(1)
        run_requests(driver)


def _join_group(rank: int, n: int, address: str, request: StartRequest, driver: Connection) -> None:
    """Join the default group by a store that rank 0's process has at `address`."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    timeout = prepare_to_join(request.devices, local_rank(), request.timeout_s)
    port = driver.recv() if rank else 0
    store = TCPStore(address, port, n, is_master=not rank, timeout=timeout, wait_for_workers=False)
    if rank == 0:
        driver.send(store.port)
    dist.init_process_group(group_backend(request.devices), store=store, rank=rank, world_size=n, timeout=timeout)
