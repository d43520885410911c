"""The inner loops of `flows`: the functions that numba compiles and that the plain Python engine runs as they are.

They use scalars, indexing and loops only, so that they work on arrays and on lists alike. Everything that a compiled
kernel is made of must stay in this file: numba's disk cache is renewed when the file of the kernel changes, and does
not look at others. Importing this module does not import numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64] | list[float]
Ints = NDArray[np.int64] | NDArray[np.int32] | list[int]
Flags = NDArray[np.bool_] | list[bool]

SAME_INSTANT = 1e-12
"""Events closer than this, relative to the time since the start, share one solve of the rates."""


def has_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def compiled_run() -> Callable[..., None]:
    """`run`, compiled; loaded from numba's disk cache where an earlier process left it there."""
    import numba
    from numba.extending import register_jitable

    for function in _CALLED_BY_RUN:
        register_jitable(function)
    return numba.njit(cache=True)(run)


class Graph(NamedTuple):
    """What the kernel reads. A hop is one link of one flow's path; hops are numbered as in path_links."""

    delay_s: Floats
    flow_bytes: Floats
    rate_cap: Floats
    path_start: Ints
    path_links: Ints
    hop_load: Floats
    hop_task: Ints
    next_start: Ints
    next_tasks: Ints
    link_bytes_per_s: Floats
    link_seat_start: Ints


class Tasks(NamedTuple):
    """State by task. `left_bytes` holds at `updated_s`, and falls by `rate` from there on."""

    start_s: Floats
    finish_s: Floats
    awaited: Ints
    joined: Flags
    left_bytes: Floats
    updated_s: Floats
    rate: Floats
    new_rate: Floats


class Links(NamedTuple):
    """State by link. The hops now on link l sit in seats[link_seat_start[l]:][:taken[l]], in no order."""

    seats: Ints
    seat_of_hop: Ints
    taken: Ints
    load: Floats
    rising: Ints
    rising_load: Floats
    spare_bytes_per_s: Floats


class Component(NamedTuple):
    """The links and flows to solve again. An entry is in it if its mark is the current instant's number."""

    links: Ints
    link_mark: Ints
    flows: Ints
    flow_mark: Ints


class Heap(NamedTuple):
    """Binary min-heap of items by key. `place` finds an item (-1: absent), so that keys move in place, never stale."""

    key: Floats
    items: Ints
    place: Ints
    size: Ints


def run(g: Graph, tasks: Tasks, links: Links, part: Component, events: Heap, levels: Heap) -> None:
    """Fill in start_s and finish_s; tasks on or behind a cycle keep NaN. One event is pending for each running task."""
    for task in range(len(g.delay_s)):
        if tasks.awaited[task] == 0:
            _start(g, tasks, events, task, 0.0)
    instant = 0
    while events.size[0] > 0:
        instant += 1
        n_links = 0
        n_flows = 0
        now = events.key[events.items[0]]
        latest = now * (1.0 + SAME_INSTANT)
        while events.size[0] > 0 and events.key[events.items[0]] <= latest:
            task = events.items[0]
            now = events.key[task]
            _remove_first(events)
            if g.flow_bytes[task] > 0.0 and not tasks.joined[task]:
                _join(g, tasks, links, task)
                part.flow_mark[task] = instant
                part.flows[n_flows] = task
                n_flows += 1
                n_links = _add_path(g, part, task, instant, n_links)
            else:
                if tasks.joined[task]:
                    _leave(g, links, task)
                    n_links = _add_path(g, part, task, instant, n_links)
                _finish(g, tasks, events, task, now)
        n_links, n_flows = _grow(g, links, part, instant, n_links, n_flows)
        _fill(g, tasks, links, part, levels, n_links, n_flows)
        _apply_rates(tasks, part, events, n_flows, now)


def _start(g: Graph, tasks: Tasks, events: Heap, task: int, now: float) -> None:
    tasks.start_s[task] = now
    _set_key(events, task, now + g.delay_s[task])


def _finish(g: Graph, tasks: Tasks, events: Heap, task: int, now: float) -> None:
    tasks.finish_s[task] = now
    for i in range(g.next_start[task], g.next_start[task + 1]):
        follower = g.next_tasks[i]
        tasks.awaited[follower] -= 1
        if tasks.awaited[follower] == 0:
            _start(g, tasks, events, follower, now)


def _join(g: Graph, tasks: Tasks, links: Links, flow: int) -> None:
    tasks.joined[flow] = True
    tasks.left_bytes[flow] = g.flow_bytes[flow]
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        seat = g.link_seat_start[link] + links.taken[link]
        links.seats[seat] = hop
        links.seat_of_hop[hop] = seat
        links.taken[link] += 1
        links.load[link] += g.hop_load[hop]


def _leave(g: Graph, links: Links, flow: int) -> None:
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        links.taken[link] -= 1
        # Rounding must not be left over on a link that is empty.
        links.load[link] = links.load[link] - g.hop_load[hop] if links.taken[link] > 0 else 0.0
        moved = links.seats[g.link_seat_start[link] + links.taken[link]]
        seat = links.seat_of_hop[hop]
        links.seats[seat] = moved
        links.seat_of_hop[moved] = seat


def _add_path(g: Graph, part: Component, flow: int, instant: int, n_links: int) -> int:
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        if part.link_mark[link] != instant:
            part.link_mark[link] = instant
            part.links[n_links] = link
            n_links += 1
    return n_links


def _grow(g: Graph, links: Links, part: Component, instant: int, n_links: int, n_flows: int) -> tuple[int, int]:
    """Complete the component: the flows on its links, the links of those flows, and so on."""
    done = 0
    while done < n_links:
        link = part.links[done]
        first = g.link_seat_start[link]
        for seat in range(first, first + links.taken[link]):
            flow = g.hop_task[links.seats[seat]]
            if part.flow_mark[flow] != instant:
                part.flow_mark[flow] = instant
                part.flows[n_flows] = flow
                n_flows += 1
                n_links = _add_path(g, part, flow, instant, n_links)
        done += 1
    return n_links, n_flows


def _fill(g: Graph, tasks: Tasks, links: Links, part: Component, levels: Heap, n_links: int, n_flows: int) -> None:
    """Progressive filling of the component into new_rate (0: not frozen yet).

    `levels` holds the rate at which each link would fill and each capped flow stop. Freezing flows can only raise the
    fill level of the other links, so a level that has become too low is put right when it comes up.
    """
    n_all_links = len(g.link_bytes_per_s)
    for i in range(n_links):
        link = part.links[i]
        links.rising[link] = links.taken[link]
        links.rising_load[link] = links.load[link]
        links.spare_bytes_per_s[link] = g.link_bytes_per_s[link]
        if links.taken[link] > 0:
            _set_key(levels, link, g.link_bytes_per_s[link] / links.load[link])
    for i in range(n_flows):
        flow = part.flows[i]
        tasks.new_rate[flow] = 0.0
        if g.rate_cap[flow] < np.inf:
            _set_key(levels, n_all_links + flow, g.rate_cap[flow])

    frozen = 0
    while frozen < n_flows:
        item = levels.items[0]
        level = levels.key[item]
        if item >= n_all_links:
            _remove_first(levels)
            frozen += _freeze(g, tasks, links, item - n_all_links, level)
        elif links.rising[item] == 0:
            _remove_first(levels)
        elif links.spare_bytes_per_s[item] / links.rising_load[item] > level:
            _set_key(levels, item, links.spare_bytes_per_s[item] / links.rising_load[item])
        else:
            _remove_first(levels)
            first = g.link_seat_start[item]
            for seat in range(first, first + links.taken[item]):
                frozen += _freeze(g, tasks, links, g.hop_task[links.seats[seat]], level)
    _clear(levels)


def _freeze(g: Graph, tasks: Tasks, links: Links, flow: int, rate: float) -> int:
    if tasks.new_rate[flow] > 0.0:
        return 0
    tasks.new_rate[flow] = rate
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        links.spare_bytes_per_s[link] -= g.hop_load[hop] * rate
        links.rising_load[link] -= g.hop_load[hop]
        links.rising[link] -= 1
    return 1


def _apply_rates(tasks: Tasks, part: Component, events: Heap, n_flows: int, now: float) -> None:
    for i in range(n_flows):
        flow = part.flows[i]
        if tasks.new_rate[flow] != tasks.rate[flow]:
            drained = tasks.rate[flow] * (now - tasks.updated_s[flow])
            # Rounding must not leave a flow that is just about to end with less than nothing.
            tasks.left_bytes[flow] = max(tasks.left_bytes[flow] - drained, 0.0)
            tasks.updated_s[flow] = now
            tasks.rate[flow] = tasks.new_rate[flow]
            _set_key(events, flow, now + tasks.left_bytes[flow] / tasks.rate[flow])


def _set_key(heap: Heap, item: int, key: float) -> None:
    """Insert the item, or move it."""
    place = heap.place[item]
    if place < 0:
        place = heap.size[0]
        heap.size[0] += 1
    heap.key[item] = key
    _sift(heap, item, place)


def _remove_first(heap: Heap) -> None:
    heap.place[heap.items[0]] = -1
    heap.size[0] -= 1
    if heap.size[0] > 0:
        _sift(heap, heap.items[heap.size[0]], 0)


def _clear(heap: Heap) -> None:
    for i in range(heap.size[0]):
        heap.place[heap.items[i]] = -1
    heap.size[0] = 0


def _sift(heap: Heap, item: int, place: int) -> None:
    """Put the item where it belongs, given that `place` is free and all others are in order."""
    key = heap.key[item]
    while place > 0:
        above = (place - 1) // 2
        other = heap.items[above]
        if heap.key[other] <= key:
            break
        heap.items[place] = other
        heap.place[other] = place
        place = above
    size = heap.size[0]
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and heap.key[heap.items[below + 1]] < heap.key[heap.items[below]]:
            below += 1
        other = heap.items[below]
        if key <= heap.key[other]:
            break
        heap.items[place] = other
        heap.place[other] = place
        place = below
    heap.items[place] = item
    heap.place[item] = place


_CALLED_BY_RUN = (
    _start,
    _finish,
    _join,
    _leave,
    _add_path,
    _grow,
    _fill,
    _freeze,
    _apply_rates,
    _set_key,
    _remove_first,
    _clear,
    _sift,
)
