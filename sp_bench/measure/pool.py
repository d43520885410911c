"""Ranks as processes of this machine, watched: a pool runs one function on all of them and survives none of them.

Ranks are forked from a server that has torch imported already. A rank that dies, raises or hangs ends them all, and
the error says which rank it was and why.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_bench.machine import oom_kills
from sp_bench.measure.devices import CPUS, Devices, settle
from sp_bench.measure.termination import deferred
from sp_bench.measure.where import Where, answering, ask
from sp_bench.run.home import Home, move_to

if TYPE_CHECKING:
    from sp_bench.measure.homes import Homes

GRACE_S = 2.0
"""How long the other ranks have to answer once one has failed."""


class RankFailure(RuntimeError):
    """A rank that died, raised or hung. `rank` is None where no single one can be blamed."""

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(f"rank {rank}: {why}" if rank is not None else why)
        self.rank, self.why = rank, why
        self.progress: Any = None
        """What the rank reported last, where one is to blame."""


class RankError(RankFailure):
    """A rank that raised; `cause` is what it raised, all ranks answered, and the pool can go on."""

    def __init__(self, rank: int, why: str, cause: Exception | None) -> None:
        super().__init__(rank, why)
        self.cause = cause


class RankHang(RankFailure):
    """Ranks that said nothing for longer than their pool waits; `where` they are, all that had not answered."""

    def __init__(self, rank: int | None, why: str, where: dict[int, Where]) -> None:
        super().__init__(rank, why)
        self.where = where


class RankPool:
    """n processes, one gloo group of all of them. Use it as a context manager, or close it."""

    hosts: Homes | None = None
    """Where the ranks live; None: they talk over this machine's loopback."""

    def __init__(self, n: int, timeout_s: float = 60.0, hosts: Homes | None = None, devices: Devices = CPUS) -> None:
        """`timeout_s` is how long all ranks may be silent before they count as hung.

        `hosts` are closed with the pool. `devices` are what ranks compute on.
        """
        self.n, self.timeout_s, self.hosts = n, timeout_s, hosts
        self._oom_kills = oom_kills()
        self._folder = tempfile.TemporaryDirectory(prefix="sp_bench-ranks-")
        context = forkserver()
        self._pipes: list[Connection] = []
        self._processes = []
        lifeline, self._lifeline = context.Pipe(duplex=False)
        try:
            with deferred():
                for rank in range(n):
                    ours, theirs = context.Pipe()
                    home = hosts.home_of(rank) if hosts else Home()
                    arguments = (rank, n, theirs, lifeline, self._folder.name, timeout_s, home, devices)
                    process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                    process.start()
                    theirs.close()
                    self._pipes.append(ours)
                    self._processes.append(process)
                lifeline.close()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [int(process.pid) for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether all ranks are there."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def run(self, function: Callable | str, *args: object, progress: Callable[[Any], None] | None = None) -> list[Any]:
        """function(*args) on every rank; returns what each rank returned.

        The function is one at module level, or "module:name", which spares this process its imports. Inside,
        `report(x)` of this module passes x to `progress` (rank 0's steps only) and shows that the rank is alive.
        Raises RankError if a rank raised and all answered, else RankFailure, after which the pool is closed.
        """
        if not self._pipes:
            raise RuntimeError("this pool of ranks is closed; a new one would work")
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(message)
        reported: dict[int, Any] = {}
        try:
            return self._collect(progress, reported)
        except BaseException as error:
            if isinstance(error, RankFailure) and error.rank is not None:
                error.progress = reported.get(error.rank)
            if not isinstance(error, RankError):
                self.close()
            raise

    def close(self) -> None:
        """End all ranks."""
        with deferred():
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.join()
            for pipe in self._pipes:
                pipe.close()
            self._lifeline.close()
            self._processes, self._pipes = [], []
            self._folder.cleanup()
            if self.hosts:
                self.hosts.close()

    def _collect(self, progress: Callable[[Any], None] | None, reported: dict[int, Any]) -> list[Any]:
        """Everybody's answer; `reported` is filled with what each rank reported last."""
        answers: dict[int, Any] = {}
        errors: dict[int, tuple[str, Exception | None]] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) + len(errors) < self.n:
            pending = [rank for rank in range(self.n) if rank not in answers and rank not in errors]
            ready = wait([self._pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                if errors:
                    break
                raise self._blame_hang(pending)
            for pipe in ready:
                rank = self._pipes.index(pipe)  # pyright: ignore[reportArgumentType]
                kind, value = self._receive(rank)
                if kind in ("step", "progress"):
                    deadline = time.monotonic() + self.timeout_s
                    reported[rank] = value
                    if rank == 0 and progress and kind == "step":
                        progress(value)
                elif kind == "answer":
                    answers[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            rank, (why, cause) = next(iter(errors.items()))
            if len(answers) + len(errors) == self.n:
                raise RankError(rank, why, cause)
            raise RankFailure(rank, why)
        return [answers[rank] for rank in range(self.n)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(GRACE_S)
            reason = exit_reason(self._processes[rank].exitcode, self._oom_kills)
            raise RankFailure(rank, f"died: {reason}") from None

    def _blame_hang(self, pending: list[int]) -> RankHang:
        """Ask every silent rank where it is: one that waits for a transfer is a victim, any other the cause."""
        where = self._where(pending)
        frozen = [rank for rank, found in where.items() if not found.stack]
        busy = [rank for rank, found in where.items() if found.stack and not found.waits_for_others]
        silent = f"no rank has answered for {self.timeout_s:g} s"
        if frozen:
            return RankHang(frozen[0], f"hangs: its process is stopped or does not react ({silent})", where)
        if busy:
            return RankHang(busy[0], f"hangs ({silent}) in {where[busy[0]].stack[0]}", where)
        return RankHang(None, f"{silent}; all of ranks {pending} wait for each other", where)

    def _where(self, pending: list[int]) -> dict[int, Where]:
        """Where each of some ranks is."""
        found = ask([(self.pids[rank], Path(self._folder.name, str(rank))) for rank in pending])
        return dict(zip(pending, found, strict=True))


_report: Callable[[str, Any], None] = lambda kind, value: None  # noqa: E731


def report(value: Any, *, step: bool = True) -> None:
    """From inside a function that a pool runs: say that this rank is alive, and pass `value` to the caller.

    What is no `step` is not shown to the caller's `progress`, and told only if the rank fails.
    """
    _report("step" if step else "progress", value)


def forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sp_bench.measure.job"])
    return context


def _serve(
    rank: int,
    n: int,
    pipe: Connection,
    lifeline: Connection,
    folder: str,
    timeout_s: float,
    home: Home,
    devices: Devices,
) -> None:
    """A rank's process: join the group, then run what the pool sends until its pipe closes."""
    import torch
    import torch.distributed as dist

    threading.Thread(target=end_with_the_pool, args=(lifeline,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with answering(Path(folder, str(rank))):
        move_to(home)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        # Longer than the pool's patience, which says who is to blame: gloo only says who noticed.
        patience = timedelta(seconds=60 + 4 * timeout_s)
        settle(devices, rank, patience)
        store = f"file://{folder}/store"
        try:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n, timeout=patience)
        except Exception:
            time.sleep(GRACE_S)  # a pool that ends meanwhile ends its ranks one by one, and this is what others see
            raise
        home.put_transfers_first()
        answer(pipe)
    os._exit(0)


def answer(pipe: Connection) -> None:
    """In a rank's process: run what its pool sends, until the pipe closes."""
    global _report
    _report = lambda kind, value: pipe.send((kind, value))  # noqa: E731
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            function, args = pickle.loads(message)
            pipe.send(("answer", _found(function)(*args)))
        except Exception as error:
            try:
                pipe.send(("error", (_summary(error), _portable(error))))
            except OSError:  # nobody is there any more
                return


def _found(function: Callable | str) -> Callable:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)
    return function


def end_with_the_pool(lifeline: Connection) -> None:
    """No orphan is left when the process that has the pool dies, however it does."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _summary(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {Path(frame.filename).name}:{frame.lineno})"


def _portable(error: Exception) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def exit_reason(code: int | None, oom_kills_before: int) -> str:
    """How a rank has ended, given what machine.oom_kills said before: on a shared machine a good guess."""
    if code is None or code >= 0:
        return f"exit code {code}"
    killed = f"killed by {signal.Signals(-code).name}"
    out_of_memory = code == -signal.SIGKILL and oom_kills() > oom_kills_before
    return f"{killed}: out of memory, by the kernel's count of such kills" if out_of_memory else killed
