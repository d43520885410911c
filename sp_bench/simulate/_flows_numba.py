"""The inner loops of `flows`: the functions that numba compiles and that the plain Python engine runs as they are.

They use scalars, indexing and loops only, so that they work on pointers and on lists alike. Everything that the machine
code is made of must stay in this file: it is made anew when this file changes (machine_code.py).

A link's level is the rate at which it is full: its flows run at that rate, except those that another link of their path
holds to less. A flow runs at the lowest level of its links, and one link with that level holds it. Rates are max-min
fair if every link's level is right, given the levels of all others. So when flows join or leave, the levels of their
links are computed again, then those of the links that share a flow with a link whose level has changed, and so on
(`_settle`). A level depends on lower levels only. Taking links from the lowest level up, those to come for as high as
can be, therefore settles most of them at once, and links where nothing changes are never looked at.

The end of a flow isn't kept in seconds, because each change of its rate would move it. Each link has a clock that runs
at its level, in bytes, and a flow ends at a fixed reading of its holder's clock (`held`). A change of level then moves
one event, the link's next end, however many flows the link holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64] | list[float]
Int64s = NDArray[np.int64] | list[int]
Int32s = NDArray[np.int32] | list[int]
Flags = NDArray[np.bool_] | list[bool]
Ints = Int64s | Int32s

SAME_LEVEL = 1e-14
"""A level that would change by less than this, relative to it, stays as it is: that is rounding."""
FINITE = 1e300
"""Stands for inf where that times 0 must be 0."""
TASKS, LINKS, LOADS = range(3)
"""The entries of Graph.counts."""


class Graph(NamedTuple):
    """Arrays for the kernel. A hop is one link of one flow's path; a path has each link once, and at least one."""

    delay_s: Floats
    flow_bytes: Floats
    path_start: Int32s
    path_links: Int32s
    hop_load: Floats
    """Empty where every load is 1."""
    hop_task: Int32s
    dep_start: Int32s
    dep_tasks: Int32s
    next_start: Int32s
    next_tasks: Int32s
    """The followers of each task, both to be filled in; at first zeros."""
    link_bytes_per_s: Floats
    link_seat_start: Int32s
    same_instant: Floats
    """Two entries: events closer than this, relative to the time since the start or in seconds, share one solve."""
    most_s: Floats
    """One entry: events after this time are left."""
    counts: Int64s
    """How many tasks, links and entries of hop_load there are: pointers have no lengths."""


class Tasks(NamedTuple):
    """State by task."""

    start_s: Floats
    finish_s: Floats
    awaited: Int32s
    holder: Int32s
    """The link that holds each flow; -1 before it joins."""
    joined: Int32s
    """A list of the flows that join in this instant; before the first one, how many followers of each are filled in."""


class Links(NamedTuple):
    """State by link. The hops now on link l sit in the seats link_seat_start[l] and on, `taken[l]` of them."""

    taken: Int64s
    level: Floats
    """In bytes per second; inf where all flows are held elsewhere. One more entry, always inf, stands for no link."""
    clean_level: Floats
    """The level; 0 while the link is dirty, and always 0 where the level never changes."""
    before: Floats
    """The level that a link had before it was dirty: meanwhile its level is inf."""
    turn: Int64s
    """One entry: how many levels have settled."""
    marked: Int64s
    """The turn at which a link has become dirty."""
    settled: Int64s
    """The turn at which its level has settled."""
    is_changed: Flags
    changed: Int64s
    """A list of the links whose levels change in this instant."""
    is_misheld: Flags
    misheld: Int64s
    """A list of the links that hold a flow they shouldn't, or don't hold one they should."""
    beside: Int64s
    """A list of links that share flows with one whose level changes."""
    clock_bytes: Floats
    """Bytes moved at `read_s` by a flow that is held ever since the link last held none."""
    read_s: Floats
    pace: Floats
    """The level since `read_s`."""


class Seats(NamedTuple):
    """The hops on each link, in no order; what a level is computed from is side by side in memory."""

    hop: Int32s
    load: Floats
    others: Int32s
    """The other links of the flow's path, `width` for each seat."""
    is_held: Floats
    """1 where the link holds the flow, else 0."""
    of_hop: Int32s
    width: Int64s


class Heaps(NamedTuple):
    """Binary min-heaps of items by key. `place` finds an item (-1: absent), so that keys move in place, never stale.

    Keys lie beside each other as items do, so that those which are compared are on one line of the processor's cache.
    """

    key: Floats
    items: Int32s
    place: Int32s
    start: Int32s
    """The start of each heap in `key` and `items`."""
    size: Int64s


def run(g: Graph, tasks: Tasks, links: Links, seats: Seats, events: Heaps, held: Heaps, dirty: Heaps) -> bool:
    """Fill in start_s and finish_s; tasks on or behind a cycle, and those that end after most_s, keep NaN.

    Returns False, with all state unusable, as soon as a link has more flows at once than seats; True at the end.
    An event is the end of a task's delay (its number) or the next end of a flow that a link holds (the number of tasks
    plus the link's). `held` has a heap for each link: the flows it holds, by the clock reading at which they end.
    `dirty` are the links whose level may have changed, by what it is at least.
    """
    n_tasks = g.counts[TASKS]
    _find_followers(g, tasks)
    for task in range(n_tasks):
        if tasks.awaited[task] == 0:
            _start(g, tasks, events, task, 0.0)
    while events.size[0] > 0:
        now = events.key[0]
        if now > g.most_s[0]:
            return True
        latest = max(now * (1.0 + g.same_instant[0]), now + g.same_instant[1])
        n_joined = 0
        while events.size[0] > 0 and events.key[0] <= latest:
            item = events.items[0]
            now = events.key[0]
            if item >= n_tasks:
                flow = held.items[held.start[item - n_tasks]]
                _leave(g, tasks, links, seats, events, held, dirty, flow)
                _finish(g, tasks, events, flow, now)
            else:
                _remove(events, 0, item)
                if g.flow_bytes[item] > 0.0:
                    if not _join(g, links, seats, item):
                        return False
                    tasks.joined[n_joined] = item
                    n_joined += 1
                else:
                    _finish(g, tasks, events, item, now)
        _fill(g, tasks, links, seats, events, held, dirty, n_joined, now)
    return True


def _find_followers(g: Graph, tasks: Tasks) -> None:
    n_tasks = g.counts[TASKS]
    for i in range(g.dep_start[n_tasks]):
        g.next_start[g.dep_tasks[i] + 1] += 1
    for task in range(n_tasks):
        g.next_start[task + 1] += g.next_start[task]
    for task in range(n_tasks):
        for i in range(g.dep_start[task], g.dep_start[task + 1]):
            before = g.dep_tasks[i]
            g.next_tasks[g.next_start[before] + tasks.joined[before]] = task
            tasks.joined[before] += 1


def _start(g: Graph, tasks: Tasks, events: Heaps, task: int, now: float) -> None:
    tasks.start_s[task] = now
    _set_key(events, 0, task, now + g.delay_s[task])


def _finish(g: Graph, tasks: Tasks, events: Heaps, task: int, now: float) -> None:
    tasks.finish_s[task] = now
    for i in range(g.next_start[task], g.next_start[task + 1]):
        follower = g.next_tasks[i]
        tasks.awaited[follower] -= 1
        if tasks.awaited[follower] == 0:
            _start(g, tasks, events, follower, now)


def _join(g: Graph, links: Links, seats: Seats, flow: int) -> bool:
    """Seat a flow on its links; False if one of them has no seat left."""
    width = seats.width[0]
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        seat = g.link_seat_start[link] + links.taken[link]
        if seat == g.link_seat_start[link + 1]:
            return False
        seats.hop[seat] = hop
        seats.of_hop[hop] = seat
        seats.load[seat] = g.hop_load[hop] if g.counts[LOADS] > 0 else 1.0
        seats.is_held[seat] = 0.0
        i = seat * width
        for other in range(g.path_start[flow], g.path_start[flow + 1]):
            if other != hop:
                seats.others[i] = g.path_links[other]
                i += 1
        for padding in range(i, (seat + 1) * width):
            seats.others[padding] = g.counts[LINKS]
        links.taken[link] += 1
    return True


def _is_alone(g: Graph, links: Links, dirty: Heaps, flow: int) -> bool:
    """Whether no other flow is on the links of a flow that joins, nor has left them in this instant."""
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        if links.taken[link] > 1 or dirty.place[link] >= 0:
            return False
    return True


def _hold_alone(
    g: Graph, tasks: Tasks, links: Links, seats: Seats, events: Heaps, held: Heaps, flow: int, now: float
) -> None:
    """Have a flow that is alone on its links run at the lowest rate of any, which becomes the level of that link."""
    lowest, level = g.path_start[flow], np.inf
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        # The level of a link that had no flows is inf, but for one whose level never changes.
        own = links.level[link]
        if own == np.inf:
            own = g.link_bytes_per_s[link] / seats.load[seats.of_hop[hop]]
        if own < level:
            lowest, level = hop, own
    holder = g.path_links[lowest]
    if links.level[holder] == np.inf:
        links.level[holder] = links.clean_level[holder] = level
    links.clock_bytes[holder], links.read_s[holder], links.pace[holder] = 0.0, now, level
    seats.is_held[seats.of_hop[lowest]] = 1.0
    tasks.holder[flow] = holder
    _set_key(held, holder, flow, g.flow_bytes[flow])
    _schedule(g, links, events, held, holder)


def _leave(
    g: Graph, tasks: Tasks, links: Links, seats: Seats, events: Heaps, held: Heaps, dirty: Heaps, flow: int
) -> None:
    holder = tasks.holder[flow]
    _remove(held, holder, flow)
    _schedule(g, links, events, held, holder)
    width = seats.width[0]
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        link = g.path_links[hop]
        links.taken[link] -= 1
        if links.taken[link] == 0 and dirty.place[link] < 0:
            if links.clean_level[link] > 0.0:
                links.level[link] = links.clean_level[link] = links.pace[link] = np.inf
            continue
        last, seat = g.link_seat_start[link] + links.taken[link], seats.of_hop[hop]
        seats.hop[seat] = seats.hop[last]
        seats.of_hop[seats.hop[seat]] = seat
        seats.load[seat] = seats.load[last]
        seats.is_held[seat] = seats.is_held[last]
        for i in range(width):
            seats.others[seat * width + i] = seats.others[last * width + i]
        _mark_dirty(g, links, dirty, link)


def _fill(
    g: Graph,
    tasks: Tasks,
    links: Links,
    seats: Seats,
    events: Heaps,
    held: Heaps,
    dirty: Heaps,
    n_joined: int,
    now: float,
) -> None:
    """Settle levels, let the clocks run at them, and move flows to the links that hold them now.

    Most flows are alone on their links. Of these nothing has to be settled.
    """
    n_met = 0
    for i in range(n_joined):
        flow = tasks.joined[i]
        if _is_alone(g, links, dirty, flow):
            _hold_alone(g, tasks, links, seats, events, held, flow, now)
            continue
        for hop in range(g.path_start[flow], g.path_start[flow + 1]):
            _mark_dirty(g, links, dirty, g.path_links[hop])
        tasks.joined[n_met] = flow
        n_met += 1
    n_changed, n_misheld = _settle(g, links, seats, dirty)
    for i in range(n_changed):
        link = links.changed[i]
        links.is_changed[link] = False
        _read_clock(links, link, now)
        links.pace[link] = links.level[link]
    for i in range(n_met):
        _hold(g, tasks, links, seats, events, held, tasks.joined[i], now)
    for i in range(n_misheld):
        link = links.misheld[i]
        links.is_misheld[link] = False
        for seat in range(g.link_seat_start[link], g.link_seat_start[link] + links.taken[link]):
            if _may_be_misheld(links, seats, seat, links.level[link]):
                _hold(g, tasks, links, seats, events, held, g.hop_task[seats.hop[seat]], now)
    for i in range(n_changed):
        _schedule(g, links, events, held, links.changed[i])


def _settle(g: Graph, links: Links, seats: Seats, dirty: Heaps) -> tuple[int, int]:
    """Compute the levels of dirty links, and of those that depend on them, from the lowest up.

    A link's level is at least what it is while dirty ones hold none of its flows. The lowest of all such bounds is a
    level. So it settles, and the others' bounds rise.
    Returns how many levels have changed, and how many links are misheld.
    """
    n_changed, n_misheld, highest = 0, 0, 0.0
    width = seats.width[0]
    while dirty.size[0] > 0:
        link = dirty.items[0]
        level, is_misheld = _level(g, links, seats, link, dirty.key[0])
        _remove(dirty, 0, link)
        if dirty.size[0] > 0 and level > dirty.key[0]:
            _set_key(dirty, 0, link, level)
            continue
        if is_misheld and not links.is_misheld[link]:
            links.is_misheld[link] = True
            links.misheld[n_misheld] = link
            n_misheld += 1
        before = links.before[link]
        is_same = level == before or abs(level - before) <= SAME_LEVEL * min(before, level)
        if is_same:
            level = before
        links.level[link] = links.clean_level[link] = level
        links.turn[0] += 1
        links.settled[link] = links.turn[0]
        if is_same and level >= highest:
            continue
        if not is_same and not links.is_changed[link]:
            links.is_changed[link] = True
            links.changed[n_changed] = link
            n_changed += 1
        highest = max(highest, level)
        first = g.link_seat_start[link]
        last = first + links.taken[link]
        lower = min(before, level)
        n_beside = _above(links.clean_level, seats.others, first * width, last * width, lower, links.beside)
        for i in range(n_beside):
            other = links.beside[i]
            # Those that have settled since this link was marked took it for higher than they are, others for `before`.
            since = links.settled[other] > links.marked[link]
            if (since and links.level[other] > level) or not (since or is_same):
                _mark_dirty(g, links, dirty, other)
    return n_changed, n_misheld


def _mark_dirty(g: Graph, links: Links, dirty: Heaps, link: int) -> None:
    """Have the level of a link computed again, unless it never changes."""
    if links.clean_level[link] > 0.0:
        links.clean_level[link] = 0.0
        links.before[link] = links.level[link]
        links.level[link] = np.inf
        links.marked[link] = links.turn[0]
        _set_key(dirty, 0, link, g.link_bytes_per_s[link] / max(links.taken[link], 1))


def _level(g: Graph, links: Links, seats: Seats, link: int, guess: float) -> tuple[float, bool]:
    """The level of a link, given the levels of all others, and whether it is misheld.

    What the flows take of a link is a concave, piecewise linear function of its level. From any guess, Newton's method
    steps to the level or below it, and from there up to it.
    """
    is_below = False
    first, last = g.link_seat_start[link], g.link_seat_start[link] + links.taken[link]
    while first < last:
        taken_bytes_per_s, rising_load, highest, lowest, wrong = _used(
            links.level, seats.others, seats.load, seats.is_held, first, last, seats.width[0], guess
        )
        spare = g.link_bytes_per_s[link] - taken_bytes_per_s
        if rising_load == 0.0:
            if spare >= -SAME_LEVEL * g.link_bytes_per_s[link]:
                return np.inf, wrong > 0
            if is_below:  # by rounding
                return guess, True
            guess = 0.0
            continue
        level = spare / rising_load
        if highest <= level <= lowest:
            return level, wrong > 0
        if is_below and level <= guess:  # by rounding
            return guess, True
        guess, is_below = max(level, 0.0), True
    return np.inf, False


def _used(
    level: Floats, others: Ints, loads: Floats, is_held: Floats, first: int, last: int, width: int, guess: float
) -> tuple[float, float, float, float, float]:
    """Sum up the rates of the flows in some seats if the level of their link is `guess`.

    Returns (bytes/s of those that other links hold to less, the load of the rest, the highest rate of the former, the
    lowest that others leave the latter, how many are misheld).
    """
    taken_bytes_per_s, rising_load, highest, lowest, right = 0.0, 0.0, 0.0, np.inf, 0.0
    most, place = min(guess, FINITE), first * width
    for seat in range(first, last):
        # Written out: plain Python would call a function for each seat.
        rate = min(level[others[place]], FINITE)
        for i in range(place + 1, place + width):
            rate = min(rate, level[others[i]])
        place += width
        # 1 if rate < guess, else 0. A branch, which a processor can't predict here, takes several times as long.
        is_elsewhere = min(max((most - rate) * FINITE, 0.0), 1.0)
        taken_bytes_per_s += loads[seat] * (rate * is_elsewhere)
        rising_load += loads[seat] * (1.0 - is_elsewhere)
        highest = max(highest, rate * is_elsewhere)
        lowest = min(lowest, rate + FINITE * is_elsewhere)
        right += (is_elsewhere - is_held[seat]) ** 2
    return taken_bytes_per_s, rising_load, highest, lowest, last - first - right


def _above(clean_level: Floats, others: Ints, first: int, last: int, lower: float, found: Ints) -> int:
    """Put those of the other links whose level is above `lower` into `found`. Returns how many they are."""
    n_found = 0
    for i in range(first, last):
        found[n_found] = others[i]
        n_found += clean_level[others[i]] > lower
    return n_found


def _may_be_misheld(links: Links, seats: Seats, seat: int, level: float) -> bool:
    """Whether the link of a seat, which has that level, holds a flow that another link of its path has a lower one for,
    or may have to hold one that it doesn't. A tie with the only other link leaves the flow where it is.
    """
    lowest, second, first = np.inf, np.inf, seat * seats.width[0]
    for i in range(first, first + seats.width[0]):
        other = links.level[seats.others[i]]
        second = min(second, max(lowest, other))
        lowest = min(lowest, other)
    if seats.is_held[seat] > 0.0:
        return lowest < level
    return lowest > level or (lowest == level and second < np.inf)


def _read_clock(links: Links, link: int, now: float) -> None:
    if links.pace[link] < np.inf:
        links.clock_bytes[link] += links.pace[link] * (now - links.read_s[link])
    links.read_s[link] = now


def _hold(
    g: Graph, tasks: Tasks, links: Links, seats: Seats, events: Heaps, held: Heaps, flow: int, now: float
) -> None:
    """Have a flow held by a link of its path with the lowest level, and by the same one as long as it has that."""
    lowest = g.path_start[flow]
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        if links.level[g.path_links[hop]] < links.level[g.path_links[lowest]]:
            lowest = hop
    left_bytes, before = g.flow_bytes[flow], tasks.holder[flow]
    if before >= 0:
        if links.level[before] == links.level[g.path_links[lowest]]:
            return
        _read_clock(links, before, now)
        # Rounding must not leave a flow that is just about to end with less than nothing.
        left_bytes = max(held.key[held.start[before] + held.place[flow]] - links.clock_bytes[before], 0.0)
        _remove(held, before, flow)
        _schedule(g, links, events, held, before)
    for hop in range(g.path_start[flow], g.path_start[flow + 1]):
        seats.is_held[seats.of_hop[hop]] = 1.0 if hop == lowest else 0.0
    holder = g.path_links[lowest]
    tasks.holder[flow] = holder
    _read_clock(links, holder, now)
    if held.size[holder] == 0:
        links.clock_bytes[holder] = 0.0
    _set_key(held, holder, flow, links.clock_bytes[holder] + left_bytes)
    _schedule(g, links, events, held, holder)


def _schedule(g: Graph, links: Links, events: Heaps, held: Heaps, link: int) -> None:
    """Set the time of the next end of a flow that a link holds."""
    event = g.counts[TASKS] + link
    if held.size[link] > 0:
        left_bytes = held.key[held.start[link]] - links.clock_bytes[link]
        _set_key(events, 0, event, links.read_s[link] + max(left_bytes, 0.0) / links.pace[link])
    elif events.place[event] >= 0:
        _remove(events, 0, event)


def _set_key(heaps: Heaps, heap: int, item: int, key: float) -> None:
    """Insert the item, or move it."""
    place = heaps.place[item]
    if place < 0:
        place = heaps.size[heap]
        heaps.size[heap] += 1
    _sift(heaps, heap, item, key, place)


def _remove(heaps: Heaps, heap: int, item: int) -> None:
    place = heaps.place[item]
    heaps.place[item] = -1
    heaps.size[heap] -= 1
    if place < heaps.size[heap]:
        last = heaps.start[heap] + heaps.size[heap]
        _sift(heaps, heap, heaps.items[last], heaps.key[last], place)


def _sift(heaps: Heaps, heap: int, item: int, key: float, place: int) -> None:
    """Put the item where it belongs, given that `place` is free and all others are in order."""
    start, size = heaps.start[heap], heaps.size[heap]
    while place > 0:
        above = (place - 1) // 2
        other_key = heaps.key[start + above]
        if other_key <= key:
            break
        other = heaps.items[start + above]
        heaps.items[start + place], heaps.key[start + place] = other, other_key
        heaps.place[other] = place
        place = above
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and heaps.key[start + below + 1] < heaps.key[start + below]:
            below += 1
        other_key = heaps.key[start + below]
        if key <= other_key:
            break
        other = heaps.items[start + below]
        heaps.items[start + place], heaps.key[start + place] = other, other_key
        heaps.place[other] = place
        place = below
    heaps.items[start + place], heaps.key[start + place] = item, key
    heaps.place[item] = place


CALLED_BY_RUN = (
    _find_followers,
    _start,
    _finish,
    _join,
    _is_alone,
    _hold_alone,
    _leave,
    _fill,
    _settle,
    _mark_dirty,
    _level,
    _may_be_misheld,
    _read_clock,
    _hold,
    _schedule,
    _set_key,
    _remove,
    _sift,
    _used,
    _above,
)
LOOPS = (_used, _above)
"""Functions that are given the arrays they need, which processors run faster without all the others about."""
