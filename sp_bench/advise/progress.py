"""Points that have been simulated so far, while advice is worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

TIMES_A_SECOND = 4
"""How often a terminal is drawn anew."""


class Done(NamedTuple):
    """A point that has been simulated or bounded, or can't be: the `number`th `of` so many."""

    what: str
    number: int
    of: int
    step_ms: float | None = None
    least_ms: float | None = None
    """A lower bound on its step, of a point that isn't simulated yet."""


Show = Callable[[Done], None]


def unseen(done: Done) -> None:
    """Take what has been simulated, and show nothing of it."""


@contextmanager
def watching(about: str = "", *, rows: bool = True, console: Console | None = None) -> Iterator[Show]:
    """Draw a bar on a terminal and, with `rows`, the times and the lower bounds that are known so far, the shortest
    first. Both are gone in the end. Yields what is called with each.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield unseen
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar, known = Progress(*columns, console=console), dict[str, Done]()
    task = bar.add_task(about, total=None)

    def show(done: Done) -> None:
        known.pop(done.what, None)
        if rows and (done.step_ms is not None or done.least_ms is not None):
            known[done.what] = done
        bar.update(task, description=f"{about}{done.what}", completed=done.number, total=done.of)
        live.update(Group(_table(known.values(), console.height - 3), bar))

    with Live(bar, console=console, transient=True, refresh_per_second=TIMES_A_SECOND) as live:
        yield show


def _table(known: Iterable[Done], most: int) -> Table:
    """The first so many rows of those that are known, those that are simulated before those that are bounded."""
    table = Table.grid(padding=(0, 2))
    for done in sorted(known, key=lambda done: (done.step_ms is None, done.step_ms or done.least_ms, done.what))[:most]:
        time = f"at least {done.least_ms:.4g} ms" if done.step_ms is None else f"{done.step_ms:.4g} ms"
        table.add_row(done.what, time)
    return table
