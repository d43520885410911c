"""A graph of tasks, as the flow solver takes it (simulate.flows), and when its tasks ran. Graphs are checked when they
are made, and are not looked over again when they are solved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
ROW = ("C", "A", "W")
"""The machine code reads memory in one piece."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGraph:
    """T tasks, each a pure delay or a flow, the order between them, and L links.

    Arrays are converted to the type given, and copied only where that needs it. ValueError names the field and the
    value where a shape does not fit, a number is negative, NaN or out of its range, an id does not exist, a pure delay
    has a path, or a flow has neither a path nor a finite rate cap.
    """

    delay_s: Floats
    """[T] Seconds from ready to done for a pure delay, from ready to joining the links (latency) for a flow."""
    flow_bytes: Floats
    """[T] Bytes to move. 0 makes the task a pure delay."""
    path_start: NDArray[np.int32]
    """[T+1] Where each task's links begin in path_links; the last entry is the length of path_links."""
    path_links: NDArray[np.int32]
    """Task t crosses the links path_links[path_start[t]:path_start[t+1]]."""
    path_loads: Floats
    """As path_links: what each byte takes of that link, positive, and 1 for a link that carries it once. What loads one
    link should do so within a factor of 1e9, beyond which rounding shows."""
    dep_start: NDArray[np.int32]
    """[T+1] Where each task's predecessors begin in dep_tasks; the last entry is the length of dep_tasks."""
    dep_tasks: NDArray[np.int32]
    """Task t waits for the tasks dep_tasks[dep_start[t]:dep_start[t+1]]; duplicates do no harm."""
    rate_cap: Floats
    """[T] Most bytes per second that this one flow may take; inf for no cap."""
    weight: Floats
    """[T] Positive and finite: where links are shared, a flow rises so many times as fast as one of weight 1."""
    link_bytes_per_s: Floats
    """[L] Positive and finite."""

    def __post_init__(self) -> None:
        for name in ("delay_s", "flow_bytes", "link_bytes_per_s"):
            object.__setattr__(self, name, _as_array(name, getattr(self, name), np.float64))
        # Most often all loads and weights are 1 and no rate has a cap: arrays without memory of their own.
        for name in ("path_loads", "rate_cap", "weight"):
            value = _checked(name, getattr(self, name), np.float64).astype(np.float64, copy=False)
            object.__setattr__(self, name, value)
        tasks = self.delay_s.size
        for name in ("flow_bytes", "rate_cap", "weight"):
            _check_size(name, getattr(self, name), tasks)

        non_negative, positive = "must be finite and not negative", "must be finite and positive"
        _check_all("delay_s", self.delay_s, np.isfinite(self.delay_s) & (self.delay_s >= 0), non_negative)
        _check_all("flow_bytes", self.flow_bytes, np.isfinite(self.flow_bytes) & (self.flow_bytes >= 0), non_negative)
        _check_all("rate_cap", self.rate_cap, self.rate_cap > 0, "must be positive (inf for no cap)")
        _check_all("weight", self.weight, np.isfinite(self.weight) & (self.weight > 0), positive)
        rates = self.link_bytes_per_s
        _check_all("link_bytes_per_s", rates, np.isfinite(rates) & (rates > 0), positive)

        self._set_lists("path_start", "path_links", tasks, ids=rates.size)
        loads = self.path_loads
        _check_size("path_loads", loads, self.path_links.size)
        _check_all("path_loads", loads, np.isfinite(loads) & (loads > 0), positive)
        self._set_lists("dep_start", "dep_tasks", tasks, ids=tasks)
        hops, is_flow = np.diff(self.path_start), self.flow_bytes > 0
        _check_all("flow_bytes", self.flow_bytes, is_flow | (hops == 0), "a task without bytes must have no path")
        bounded = ~is_flow | (hops > 0) | np.isfinite(self.rate_cap)
        _check_all("rate_cap", self.rate_cap, bounded, "a flow without a path needs a finite cap")

    def _set_lists(self, start_name: str, ids_name: str, tasks: int, ids: int) -> None:
        """Check and store one list of ids below `ids` for each task (a CSR pair)."""
        starts = _as_array(start_name, getattr(self, start_name), np.int32)
        members = _checked(ids_name, getattr(self, ids_name), np.int32)
        _check_size(start_name, starts, tasks + 1)
        _check_all(start_name, starts, np.diff(starts, prepend=0) >= 0, "must not decrease, from 0 on")
        if starts[0] != 0 or starts[-1] != members.size:
            raise ValueError(f"{start_name} runs from {starts[0]} to {starts[-1]}: must be 0 to {members.size}")
        _check_all(ids_name, members, (members >= 0) & (members < ids), f"must be an id from 0 to {ids - 1}")
        object.__setattr__(self, start_name, starts)
        object.__setattr__(self, ids_name, np.require(members, np.int32, ROW))


@dataclass(frozen=True, kw_only=True, eq=False)
class Timing:
    """When each task ran, in seconds from the start of the graph."""

    start_s: Floats
    """[T] When the last predecessor was done; for a flow, when both its ends have posted it."""
    finish_s: Floats
    """[T] When the delay was over, or the last byte had left."""

    @property
    def makespan_s(self) -> float:
        """The last completion; 0.0 for an empty graph."""
        return float(self.finish_s.max(initial=0.0))


def starts(*counts: NDArray[Any]) -> NDArray[np.int32]:
    """The first entry of each one that has so many of them, and the end of the last one's. Several arrays of counts
    are one, end to end.
    """
    first = np.zeros(sum(each.size for each in counts) + 1, np.int32)
    if counts:
        np.concatenate(counts, out=first[1:], casting="same_kind")
        np.cumsum(first, out=first)
    return first


def _as_array(name: str, value: ArrayLike, dtype: type) -> NDArray[Any]:
    """The values with this type, as `_checked` has them."""
    return np.require(_checked(name, value, dtype), dtype, ROW)


def _checked(name: str, value: ArrayLike, dtype: type) -> NDArray[Any]:
    """The values in one dimension, of a type that converts to this one."""
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: must have one dimension")
    kinds = "iu" if issubclass(dtype, np.integer) else "iuf"
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"{name} has type {array.dtype}: must convert to {np.dtype(dtype)} without loss")
    return array


def _check_size(name: str, array: NDArray[Any], size: int) -> None:
    if array.size != size:
        raise ValueError(f"{name} has {array.size} entries: must have {size}")


def _check_all(name: str, array: NDArray[Any], good: NDArray[np.bool_], rule: str) -> None:
    if not good.all():
        first = int(np.argmin(good))
        raise ValueError(f"{name}[{first}] is {array[first]}: {rule}")
