"""The variants of a method that no other one beats in both peak memory and simulated time."""

from __future__ import annotations

from typing import NamedTuple

from sp_bench import account
from sp_bench.plan.method import Method
from sp_bench.point.backing import validated
from sp_bench.point.choose import Choice, simulated, variants
from sp_bench.point.request import Request
from sp_bench.records.interval import Interval


class Traded(NamedTuple):
    """A variant of a method on the front of memory against time."""

    variant: str
    layout: str
    peak_bytes: int
    interval: Interval
    """The simulated step and its interval, in ms."""


def memory_front(request: Request) -> list[Traded]:
    """The variants that no other one beats in both peak memory and simulated time, the leanest first.

    They are those that the request's options stand for, and the method's `leaner` ones.
    """
    assert isinstance(request.method, Method), "a peer has no plans to choose among"
    by_peak: list[tuple[int, Choice]] = []
    for one in variants(request, (request.method, *request.method.leaner())):
        choice = simulated(one, request.cluster.even)
        by_peak.append((account.peak_bytes(choice.plans.values(), choice.problem, request.cluster.transport), choice))
    front: list[Traded] = []
    for peak, one in sorted(by_peak, key=lambda each: (each[0], each[1].total_s)):
        if not front or one.total_s * 1e3 < front[-1].interval.step_ms:
            ends = validated(request, one).around(one.total_s * 1e3)
            front.append(Traded(one.variant, one.problem.layout.name, peak, ends))
    return front
