"""Messages between shaped hosts whose ranks compute meanwhile, as in executions. Runs on every rank of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import mean, variance

import torch.distributed as dist

from sp_bench.calibrating.links import Message, beside_blocks, block_clock, mean_s, messages_lasting
from sp_bench.calibrating.setting import SPREAD_BLOCKS, Exchanges, Samples, Setting
from sp_bench.measure.pool import report
from sp_bench.run.streams import lane_threads
from sp_bench.run.transport import GlooTransport

IN_A_ROW = 4
"""Messages for each repetition; at least so many where blocks are counted beside them."""


def measure_exchanges(setting: Setting, ranks_per_host: int) -> Exchanges:
    """What this rank sees while every rank sends to the next host. The first repetition is a warm-up and dropped."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), Exchanges()
    transport, block_s = GlooTransport(dist.group.WORLD), block_clock(setting, min(setting.sizes))
    ring = (rank + ranks_per_host) % n, (rank - ranks_per_host) % n
    messages = {size: Message(transport, size) for size in setting.exchange_bytes}
    for repetition in range(1 + setting.repetitions):
        kept = found if repetition else Exchanges()
        if rank == 0:
            kept.alone_blocks_per_s.append(_per_s(block_s, setting.crowd_s / n))
        dist.barrier()
        kept.crowded_blocks_per_s.append(_per_s(block_s, setting.crowd_s))
        dist.barrier()
        for size, message in messages.items():
            report((repetition, size))
            exchange_s = partial(mean_s, message.exchange, *ring)
            with lane_threads(1) as lane:  # as in an execution; the main thread may wait long for its turn
                idle_s = lane.submit(exchange_s, times=IN_A_ROW).result()
            dist.barrier()
            counted = size in (min(messages), max(messages))
            times = messages_lasting(setting.crowd_s, idle_s, least=IN_A_ROW) if counted else IN_A_ROW
            beside_s, blocks_s = beside_blocks(block_s, partial(exchange_s, times=times))
            dist.barrier()
            kept.idle_s.setdefault(size, []).append(idle_s)
            kept.beside_s.setdefault(size, []).append(beside_s)
            if counted:
                per_s = len(blocks_s) / sum(blocks_s) if blocks_s else 0.0
                kept.beside_blocks_per_s.setdefault(size, []).append(per_s)
            if size == max(messages):
                kept.beside_spread += spread(blocks_s)
    return found


def spread(blocks_s: Samples) -> Samples:
    """[variance over the mean's square] of the time of SPREAD_BLOCKS in a row; [] of fewer than three such times."""
    rows = len(blocks_s) // SPREAD_BLOCKS
    times_s = [sum(blocks_s[SPREAD_BLOCKS * row :][:SPREAD_BLOCKS]) for row in range(rows)]
    return [variance(times_s) / mean(times_s) ** 2] if rows >= 3 else []


def _per_s(call: Callable[[], object], seconds: float) -> float:
    """How many calls a second there are in so many seconds."""
    started, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        call()
        calls += 1
    return calls / passed
