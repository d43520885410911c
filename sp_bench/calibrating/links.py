"""Time messages between ranks, over the transport that executions use. Runs on every rank of a pool."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import TypeVar

import torch
import torch.distributed as dist

from sp_bench.calibrating.clock import CLOCKS
from sp_bench.calibrating.kernels import kernel_for, random
from sp_bench.calibrating.setting import Links, Samples, Setting
from sp_bench.measure.pool import report
from sp_bench.plan.regions import RegionKind
from sp_bench.run.gloo import GlooTransport
from sp_bench.run.streams import lane_threads
from sp_bench.run.transport import Turn

TINY_BYTES = 4
MESSAGES = 20
"""The number of tiny messages in each repetition, and the fewest large ones beside blocks."""
BLOCKS_BESIDE = 4
"""The number of blocks that large messages beside them last for, at least."""
MOST_MESSAGES = 200
ROUNDS = 4
"""Rounds of messages in each repetition: messages are shorter than blocks, and vary more."""
T = TypeVar("T")
COUNTED_AS = (("calibrate", "message", "message"),)


def measure_links(setting: Setting) -> Links:
    """The times this rank measures, among two ranks or more. The first repetition is a warm-up and is dropped."""
    rank, n, links = dist.get_rank(), dist.get_world_size(), Links()
    transport = GlooTransport(dist.group.WORLD)
    tiny, large = (Message(transport, size) for size in (TINY_BYTES, setting.message_bytes))
    for repetition in range(1 + ROUNDS * setting.repetitions):
        report(repetition)
        kept = links if repetition else Links()
        dist.barrier()
        if rank < 2:
            kept.pair_tiny_s.append(mean_s(tiny.to_and_fro, rank) / 2)
            kept.pair_large_s.append(mean_s(large.to_and_fro, rank, times=2) / 2)
        dist.barrier()
        kept.ring_tiny_s.append(mean_s(tiny.exchange, (rank + 1) % n, (rank - 1) % n))
        dist.barrier()
        kept.ring_large_s.append(mean_s(large.exchange, (rank + 1) % n, (rank - 1) % n, times=2))
        dist.barrier()
        _blocks_beside_transfers(setting, large, kept)
    return links


def mean_s(call: Callable[..., object], *arguments: int, times: int = MESSAGES) -> float:
    """The mean time of `times` consecutive calls."""
    started = time.perf_counter()
    for _ in range(times):
        call(*arguments)
    return (time.perf_counter() - started) / times


class Message:
    """A message of `size` bytes, with buffers to send and to receive it."""

    def __init__(self, transport: GlooTransport, size: int, lane: int = 0) -> None:
        self._transport, self._turn = transport, Turn(lane, 0)  # nothing is posted ahead
        self._out, self._into = (torch.zeros(size // 4, dtype=torch.float32) for _ in range(2))

    def exchange(self, target: int, source: int) -> float:
        """Send to one rank and receive from another at once. Return the time of time.perf_counter() at the arrival."""
        came = self._transport.receive(self._turn, source, (self._into,))
        gone = self._transport.send(self._turn, target, (self._out,), COUNTED_AS)
        for work in came:
            work.wait()
        ended = time.perf_counter()
        for work in gone:
            work.wait()
        return ended

    def to_and_fro(self, rank: int) -> None:
        """Send the message from rank 0 to rank 1 and back."""
        for sender in (0, 1):
            if rank == sender:
                works = self._transport.send(self._turn, 1 - rank, (self._out,), COUNTED_AS)
            else:
                works = self._transport.receive(self._turn, 1 - rank, (self._into,))
            for work in works:
                work.wait()


def _blocks_beside_transfers(setting: Setting, message: Message, links: Links) -> None:
    """Time a block alone, and while a lane exchanges messages, on all ranks at once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    block_s = block_clock(setting, setting.sizes[len(setting.sizes) // 2])
    links.alone_s.append(mean([block_s() for _ in range(4)]))
    dist.barrier()
    exchange_s = partial(mean_s, message.exchange, (rank + 1) % n, (rank - 1) % n)
    times = messages_lasting(BLOCKS_BESIDE * links.alone_s[-1], exchange_s(times=2), least=MESSAGES)
    _, beside = beside_blocks(block_s, partial(exchange_s, times=times))
    dist.barrier()
    if beside:
        links.beside_s.append(mean(beside))


def block_clock(setting: Setting, tokens: int) -> Callable[[], float]:
    """A function that runs a full block of so many tokens and returns its time."""
    kernel, clock = kernel_for(setting, setting.dtypes[0]), CLOCKS[setting.device]
    heads = (setting.heads, setting.kv_heads, setting.kv_heads)
    block = [random(setting, tokens, setting.dtypes[0], heads=count) for count in heads]
    return lambda: clock(kernel.forward, *block, RegionKind.FULL)[0]


def messages_lasting(seconds: float, message_s: float, *, least: int) -> int:
    """The number of messages that last for `seconds`, between `least` and MOST_MESSAGES, the same on all ranks."""
    wanted = torch.tensor(seconds / message_s)
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
    return min(max(least, math.ceil(float(wanted))), MOST_MESSAGES)


def beside_blocks(block_s: Callable[[], float], call: Callable[[], T]) -> tuple[T, Samples]:
    """The result of a call in a lane's thread, and the times of the blocks that this rank computes meanwhile.

    The last block is left out: it may have outlasted the call.
    """
    with lane_threads(1) as lane:
        called = lane.submit(call)
        beside: Samples = []
        while not called.done():
            beside.append(block_s())
        return called.result(), beside[:-1]
