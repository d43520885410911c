"""Task graphs for the flow simulator, and an exact solution of another structure: rational numbers, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest

from sp_bench.simulate.task_graph import TaskGraph, Timing

SOLVERS = [
    "python",
    pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")),
]


RELATIVE = 1e-9


@dataclass(frozen=True)
class Task:
    delay_s: float = 0.0
    bytes: float = 0.0
    path: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    cap: float = float("inf")
    loads: tuple[float, ...] = ()
    """As path; () for 1 each."""
    weight: float = 1.0

    def load(self, link: int) -> Fraction:
        """Seconds of a link that each byte takes."""
        loads = zip(self.path, self.loads or (1.0,) * len(self.path), strict=True)
        return sum((Fraction(load) for other, load in loads if other == link), Fraction(0))


def graph_of(tasks: Sequence[Task], link_bytes_per_s: Iterable[float]) -> TaskGraph:
    return TaskGraph(
        delay_s=np.array([t.delay_s for t in tasks], float),
        flow_bytes=np.array([t.bytes for t in tasks], float),
        path_start=np.cumsum([0] + [len(t.path) for t in tasks]),
        path_links=np.array([link for t in tasks for link in t.path], np.int32),
        path_loads=np.array([load for t in tasks for load in t.loads or (1.0,) * len(t.path)], float),
        dep_start=np.cumsum([0] + [len(t.after) for t in tasks]),
        dep_tasks=np.array([other for t in tasks for other in t.after], np.int32),
        rate_cap=np.array([t.cap for t in tasks], float),
        weight=np.array([t.weight for t in tasks], float),
        link_bytes_per_s=np.array(list(link_bytes_per_s), float),
    )


def fair_rates(tasks: Sequence[Task], active: Sequence[int], link_rates: Sequence[Fraction]) -> dict[int, Fraction]:
    """Textbook progressive filling: raise unfrozen flows by the largest step, times their weights, freeze, repeat."""
    weights = {flow: Fraction(tasks[flow].weight) for flow in active}
    rates = dict.fromkeys(active, Fraction(0))
    rising = set(active)
    while rising:
        spare = list(link_rates)
        crossings = [Fraction(0)] * len(spare)
        for flow in active:
            for link in set(tasks[flow].path):
                spare[link] -= tasks[flow].load(link) * rates[flow]
                crossings[link] += tasks[flow].load(link) * weights[flow] * (flow in rising)
        capped = [flow for flow in rising if tasks[flow].cap != float("inf")]
        steps = [spare[link] / n for link, n in enumerate(crossings) if n]
        steps += [(Fraction(tasks[flow].cap) - rates[flow]) / weights[flow] for flow in capped]
        step = min(steps)
        full = {link for link, n in enumerate(crossings) if n and spare[link] == n * step}
        for flow in rising:
            rates[flow] += step * weights[flow]
        rising -= {flow for flow in rising if full.intersection(tasks[flow].path)}
        rising -= {flow for flow in capped if rates[flow] == Fraction(tasks[flow].cap)}
    return rates


def exact_finish_s(tasks: Sequence[Task], link_bytes_per_s: Sequence[float]) -> list[float]:
    """Step from event to event in rational numbers, with every rate found anew at each."""
    link_rates = [Fraction(rate) for rate in link_bytes_per_s]
    now = Fraction(0)
    waiting = set(range(len(tasks)))
    timers: dict[int, Fraction] = {}
    draining: dict[int, Fraction] = {}
    finish: dict[int, Fraction] = {}
    while waiting or timers or draining:
        for task in [t for t in waiting if all(other in finish for other in tasks[t].after)]:
            waiting.remove(task)
            timers[task] = Fraction(tasks[task].delay_s)
        rates = fair_rates(tasks, list(draining), link_rates)
        step = min([*timers.values(), *(left / rates[flow] for flow, left in draining.items())])
        now += step
        draining = {flow: left - rates[flow] * step for flow, left in draining.items()}
        timers = {task: left - step for task, left in timers.items()}
        for flow in [f for f, left in draining.items() if left == 0]:
            del draining[flow]
            finish[flow] = now
        for task in [t for t, left in timers.items() if left == 0]:
            del timers[task]
            if tasks[task].bytes > 0:
                draining[task] = Fraction(tasks[task].bytes)
            else:
                finish[task] = now
    return [float(finish[task]) for task in range(len(tasks))]


def assert_within_capacity(tasks: Sequence[Task], link_rates: Sequence[float], timing: Timing) -> None:
    """In no span of time may a link carry more than its rate allows."""
    join = timing.start_s + [t.delay_s for t in tasks]
    for link, rate in enumerate(link_rates):
        users = [i for i, t in enumerate(tasks) if link in t.path]
        load = np.array([tasks[i].bytes * float(tasks[i].load(link)) for i in users])
        for begin in join[users]:
            for end in timing.finish_s[users]:
                inside = (join[users] >= begin) & (timing.finish_s[users] <= end)
                assert load[inside].sum() <= rate * (end - begin) * (1 + RELATIVE) or not inside.any()
