"""One invocation: resolve the points, run them under a progress bar, log and print the outcomes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from sp_bench.cli import report
from sp_bench.cli.columns import ONE, SEVERAL, make_console
from sp_bench.errors import RequestError
from sp_bench.launch import RankCountError, launched
from sp_bench.loggers import Logger
from sp_bench.machine import has_bfloat16
from sp_bench.plan.method import Method
from sp_bench.point import NotWritten, Outcome, Request, resolve, run_points, work_of
from sp_bench.point.at_once import processes_here
from sp_bench.point.request import unsupported
from sp_bench.point.simulations import simulation_of
from sp_bench.records import Record
from sp_bench.terminal import say


def run_point(
    config: Mapping[str, Any],
    baseline: Mapping[str, Any] | None,
    folder: Path,
    logger: Logger,
    *,
    as_json: bool,
    every: bool,
) -> int:
    """Run a point beside its baseline; return the exit code. Raises RequestError if the point can't be served.

    `as_json` prints the records to stdout, one a line, and all else to stderr. `every` prints all quantities.
    """
    console = make_console(beside_data=as_json)
    requests = [resolve(config, launched())]
    console.width = min(console.width, SEVERAL if baseline else ONE)
    if baseline:
        try:
            requests.append(resolve(baseline, launched()))
        except RequestError as error:
            console.print(f"no baseline: {error}")
    _say_mode(console, requests)
    try:
        outcomes = _run(console, requests, folder, logger, reuse=_reuse(config, sweep=False))
    except NotWritten as error:
        report.print_points(console, error.outcomes, folder, every=every)
        say(f"sp_bench: {error}")
        return 1
    if outcomes[0].record.status == "unsupported":
        say(f"sp_bench: {outcomes[0].record.error}")
        return 2
    if as_json:
        report.print_json([outcome.record for outcome in outcomes])
    report.print_points(console, outcomes, folder, every=every)
    paths = (str(folder / f"{outcome.record.run_id}.json") for outcome in outcomes)
    console.print(f"\nrecords: {', '.join(paths)}", soft_wrap=True)
    failed = [o for o in outcomes if o.record.status not in ("ok", "unsupported")]
    return 1 if failed else 0


def run_sweep(configs: Sequence[Mapping[str, Any]], folder: Path, logger: Logger, *, as_json: bool, every: bool) -> int:
    """Run all points and print one table; return the exit code. `as_json` and `every` are as in run_point.

    A point that can't be served is a row of its own; in a launch, points with another number of ranks are left out.
    Raises RequestError if no point can be served.
    """
    console = make_console(beside_data=as_json)
    requests: list[Request | Record] = []
    elsewhere: list[RankCountError] = []
    for config in configs:
        try:
            requests.append(resolve(config, launched()))
        except RankCountError as error:
            elsewhere.append(error)
        except RequestError as error:
            requests.append(unsupported(config, error))
    if elsewhere:
        console.print(f"Left out {len(elsewhere)} of {len(configs)} points: {elsewhere[0]}")
    served = [r for r in requests if isinstance(r, Request)]
    if not served:
        errors = sorted({r.error or "" for r in requests if isinstance(r, Record)} | {str(e) for e in elsewhere})
        raise RequestError(
            f"none of {len(configs)} points", "; ".join(errors[:3]), "other values of these keys would work"
        )
    _say_mode(console, served)
    try:
        rows = _run(console, requests, folder, logger, reuse=_reuse(configs[0], sweep=True))
    except NotWritten as error:
        report.print_sweep(console, error.outcomes, every=every)
        say(f"sp_bench: {error}")
        return 1
    if as_json:
        report.print_json([outcome.record for outcome in rows])
    report.print_sweep(console, rows, every=every)
    console.print(f"records: {folder}/", soft_wrap=True)
    return 0 if all(o.record.status in ("ok", "unsupported") for o in rows) else 1


def _reuse(config: Mapping[str, Any], *, sweep: bool) -> bool:
    """Whether points with a record are not run again. Raises RequestError for an invalid value."""
    if config["reuse"] == "auto":
        return sweep
    if not isinstance(config["reuse"], bool):
        raise RequestError(f"reuse={config['reuse']}", "must be auto, true or false", "reuse=auto would work")
    return config["reuse"]


def _say_mode(console: Console, requests: Sequence[Request]) -> None:
    """Print what is measured and what is simulated, on what, and why: a line for each mode."""
    for mode, why in dict.fromkeys((request.mode, request.why) for request in requests):
        points = [request for request in requests if (request.mode, request.why) == (mode, why)]
        counts = sorted({request.given.values.gpus for request in points})
        gpus = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        device = points[0].cluster.device.name
        if mode == "simulate":
            text = f", not measured: {why}, and asked for are {gpus} {device}. "
            text += f"Link and kernel figures are those of cluster={points[0].cluster.name}."
        elif mode == "alone":
            text = f", a rank of {gpus} at a time: {why}."
        else:
            text = f" on {gpus} ranks: {why}."
        console.print(Text.assemble(("Simulated" if mode == "simulate" else "Measured", "bold"), text))


def _run(
    console: Console, requests: Sequence[Request | Record], folder: Path, logger: Logger, *, reuse: bool
) -> list[Outcome]:
    def log(outcome: Outcome) -> None:
        if not outcome.reused:
            logger.log(folder / f"{outcome.record.run_id}.json")

    asked = [request for request in requests if isinstance(request, Request)]
    # Records that are there already are read later; here a file will do.
    _say_duration([one for one in asked if not (reuse and (folder / f"{one.run_id}.json").exists())])
    with _bar(work_of(requests)) as advance:
        return run_points(
            requests, folder=folder, reuse=reuse, at_once=processes_here(), progress=advance, finished=log
        )


def _say_duration(requests: Sequence[Request]) -> None:
    """Print to stderr about how long points that are measured on CPUs will take, by their cluster's rates.

    Computing alone is timed in turn with the step. What transfers and starting take isn't known before.
    """
    seconds, unknown, emulated = 0.0, 0, False
    for request in requests:
        if request.mode == "simulate" or request.devices.kind != "cpu":
            continue
        narrow = request.problem.dtype in ("bfloat16", "float16") and not has_bfloat16()
        emulated |= narrow
        if narrow or not isinstance(request.method, Method):  # a peer has no plans
            unknown += 1
            continue
        try:
            steps = (request.warmup + request.iters) * (1 + request.parts) + 1
            seconds += steps * simulation_of(request).least_compute_s(request)
        except RequestError:
            unknown += 1
    known = f"about {_duration(seconds)} of computing at {requests[0].cluster.name}'s rates" if seconds else ""
    more = f"{unknown} points whose time isn't known before their first steps" if unknown else ""
    more += ": this CPU emulates their dtype, and dtype=float32 is faster" if emulated else ""
    if known or more:
        say(" and ".join(filter(None, (known, more))))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


TELLING = 3
"""How many steps tell what the others will take: the first ones load kernels and open connections."""
SAID_EVERY_S = 20.0
"""Seconds between two lines about progress where there is no terminal for a bar."""


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Callable[[int], None]]:
    """Progress on stderr, with the time left: a bar on a terminal, else a line now and then."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    console = Console(stderr=True)
    began_s: float | None = None  # when the first step did: starting ranks says nothing of the others
    said_s = time.monotonic()
    with Progress(
        TextColumn("{task.description}"), *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task, done = progress.add_task("benchmark steps", total=steps), 0

        def advance(more: int) -> None:
            nonlocal began_s, done, said_s
            progress.advance(task, more)
            now_s = time.monotonic()
            began_s = began_s or now_s
            if done and not console.is_terminal and now_s - said_s > SAID_EVERY_S:
                left = f", about {_duration((now_s - began_s) / done * (steps - done))} left" if done >= TELLING else ""
                say(f"{done} of {steps} benchmark steps{left}")
                said_s = now_s
            done += more

        yield advance
