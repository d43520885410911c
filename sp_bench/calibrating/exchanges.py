"""Messages between shaped hosts whose ranks compute meanwhile. Runs on every rank of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import mean, variance

import torch
import torch.distributed as dist

from sp_bench.calibrating.kernels import kernel_for
from sp_bench.calibrating.links import Message, beside_blocks, block_clock, mean_s, messages_lasting
from sp_bench.calibrating.setting import SPREAD_BLOCKS, Exchanges, Samples, Setting, middle
from sp_bench.measure.pool import report
from sp_bench.plan import DOWN, FIELDS, Chunk, Group, Plan, Problem, Steps, layout_named, receive_next
from sp_bench.run.buffers import Buffers
from sp_bench.run.executor import Does, Executor
from sp_bench.run.streams import lane_threads
from sp_bench.run.transport import GlooTransport

IN_A_ROW = 8
"""Messages, or pairs of them, for each repetition."""
MOST_HOPS = 4
"""Of an execution."""


def measure_exchanges(setting: Setting, ranks_per_host: int) -> Exchanges:
    """What this rank sees while every rank sends to the next host. The first repetition is a warm-up and dropped."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), Exchanges()
    transport, block_s = GlooTransport(dist.group.WORLD), block_clock(setting, min(setting.sizes))
    ring = (rank + ranks_per_host) % n, (rank - ranks_per_host) % n
    messages = {size: Message(transport, size) for size in setting.exchange_bytes}
    pairs = Pairs(transport, middle(list(messages)), ranks_per_host)
    rounds = {size: Rounds(setting, transport, size, ranks_per_host) for size in sorted({min(messages), max(messages)})}
    for repetition in range(1 + setting.repetitions):
        kept = found if repetition else Exchanges()
        if rank == 0:
            kept.alone_blocks_per_s.append(_per_s(block_s, setting.crowd_s / n))
        dist.barrier()
        kept.crowded_blocks_per_s.append(_per_s(block_s, setting.crowd_s))
        dist.barrier()
        for size, message in messages.items():
            report((repetition, size))
            exchange_s = partial(mean_s, message.exchange, *ring, times=IN_A_ROW)
            with lane_threads(1) as lane:  # as in an execution; the main thread may wait long for its turn
                idle_s = lane.submit(exchange_s).result()
            dist.barrier()
            beside_s, _ = beside_blocks(block_s, exchange_s)
            dist.barrier()
            kept.idle_s.setdefault(size, []).append(idle_s)
            kept.beside_s.setdefault(size, []).append(beside_s)
        report((repetition, "pairs"))
        if n >= 3 * ranks_per_host:
            firsts, _ = beside_blocks(block_s, pairs)
            kept.first_of_two += firsts
            dist.barrier()
        for size, hops in rounds.items():
            report((repetition, "rounds", size))
            times = messages_lasting(setting.crowd_s, hops.messages * kept.idle_s[size][-1], least=1)
            round_s, blocks_s = beside_blocks(block_s, partial(mean_s, hops, times=times))
            dist.barrier()
            kept.rounds_bytes_per_s.setdefault(size, []).append(hops.messages * size / round_s)
            per_s = len(blocks_s) / sum(blocks_s) if blocks_s else 0.0
            kept.beside_blocks_per_s.setdefault(size, []).append(per_s)
            if size == max(rounds):
                kept.beside_spread += spread(blocks_s)
    return found


class Pairs:
    """Messages to the next host and to the one after it, both at once, each by a lane of its own."""

    def __init__(self, transport: GlooTransport, size: int, ranks_per_host: int) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        self._exchanges = [
            partial(Message(transport, size, lane).exchange, (rank + far) % n, (rank - far) % n)
            for lane, far in enumerate((ranks_per_host, 2 * ranks_per_host))
        ]

    def __call__(self) -> Samples:
        """When the first has come and gone over when both have, by pair; each begins with the last one's end."""
        found = []
        with lane_threads(2) as lanes:
            for _ in range(IN_A_ROW):
                started = time.perf_counter()
                ends = lanes.map(_ended, self._exchanges)
                first, last = sorted(end - started for end in ends)
                found.append(first / last)
        return found


def _ended(call: Callable[[], object]) -> float:
    call()
    return time.perf_counter()


class Rounds:
    """Executions in which KV goes on from host to host: each hop is of two messages, by a lane as in any plan."""

    def __init__(self, setting: Setting, transport: GlooTransport, size: int, ranks_per_host: int) -> None:
        """`size` is the bytes of a message."""
        n, dtype = dist.get_world_size(), "float32"
        tokens = size // (4 * setting.kv_heads * setting.head_dim)
        problem = Problem(
            n=n,
            seqlen=n * tokens,
            heads=setting.heads,
            kv_heads=setting.kv_heads,
            head_dim=setting.head_dim,
            causal=False,
            dtype=dtype,
            layout=layout_named("contiguous", causal=False),
        )
        plan, device = round_of(n, ranks_per_host), torch.device("cpu")
        kernel, buffers = kernel_for(setting, dtype), Buffers(problem, device)
        self._execute = Executor(plan, problem, dist.get_rank(), transport, kernel, buffers, device)
        own = tuple(torch.zeros(problem.field_shape(field)) for field in FIELDS["kv"])
        self._inputs = dict.fromkeys(plan.starts_with, own)
        self.messages = len(plan.ops) * len(own)
        """That a rank sends in each."""

    def __call__(self) -> None:
        self._execute(self._inputs, Does.COMMUNICATION)


def round_of(n: int, ranks_per_host: int) -> Plan:
    """KV of every rank goes to the rank of the same place on the next hosts, one after the other."""
    kv, steps = Chunk("kv", 0, Group(ranks_per_host, n // ranks_per_host, DOWN)), Steps()
    steps.do(*(receive_next(kv, hop, lane="kv") for hop in range(min(kv.home.size - 1, MOST_HOPS))))
    return steps.plan("forward", n, inputs=(kv,), outputs=())


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
