"""The fastest of some records of one attention, what is as fast, and the bytes that a record sends beside a bound."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from sp_bench.analysis.number import Number, derived, of_record, step_ms
from sp_bench.point.backing import TELLING
from sp_bench.records import Record

Name = TypeVar("Name", bound=Hashable)
UNITS = {"ms": 1.0, "s": 1e3}
"""Milliseconds of a unit."""


@dataclass(frozen=True)
class Winner:
    """The fastest record of one attention, and others in the order of their times."""

    record: Record
    others: tuple[Record, ...]

    @property
    def second(self) -> Record | None:
        """The fastest of the others; None if there is none."""
        return next(iter(self.others), None)

    @property
    def step(self) -> Number:
        """The time of the fastest in ms."""
        return step_ms(self.record)

    @property
    def margin(self) -> Number:
        """The additional time of the second, as a share of the fastest time."""
        if self.second is None:
            return Number(None, "simulated", self.step.sources, "no other method can be served")
        return derived(lambda b, a: b / a - 1, step_ms(self.second), self.step)

    def within(self, share: float) -> tuple[Record, ...]:
        """The others whose time is less than a share above the fastest."""
        return tuple(record for record in self.others if step(record) < (1 + share) * self.step.known)


def step(record: Record) -> float:
    """The time of a step in ms; infinite where there is none."""
    return record.step_ms_median if record.status == "ok" and record.step_ms_median else float("inf")


def by_time(records: Iterable[Record]) -> list[Record]:
    """The records that are ok, the fastest first."""
    return sorted((record for record in records if record.status == "ok"), key=step)


def as_fast(times: Mapping[Name, float]) -> list[Name]:
    """The names of the shortest time and of those that simulations don't tell from it (backing.TELLING), in order."""
    least = min(times.values())
    return [name for name, time in times.items() if time <= (1 + TELLING) * least]


def by_method(records: Mapping[str, Record], unit: str = "ms", digits: int = 3) -> dict[str, str]:
    """The cells of a row: every method's simulated step, the fastest ones, and the bound of the first."""
    times = {name: record.step_ms_median / UNITS[unit] for name, record in records.items() if record.step_ms_median}
    row = {f"{name}, {unit}": f"{times[name]:.3g}" if name in times else "-" for name in records}
    if not times:
        return row | {"fastest": "-", f"its bound, {unit}": "-"}
    first = records[min(times, key=lambda name: times[name])]
    bound = (first.bound_ms or 0.0) / UNITS[unit]
    return row | {
        "fastest": ", ".join(as_fast(times)),
        f"its bound, {unit}": f"{bound:.{digits}g}, by {first.bound_by}",
    }


def payload(record: Record) -> Number:
    """The bytes that a GPU sends, without the lse."""
    return of_record(record, "comm_bytes_per_gpu").minus(of_record(record, "comm_bytes_statistics"))


def payload_over_bound(record: Record, field: str = "comm_bytes_lower_bound") -> Number:
    """The bytes of a GPU without the lse, over a bound: the fewest that a method with the same head split can send."""
    bound = of_record(record, field)
    if not bound.value:
        sent = of_record(record, "comm_bytes_per_gpu")
        return Number(None, "computed", sent.sources, record.error or "the bound is zero")
    return payload(record).over(bound)
