"""Follow a sweep: a line whenever something changes or, in a terminal, a view that stays up to date."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sp_bench.slurm import queue
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.progress import STATES, Progress, failures, progress
from sp_bench.slurm.stopped import described, stopped, stuck

POLL_S = 2.0
PATIENCE_S = 300.0
"""Seconds that the controller may be silent while jobs are followed."""
MOST_LINES = 5
"""The running tasks, and the failed points, that a view shows."""
COLOURS = {"done": "green", "running": "cyan", "pending": "dim", "failed": "red", "unsupported": "dim"}


def print_all(sweep: Sweep, found: Progress) -> None:
    """Print the states of points, why tasks don't run and what to do, and the error of each point that failed."""
    print("\n".join([found.line, *_not_running(sweep, found)]), flush=True)


def _not_running(sweep: Sweep, found: Progress) -> list[str]:
    """The lines on tasks that don't run, and on points with an error. A point that SLURM ended has a log only."""
    return [line for stop in stopped(sweep, found.in_slurm) for line in stop.lines] + _failed(sweep)


def follow(sweep: Sweep) -> int:
    """Print the states of points whenever they change, until no job is left; return the exit code, 0 if all are done.

    What waits and won't start by itself is printed as soon as SLURM says so. Raises RequestError if the controller has
    been silent for PATIENCE_S.
    """
    printed = ""

    def show(found: Progress, silent_s: float) -> None:
        nonlocal printed
        told = [line for stop in stuck(sweep, found.in_slurm) for line in stop.lines]
        if (text := "\n".join([found.line, *told])) != printed:
            print(printed := text, flush=True)

    return _end(sweep, _until_over(sweep, show))


def watch(sweep: Sweep, console: Console | None = None) -> int:
    """Keep a view of the sweep up to date, until no job is left; return the exit code, as `follow`, which it is if the
    output is not a terminal.

    Raises RequestError if the controller has been silent for PATIENCE_S.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        return follow(sweep)
    with Live(console=console, auto_refresh=False) as live:
        last = _until_over(sweep, lambda found, silent_s: live.update(view(sweep, found, silent_s), refresh=True))
    return _end(sweep, last)


def _until_over(sweep: Sweep, show: Callable[[Progress, float], None]) -> Progress:
    """Show the progress, and how long the controller has been silent, until no job is left; return the last one."""
    state, answered = None, time.monotonic()
    while True:
        try:
            state, answered = progress(sweep), time.monotonic()
        except queue.SlurmError:
            if time.monotonic() - answered > PATIENCE_S:
                raise
        if state:
            show(state, time.monotonic() - answered)
            if state.over:
                return state
        time.sleep(POLL_S)


def _end(sweep: Sweep, last: Progress) -> int:
    for line in _not_running(sweep, last):
        print(line)
    print(f"records: {sweep.records}")
    return 1 if last.counts["failed"] else 0


def view(sweep: Sweep, found: Progress, silent_s: float = 0.0) -> RenderableType:
    """The sweep in a terminal: finished of all points and the time left, states by GPUs, what runs and what failed."""
    counts = found.counts
    finished = counts["done"] + counts["unsupported"]
    head = Text.assemble((sweep.name, "bold"), f"  {finished} of {counts.total()} points finished, {_left(found)}")
    parts: list[RenderableType] = [head, ProgressBar(counts.total(), finished, width=60), _states(found)]
    parts += [Text(f"running: {described(task)}", style="cyan") for task in found.running[:MOST_LINES]]
    if more := found.running[MOST_LINES:]:
        parts.append(Text(f"and {len(more)} more tasks"))
    parts += [Text("\n".join(stop.lines), style="yellow") for stop in stopped(sweep, found.in_slurm) if not stop.waits]
    failed = _failed(sweep)
    parts += [Text(line, style="red", overflow="ellipsis", no_wrap=True) for line in failed[-MOST_LINES:]]
    if silent_s > 2 * POLL_S:
        parts.append(Text(f"SLURM has not answered for {silent_s:.0f} s; this is what it said last", style="yellow"))
    return Group(*parts)


def _states(found: Progress) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("GPUs", *STATES):
        table.add_column(name, justify="right", style=COLOURS.get(name))
    for gpus, of_gpus in found.by_gpus.items():
        table.add_row(str(gpus), *(str(of_gpus[state] or "·") for state in STATES))
    return table


def _left(found: Progress) -> str:
    if found.over:
        return "no job is left"
    if not found.running:
        return "waiting in the queue"
    if found.left_s is None:
        return "time left is known after two tasks"
    return f"about {duration(found.left_s)} left at the present rate"


def duration(seconds: float) -> str:
    """A time in words: 40 s, 12 min, 3 h 20 min, 2 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _failed(sweep: Sweep) -> list[str]:
    return [f"method={r.method} gpus={r.gpus} seqlen={r.seqlen}: {r.status}: {r.error}" for r in failures(sweep)]
