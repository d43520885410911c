"""A pool of ranks: processes of this machine that all run one function, watched by the process that owns the pool.

Ranks are forked from a server that has imported torch already. If a rank dies, raises or hangs, all are ended, and the
error names the rank and the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_bench.machine import CPUS, Devices, exit_reason, oom_kills
from sp_bench.measure.devices import group_backend, set_up_device
from sp_bench.measure.thread_dump import ThreadDump, dump, dumping
from sp_bench.run.home import Home, move_to
from sp_bench.run.patience import FIRST_USE
from sp_bench.termination import deferred

if TYPE_CHECKING:
    from sp_bench.measure.homes import Homes

GRACE_S = 2.0
"""Seconds the other ranks have to answer after one has failed."""
CONNECT_S = FIRST_USE.total_seconds()
"""How much longer ranks may be silent while they connect."""
REAPED_S = 30.0
"""Seconds until the exit code of a dead rank is known at the latest, on a loaded machine."""


BUSY = 0.05
"""Cores that a silent rank uses at least if it computes: then it may be slow, and not hung."""
PRELOADED = ["sp_bench.measure.job"]
"""Modules that are imported once, in the server that ranks are forked from."""


class RankFailure(RuntimeError):
    """A rank died, raised or hung. `rank` is None if no single rank is to blame."""

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(f"rank {rank}: {why}" if rank is not None else why)
        self.rank, self.why = rank, why
        self.progress: Any = None
        """The last report of `rank`."""


class RankError(RankFailure):
    """A rank raised `cause`. All ranks answered, so the pool can go on."""

    def __init__(self, rank: int, why: str, cause: Exception | None) -> None:
        super().__init__(rank, why)
        self.cause = cause


class RankHang(RankFailure):
    """Ranks were silent for longer than their pool waits. `dumps` has the threads of all that had not answered."""

    def __init__(self, rank: int | None, why: str, dumps: dict[int, ThreadDump]) -> None:
        super().__init__(rank, why)
        self.dumps = dumps


class RankPool:
    """n processes in one gloo group. Use it as a context manager, or close it."""

    hosts: Homes | None = None
    """The emulated hosts of the ranks; None: they talk over this machine's loopback."""

    def __init__(self, n: int, timeout_s: float = 60.0, hosts: Homes | None = None, devices: Devices = CPUS) -> None:
        """Start the ranks. They count as hung once all have been silent for `timeout_s`.

        `hosts` are closed with the pool.
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
                    process = context.Process(target=_run_rank, args=arguments, name=f"rank {rank}", daemon=True)
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
        """The process id of each rank."""
        return [int(process.pid) for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether all ranks run."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def run(self, function: Callable | str, *args: object, progress: Callable[[Any], None] | None = None) -> list[Any]:
        """Call function(*args) on every rank; return the results by rank.

        The function must be at module level, or named as "module:name", which saves importing it here. Inside it,
        `report(x)` of this module passes x to `progress` (rank 0's steps only) and shows that the rank is alive.
        Raises RankError if a rank raised and all answered, otherwise RankFailure, which closes the pool.
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
        """Every rank's answer. Sets `reported` to what each rank reported last."""
        answers: dict[int, Any] = {}
        errors: dict[int, tuple[str, Exception | None]] = {}
        connecting: set[int] = set()
        began_s, last = time.monotonic(), "it had made no progress before"
        deadline, steps = began_s + self.timeout_s, Counter[int]()
        while len(answers) + len(errors) < self.n:
            pending = [rank for rank in range(self.n) if rank not in answers and rank not in errors]
            ready = wait([self._pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                if errors:
                    break
                raise self._blame_hang(pending, last)
            for pipe in ready:
                rank = self._pipes.index(pipe)  # pyright: ignore[reportArgumentType]
                kind, value = self._receive(rank)
                if kind in ("step", "progress", "connecting"):
                    connecting = connecting | {rank} if kind == "connecting" else connecting - {rank}
                    deadline = time.monotonic() + self.timeout_s + (CONNECT_S if connecting else 0)
                    reported[rank] = value
                    steps[rank] += kind == "step"
                    if most := max(steps.values()):
                        last = f"the last progress was step {most}, begun after {time.monotonic() - began_s:.0f} s"
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
            self._processes[rank].join(REAPED_S)
            reason = exit_reason(self._processes[rank].exitcode, self._oom_kills)
            raise RankFailure(rank, f"died: {reason}") from None

    def _blame_hang(self, pending: list[int], last: str) -> RankHang:
        """Dump every silent rank. One that waits for a transfer is a victim, any other the cause."""
        dumps = self._dumps(pending)
        frozen = [rank for rank, dump in dumps.items() if not dump.stack]
        busy = [rank for rank, dump in dumps.items() if dump.stack and not dump.waits_for_others]
        silent = f"no rank has answered for {self.timeout_s:g} s; {last}"
        if frozen:
            return RankHang(frozen[0], f"hangs: its process is stopped or does not react ({silent})", dumps)
        if busy:
            dump, why = dumps[busy[0]], f"hangs ({silent}) in {dumps[busy[0]].stack[0]}"
            if (dump.core_share or 0) > BUSY:
                why += f". It computes, on {dump.core_share:.2f} cores, so it may be slow and not hung: "
                why += f"a shorter seqlen, or timeout_s={10 * self.timeout_s:g}, tells"
            return RankHang(busy[0], why, dumps)
        return RankHang(None, f"{silent}; all of ranks {pending} wait for each other", dumps)

    def _dumps(self, ranks: list[int]) -> dict[int, ThreadDump]:
        dumps = dump([(self.pids[rank], Path(self._folder.name, str(rank))) for rank in ranks])
        return dict(zip(ranks, dumps, strict=True))


_report: Callable[[str, Any], None] = lambda kind, value: None  # noqa: E731


def report(value: Any, *, step: bool = True, connecting: bool = False) -> None:
    """From inside a function that a pool runs: show that this rank is alive, and send `value` to the pool.

    Steps are passed to the pool's `progress`; other values are kept in case the rank fails. A rank that is `connecting`
    to others may be silent for longer, until its next report.
    """
    _report("connecting" if connecting else "step" if step else "progress", value)


def forkserver() -> Any:
    """The context of multiprocessing that forks ranks from a process with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def end_forkserver() -> None:
    """End the process that ranks are forked from, unless some still run, and the memory that torch takes in it. The
    next pool starts another one.
    """
    if not multiprocessing.active_children():
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nothing public ends it


def _run_rank(
    rank: int,
    n: int,
    pipe: Connection,
    lifeline: Connection,
    folder: str,
    timeout_s: float,
    home: Home,
    devices: Devices,
) -> None:
    """The process of a rank: join the group, then run what the pool sends until its pipe closes."""
    import torch.distributed as dist

    with rank_process(lifeline, Path(folder, str(rank))):
        move_to(home)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = prepare_to_join(devices, rank, timeout_s)
        store = f"file://{folder}/store"
        try:
            dist.init_process_group(group_backend(devices), init_method=store, rank=rank, world_size=n, timeout=timeout)
        except Exception:
            time.sleep(GRACE_S)  # a pool that closes ends its ranks one by one, and the others fail here meanwhile
            raise
        home.put_transfers_first()
        run_requests(pipe)


@contextlib.contextmanager
def rank_process(lifeline: Connection, dump_path: Path) -> Iterator[None]:
    """Run the block as all of a rank's process: it writes thread dumps when asked, and ends when its pool does."""
    threading.Thread(target=_exit_with_pool, args=(lifeline,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with dumping(dump_path):
        yield
    os._exit(0)


def prepare_to_join(devices: Devices, local_rank: int, timeout_s: float) -> timedelta:
    """Set up this process to be a rank; return the timeout of its process groups.

    It is longer than the pool's `timeout_s`: gloo's timeout only tells who noticed a hang, the pool's who caused it.
    """
    import torch

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60 + 4 * timeout_s)
    set_up_device(devices, local_rank, timeout)
    return timeout


def run_requests(pipe: Connection) -> None:
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
            pipe.send(("answer", _resolved(function)(*args)))
        except Exception as error:
            try:
                pipe.send(("error", (_summary(error), _picklable(error))))
            except OSError:  # the pool has ended
                return


def _resolved(function: Callable | str) -> Callable:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)
    return function


def _exit_with_pool(lifeline: Connection) -> None:
    """End this process when the pool's process ends, however it does."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _summary(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {Path(frame.filename).name}:{frame.lineno})"


def _picklable(error: Exception) -> Exception | None:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None
