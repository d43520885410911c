"""The rates of links between ranks, a pair at a time: over NCCL between GPUs, over gloo between CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sp_bench.measure.devices import device_here, transport_here
from sp_bench.measure.pool import report
from sp_bench.plan.ops import Plan
from sp_bench.run.devices import clock_of
from sp_bench.run.transport import Transport, Turn

TINY_BYTES = 4
TRIES = 3
"""Repetitions of each message; the fastest counts, as other work can only slow it down."""
COUNTED_AS = (("pairs", "message", "message"),)


@dataclass(frozen=True, kw_only=True)
class PairRate:
    """A link between two ranks, used in both directions at once."""

    a: int
    b: int
    bytes_per_s: float
    """The rate of one direction."""
    latency_s: float
    lane: int = 0


def pair_rates(
    plans: Mapping[str, Plan], pairs: list[tuple[int, int]], message_bytes: int, lanes: int = 1
) -> list[PairRate]:
    """The rates that this rank measured as the first of a pair, a pair and a lane at a time. All ranks must call it.

    `plans` have as many lanes, each of them with messages among all ranks.
    """
    transport, rank, rates = transport_here(plans), dist.get_rank(), []
    for lane, (a, b) in ((lane, pair) for lane in range(lanes) for pair in pairs):
        report((lane, a, b), connecting=True)
        dist.barrier()
        if rank in (a, b):
            peer = b if rank == a else a
            latency_s = _exchange_s(transport, lane, peer, TINY_BYTES, times=20)
            seconds = _exchange_s(transport, lane, peer, message_bytes, times=3)
            if rank == a:
                rates.append(PairRate(a=a, b=b, bytes_per_s=message_bytes / seconds, latency_s=latency_s, lane=lane))
    dist.barrier()
    return rates


def _exchange_s(transport: Transport, lane: int, peer: int, message_bytes: int, times: int) -> float:
    """The time of one exchange with a peer, the best mean of a few tries. The first exchange opens the connection."""
    device = device_here()
    clock, tries = clock_of(device), []
    ours, theirs = (torch.zeros(message_bytes // 4, device=device) for _ in range(2))
    for attempt in range(1 + TRIES):
        clock.synchronize()
        start = clock.mark()
        for _ in range(times if attempt else 1):
            transport.exchange(Turn(lane, 0), [(peer, (theirs,))], [(peer, (ours,))], COUNTED_AS)
        end = clock.mark()
        clock.synchronize()
        tries.append(clock.seconds(start, end) / times)
    return min(tries[1:])
