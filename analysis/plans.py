"""Plans of simulated records, simulated again for numbers that a record doesn't keep, such as the times of steps."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np

from sp_bench import account
from sp_bench.point import resolve
from sp_bench.point.choose import choose
from sp_bench.point.variants import Choice
from sp_bench.records import Record
from sp_bench.simulate.bounds import link_bytes


def choice_of(record: Record) -> Choice:
    """The plans and simulations of a record.

    Raises ValueError for a record without a simulated time, and for one that this code does not reproduce.
    """
    if record.mode != "simulate" or record.status != "ok":
        raise ValueError(f"{record.run_id} is {record.mode}, {record.status}: it has no simulation")
    choice = _chosen(json.dumps(record.config))
    if choice.total_s * 1e3 != record.step_ms_median:
        raise ValueError(f"{record.run_id} was made by other code: {record.step_ms_median} ms, now {choice.total_s} s")
    return choice


@lru_cache(maxsize=32)
def _chosen(config: str) -> Choice:
    """The choice by a record's config as JSON text, so that each record is simulated once."""
    return choose(resolve(json.loads(config)))


def step_ends_ms(record: Record) -> list[float]:
    """The end of each step of the forward's plan in ms: when the last rank has computed and sent all of it."""
    choice = choice_of(record)
    plan, run = choice.plans["forward"], choice.runs["forward"]
    ends = np.zeros(max(plan.steps) + 1)
    for rank in range(plan.n):
        for item, span in zip(run.graph.items, run.spans(rank), strict=True):
            last = item.what if isinstance(item.what, int) else item.what.ops[-1]
            ends[plan.steps[last]] = max(ends[plan.steps[last]], span.end_s * 1e3)
    return np.maximum.accumulate(ends).tolist()


def lanes_together(record: Record, lanes: tuple[str, str]) -> tuple[float, float]:
    """The shares of the forward in which both lanes of rank 0 are busy, and in which exactly one is."""
    run = choice_of(record).runs["forward"]
    spans = run.spans(0)
    edges = np.unique([time for span in spans for time in (span.start_s, span.end_s)])
    middles, lengths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    busy = [
        np.any([(s.start_s <= middles) & (middles < s.end_s) for s in spans if s.stream == lane], axis=0)
        for lane in lanes
    ]
    both, one = (float(lengths[which].sum() / run.makespan_s) for which in (busy[0] & busy[1], busy[0] ^ busy[1]))
    return both, one


def busy_links(record: Record) -> dict[str, np.ndarray]:
    """The busy share of each link by class of links, (links,): its bytes over those of its full rate in the forward."""
    choice = choice_of(record)
    cluster = resolve(record.config or {}).cluster
    network = cluster.network(record.gpus)
    crossing = link_bytes(network, account.traffic(choice.plans["forward"], choice.problem, cluster))
    shares = crossing / network.link_bytes_per_s / choice.runs["forward"].makespan_s
    return {name: shares[network.link_class == i] for i, name in enumerate(network.first_link)}
