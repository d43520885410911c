"""Points that studies ask for, taken from a folder of records or run.

Simulated points run on all cores, measured ones one after the other on an idle machine. Every point is a record in the
folder as soon as it is finished, so a report that was stopped continues where it was.

`python -m sp_bench.analysis.runs FOLDER` is a process that runs points for Runs: each line of its input is a point as a
JSON list, and each line of its output the record. multiprocessing is not used: its processes would run the caller's
main module again, be it a notebook or a script.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar
from weakref import finalize

from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.machine import cores_here
from sp_bench.point import kept_record, resolve, run_points
from sp_bench.point.request import Request, unsupported
from sp_bench.records import Record, write_whole
from sp_bench.resources import ROOT

Point = tuple[str, ...]
"""The arguments of `python -m sp_bench` for one point, sorted."""
Key = TypeVar("Key")
Item = TypeVar("Item")
FEW = 4
"""A worker process is started for at least this many points, since it takes a second to start."""
LARGE = 2048
"""Points of so many GPUs are simulated by new worker processes: they take more than a GB, and what a process has kept
of earlier points would come on top."""
Worker = subprocess.Popen[str]


def point(**keys: Any) -> Point:
    """A point by its keys: point(method="mesh", gpus=256, tile=[16, 16]).

    Keys that conf/config.yaml doesn't have are the method's options. Dots in names are written as two underscores.
    """
    known = defaults()
    overrides = []
    for key, value in keys.items():
        name = key.replace("__", ".")
        name = name if name.partition(".")[0] in known else f"method.{name}"
        overrides.append(f"{name}={argument(value)}")
    # Hydra wants the choice of a method before its options.
    return tuple(sorted(overrides, key=lambda text: (text.startswith("method."), text)))


def argument(value: Any) -> str:
    """A value in the syntax of the command line: null, true, [16,16], {3:1.5}."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{argument(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(argument, value))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


@cache
def defaults() -> dict[str, Any]:
    """The config that conf/config.yaml composes to."""
    with Composer() as composer:
        return composer.compose([])


@cache
def choices(name: str, own: Path | None = None) -> list[str]:
    """The names of the files of conf/<name>, and of such a folder in `own`, which --config-dir would name."""
    with Composer(own) as composer:
        return composer.choices(name)


@cache
def composed(arguments: tuple[str, ...], own: Path | None = None) -> dict[str, Any]:
    """The config that some choices of files compose to, with keys as text."""
    with Composer(own) as composer:
        return json.loads(json.dumps(composer.compose(arguments)))


def group(name: str, choice: str, own: Path | None = None) -> dict[str, Any]:
    """The values of conf/<name>/<choice>.yaml, with keys as text."""
    return composed((f"{name}={choice}",), own)[name]


class _Processes:
    """Processes that run points, while they have nothing to do. They end when nobody can ask for points any more."""

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        finalize(self, _end, self.idle)

    def take(self, folder: Path) -> Worker:
        """An idle process, or a new one."""
        if self.idle:
            return self.idle.pop()
        command = [sys.executable, "-m", "sp_bench.analysis.runs", str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _end(workers: list[Worker]) -> None:
    """End processes, which do at the end of their input."""
    while workers:
        with workers.pop():
            pass


@dataclass(eq=False)
class Runs:
    """The records of points, kept in one folder."""

    folder: Path
    workers: int = field(default_factory=cores_here)
    progress: Callable[[str], None] = lambda text: None
    """Called with each point whose record has become known."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The study's own keys of the command line."""
    pages: Path = Path("results/pages")
    """The folder of the page, for figures that write files beside it."""
    failed: list[str] = field(default_factory=list)
    """Failures in words; figures add to them."""
    leave_alone: Callable[[], object] = lambda: None
    """Called before points are measured: it returns when nothing else runs on this machine."""
    _known: dict[Point, Record] = field(default_factory=dict, repr=False)
    _processes: _Processes = field(default_factory=_Processes, repr=False)

    def one(self, **keys: Any) -> Record:
        """The record of one point; keys are those of `point`."""
        return self.ask([point(**keys)])[0]

    def ask(self, points: Iterable[Point]) -> list[Record]:
        """The records of points, in their order; those that are not in the folder yet are run.

        A point that can't be served is a record too, with status unsupported and the reason. Timelines are written
        only where a point says trace=.
        """
        points = list(points)
        todo = [p for p in dict.fromkeys(points) if p not in self._known]
        simulated = sorted((p for p in todo if not is_measured(p)), key=_largest_first)
        measured = [p for p in todo if is_measured(p)]  # which composes, too, and only one Composer can be open
        if todo:
            with Composer() as composer:
                self._look_up(simulated, composer)
                self._simulate([p for p in simulated if p not in self._known], composer)
                self._measure(measured, composer)
        return [self._known[p] for p in points]

    def ok(self, points: Iterable[Point]) -> list[Record]:
        """The records of points, like `ask`. Raises RuntimeError for a point that is not ok."""
        records = self.ask(points)
        for record in records:
            if record.status != "ok":
                raise RuntimeError(f"{record.method} {record.variant}: {record.status}: {record.error}")
        return records

    def rest(self) -> None:
        """End the processes that have run points, and the memory that they take."""
        _end(self._processes.idle)

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make` as JSON: measured once, and kept in <folder>/<name>.json."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(make(), indent=1))
        return json.loads(path.read_text())

    def by_key(self, asked: Mapping[Key, Point]) -> dict[Key, Record]:
        """The records of points, by the keys of the points."""
        return dict(zip(asked, self.ask(asked.values()), strict=True))

    def grid(self, make: Callable[..., Point], *axes: Iterable[Any]) -> dict[Any, Record]:
        """The records of make(*place) at each place of the product of axes."""
        return self.by_key({place: make(*place) for place in product(*axes)})

    def by_setting(
        self, make: Callable[[Any, str], Point], settings: Iterable[Item], methods: Iterable[str]
    ) -> list[tuple[Item, dict[str, Record]]]:
        """Each setting with the records of make(setting, method) by method."""
        settings, methods = list(settings), list(methods)
        records = self.grid(make, settings, methods)
        return [(setting, {method: records[setting, method] for method in methods}) for setting in settings]

    def _look_up(self, points: Sequence[Point], composer: Composer) -> None:
        """Take the records that are in the folder, up to the first that isn't: where all are, no worker is started."""
        for one in points:
            request = request_of(one, composer)
            record = request if isinstance(request, Record) else kept_record(self.folder, request)
            if record is None:
                return
            self._keep(one, record)

    def _simulate(self, points: Sequence[Point], composer: Composer) -> None:
        """Simulate points, in worker processes where they are many or processes are idle."""
        workers = min(self.workers, max(len(points) // FEW, min(len(points), len(self._processes.idle))))
        if any(_gpus(one) >= LARGE for one in points):
            self.rest()
        if workers > 1:
            self._ask_workers(points, workers)
        for one in points:
            if one not in self._known:
                self._keep(one, record_of(one, self.folder, composer))

    def _keep(self, one: Point, record: Record) -> None:
        self._known[one] = record
        self.progress(" ".join(one))

    def _measure(self, points: Sequence[Point], composer: Composer) -> None:
        """Measure all points at once: consecutive points of one problem are timed in turn, so they can be compared."""
        by_point = {one: request_of(one, composer) for one in points}
        requests = [request for request in by_point.values() if isinstance(request, Request)]
        if requests:
            self.leave_alone()
        done = {o.record.run_id: o.record for o in run_points(requests, folder=self.folder, reuse=True)}
        if requests:
            from sp_bench.measure.pool import end_forkserver

            end_forkserver()
        for one, request in by_point.items():
            self._keep(one, request if isinstance(request, Record) else done[request.run_id])

    def _ask_workers(self, points: Sequence[Point], workers: int) -> None:
        with ThreadPoolExecutor(workers) as pool:
            for future in [pool.submit(self._ask_worker, queue) for queue in from_both_ends(points, workers)]:
                future.result()

    def _ask_worker(self, queue: Iterator[Point]) -> None:
        """Send points to a worker process, one after the other."""
        worker = self._processes.take(self.folder)
        try:
            assert worker.stdin and worker.stdout
            for one in queue:
                worker.stdin.write(json.dumps(one) + "\n")
                worker.stdin.flush()
                if not (answer := worker.stdout.readline()):
                    raise RuntimeError(f"the process that ran {' '.join(one)} ended with {worker.wait()}")
                self._keep(one, Record(**json.loads(answer)))
        except BaseException:
            _end([worker])
            raise
        self._processes.idle.append(worker)


def from_both_ends(points: Sequence[Item], takers: int) -> list[Iterator[Item]]:
    """Iterators, one for each taker, that share the points: every other one begins with the last.

    Points that take much memory come first, and so not all takers run such points at the same time.
    """
    left = deque(points)

    def taken(take: Callable[[], Item]) -> Iterator[Item]:
        with suppress(IndexError):
            while True:
                yield take()

    return [taken(left.popleft if i % 2 == 0 else left.pop) for i in range(takers)]


def _given(one: Point) -> dict[str, str]:
    return dict(text.split("=", 1) for text in one)


def _largest_first(one: Point) -> tuple[int, str, list[str], str]:
    """The key by which points are run: those on most GPUs first, and one after another those that differ by their
    clusters alone, whose plans are often the same.
    """
    given = _given(one)
    others = [text for text in one if not text.startswith("cluster=")]
    return -_gpus(one), given.get("method", ""), others, given.get("cluster", "")


def _gpus(one: Point) -> int:
    """The GPUs that a point says it has; 0 if it says nothing."""
    gpus = _given(one).get("gpus", "")
    return int(gpus) if gpus.isdecimal() else 0


def is_measured(one: Point) -> bool:
    """Whether a point is measured: by its mode, or because its cluster is this machine."""
    given = _given(one)
    if (mode := given.get("mode", "auto")) != "auto":
        return mode != "simulate"
    cluster = str(given.get("cluster", defaults()["cluster"]["name"]))
    return bool(group("cluster", cluster).get("this_machine"))


def record_of(one: Point, folder: Path, composer: Composer) -> Record:
    """The record of one point, taken from the folder or run."""
    request = request_of(one, composer)
    return request if isinstance(request, Record) else run_points([request], folder=folder, reuse=True)[0].record


def request_of(one: Point, composer: Composer) -> Request | Record:
    """The request of a point, or the record of a point that can't be served."""
    traced = any(text.startswith("trace=") for text in one)
    config = composer.compose(["logger=none", "baseline=null", *(one if traced else (*one, "trace=0"))])
    try:
        return resolve(config)
    except RequestError as error:
        return unsupported(config, error)


def main() -> None:
    """Answer the points of the input until it ends, or at once on Ctrl-C, which a notebook's kernel ends with, too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers, sys.stdout = sys.stdout, sys.stderr
    with Composer() as composer:
        for line in sys.stdin:
            record = record_of(tuple(json.loads(line)), Path(sys.argv[1]), composer)
            print(json.dumps(record.to_dict()), file=answers, flush=True)


if __name__ == "__main__":
    main()
