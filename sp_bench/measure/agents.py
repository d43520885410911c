"""Ranks under srun or torchrun: a pool like RankPool, over the hosts of a launch.

Each process of the launch is the agent of one rank, which is its child: a rank can die or hang, and a new pool can
still be opened. Rank 0's process also drives: it tells all agents to start their ranks, talks to each rank directly,
and asks the agents why a rank is silent. The other processes are nothing but agents (`run_agent`).
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
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sp_bench.machine import oom_kills
from sp_bench.measure.devices import CPUS, Devices, local_number, settle
from sp_bench.measure.launch import Launch, host_here, launched
from sp_bench.measure.meeting import Listener, connect, interface_of
from sp_bench.measure.pool import (
    GRACE_S,
    RankFailure,
    RankPool,
    answer,
    end_with_the_pool,
    exit_reason,
    forkserver,
)
from sp_bench.measure.where import NOWHERE, Where, answering, ask

JOIN_S = 120.0
"""How long processes of a launch wait for each other, and a pool for its ranks to start."""
ANSWER_S = 10.0
"""How long an agent may take to answer: it may be starting a rank, on a busy host."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a rank is started with."""

    rank: int
    n: int
    address: str
    """Of rank 0's host."""
    name: str
    """That rank 0's process listens by."""
    opened: int
    """Which of the launch's pools, in order, the rank is for."""
    own_address: str | None
    """Of the interface to use; None for the one that leads to rank 0."""
    timeout_s: float
    devices: Devices


class Agents:
    """The agents of all ranks of a launch, as rank 0's process reaches them; its own agent is a thread."""

    def __init__(self, launch: Launch) -> None:
        """Waits for all agents to connect. Raises OSError where no port is free to listen at."""
        self.launch, self.opened = launch, 0
        self.lost: RankFailure | None = None
        """The first process found gone; after that no pool can be opened."""
        self.listener = Listener(launch.name)
        ours, theirs = multiprocessing.Pipe()
        threading.Thread(target=_serve_driver, args=(theirs,), daemon=True).start()
        self.connections: dict[int, Connection] = {0: ours}
        self.own_address = LOOPBACK
        """Of the interface that ranks on other hosts reach rank 0 by."""
        self._beside: set[int] = {0}
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
            if host == host_here():
                self._beside.add(rank)
            if not address.startswith("127."):
                self.own_address = address

    def ask(self, ranks: list[int], what: str) -> dict[int, Any]:
        """What the agents of some ranks answer; None of one that is gone or silent, which is lost from then on."""
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
        """Have every agent start its rank for a new pool. Raises RankFailure where one is lost."""
        if self.lost:
            raise RankFailure(self.lost.rank, self.lost.why)
        self.opened += 1
        for rank, agent in self.connections.items():
            order = Order(
                rank=rank,
                n=self.launch.n,
                address=self.launch.address if rank else LOOPBACK,
                name=self.launch.name,
                opened=self.opened,
                own_address=self.own_address if rank in self._beside else None,
                timeout_s=timeout_s,
                devices=devices,
            )
            with contextlib.suppress(OSError):
                agent.send(("start", order))

    def dismiss(self, code: int) -> None:
        """Have all other processes end with exit code `code`, once this one has ended."""
        for agent in self.connections.values():
            with contextlib.suppress(OSError):
                agent.send(("leave", code))
        self.listener.close()


@cache
def agents_of_launch() -> Agents:
    """The agents of the launch that this process drives; they connect at the first call."""
    launch = launched()
    assert launch and launch.rank == 0
    return Agents(launch)


class LaunchedRanks(RankPool):
    """The ranks of this process's launch, one gloo group of all of them. Use it as a context manager, or close it."""

    def __init__(self, agents: Agents, timeout_s: float = 60.0, devices: Devices = CPUS) -> None:
        """`timeout_s` is how long all ranks may be silent before they count as hung. Raises RankFailure."""
        self.n, self.timeout_s, self._agents = agents.launch.n, timeout_s, agents
        self._processes, self._pipes = [], []
        self._agents.start_ranks(timeout_s, devices)
        ranks: dict[int, Connection] = {}
        try:
            self._meet(ranks)
        except (TimeoutError, EOFError, OSError):
            absent = min(set(range(self.n)) - set(ranks), default=0)
            raise RankFailure(absent, f"did not start: {self._reasons()[absent]}") from None
        self._pipes = [ranks[rank] for rank in range(self.n)]

    @property
    def alive(self) -> bool:
        """Whether the pool is open."""
        return bool(self._pipes)

    def close(self) -> None:
        """End all ranks."""
        if self._pipes:
            self._reasons()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []

    def _meet(self, ranks: dict[int, Connection]) -> None:
        """Fill in the pipe to each rank, and tell them all where rank 0 has the store by which they form a group."""
        deadline = time.monotonic() + JOIN_S
        while len(ranks) < self.n:
            pipe, _ = self._agents.listener.accept(deadline)
            opened, rank = pipe.recv()
            if opened == self._agents.opened:
                ranks[rank] = pipe
        port = ranks[0].recv()
        for rank in range(1, self.n):
            ranks[rank].send(port)

    def _reasons(self) -> dict[int, str]:
        """End all ranks, and say why each had ended before; "killed by SIGKILL" where it had not."""
        reasons = self._agents.ask(list(range(self.n)), "stop")
        return {rank: reason or "its process is gone" for rank, reason in reasons.items()}

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            reason = self._agents.ask([rank], "why")[rank]
            raise RankFailure(rank, f"died: {reason or 'with its process, or its host'}") from None

    def _where(self, pending: list[int]) -> dict[int, Where]:
        return {rank: found or NOWHERE for rank, found in self._agents.ask(pending, "where").items()}


def run_agent(launch: Launch) -> int:
    """What a process other than rank 0's does, without output; returns the exit code that rank 0 sends."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent_to_all, signal.SIG_IGN)  # rank 0 ends in order, and this process after it
    try:
        driver, _ = connect(launch.address, launch.name, time.monotonic() + JOIN_S)
    except TimeoutError:
        return 1
    driver.send((launch.rank, host_here()))
    return _serve_driver(driver)


def _serve_driver(driver: Connection) -> int:
    """Start, watch and end this agent's rank as the driver says, until that ends. Returns the exit code it has sent.

    An agent must not end first: srun may take that for a failure and end the others.
    """
    with tempfile.TemporaryDirectory(prefix="sp_bench-rank-") as folder, contextlib.ExitStack() as at_the_end:
        worker, code = _Worker(Path(folder, "rank")), 1
        at_the_end.callback(worker.stop)
        with contextlib.suppress(EOFError, OSError):
            while True:
                what, value = driver.recv()
                match what:
                    case "start":
                        worker.start(value)
                    case "where":
                        driver.send(worker.where())
                    case "why":
                        driver.send(worker.why())
                    case "stop":
                        driver.send(worker.stop())
                    case "leave":
                        code = value
    return code


class _Worker:
    """The child process of an agent that executes its rank: not started, running, or ended."""

    def __init__(self, path: Path) -> None:
        """Stacks are written to files beside `path`."""
        self._path = path
        self._process: Any = None
        self._lifeline: Connection | None = None
        self._oom_kills = 0

    def start(self, order: Order) -> None:
        """Start a new process, in place of a running one."""
        self.stop()
        self._oom_kills = oom_kills()
        context = forkserver()
        theirs, self._lifeline = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(order, theirs, str(self._path)), daemon=True)
        process.start()
        theirs.close()
        self._process = process

    def where(self) -> Where:
        """The stacks and threads of the process."""
        return ask([(self._process.pid, self._path)])[0] if self._process else NOWHERE

    def why(self) -> str:
        """Why the process has ended, or is about to."""
        if self._process:
            self._process.join(GRACE_S)
        return self.stop()

    def stop(self) -> str:
        """End the process; returns how it has ended."""
        if not self._process:
            return "it was not started"
        by_itself = not self._process.is_alive()
        self._process.kill()
        self._process.join()
        if self._lifeline:
            self._lifeline.close()
        return exit_reason(self._process.exitcode, self._oom_kills if by_itself else oom_kills())


def _serve(order: Order, lifeline: Connection, path: str) -> None:
    """A rank's process: join the group, then run what the pool sends until its pipe closes."""
    threading.Thread(target=end_with_the_pool, args=(lifeline,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with answering(Path(path)):
        driver, address = connect(order.address, order.name, time.monotonic() + JOIN_S)
        driver.send((order.opened, order.rank))
        if interface := interface_of(order.own_address or address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            _join_group(order, driver)
        except (EOFError, ConnectionError):  # the driver has ended before all have joined
            os._exit(1)
        answer(driver)
    os._exit(0)


def _join_group(order: Order, driver: Connection) -> None:
    """The default group, by a store that rank 0 has."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(1)
    # Longer than the pool's patience, which says who is to blame: gloo only says who noticed.
    patience = timedelta(seconds=60 + 4 * order.timeout_s)
    settle(order.devices, local_number(), patience)
    if order.rank == 0:
        store = TCPStore(order.address, 0, order.n, is_master=True, timeout=patience, wait_for_workers=False)
        driver.send(store.port)
    else:
        store = TCPStore(order.address, driver.recv(), order.n, timeout=patience, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.n, timeout=patience)
