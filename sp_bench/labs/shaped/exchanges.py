"""Time messages between shaped hosts while their ranks compute. Runs on every rank of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import mean, variance

import torch
import torch.distributed as dist

from sp_bench.calibrating.kernels import kernel_for
from sp_bench.calibrating.links import Message, beside_blocks, block_clock, mean_s, messages_lasting
from sp_bench.calibrating.setting import Samples, Setting
from sp_bench.labs.shaped.samples import SPREAD_BLOCKS, Exchanges, Pace, middle
from sp_bench.measure.pool import report
from sp_bench.plan.groups import DOWN, Group
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.ops import Chunk, Plan, Steps
from sp_bench.plan.patterns import receive_next
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV
from sp_bench.run.buffers import Buffers
from sp_bench.run.executor import Action, Executor
from sp_bench.run.gloo import GlooTransport
from sp_bench.run.groups import own_group, timeout_of, world
from sp_bench.run.streams import lane_threads
from sp_bench.run.transport import Call, begin

TIMED = 8
"""The number of messages, or pairs of them, in each repetition; beside blocks at least that many."""
ALL_TO_ALLS = 8
"""The number of all-to-alls in each repetition, two at a time."""
MOST_HOPS = 4
"""The most hops of an execution with the longest messages."""


def measure_exchanges(setting: Setting, pace: Pace, ranks_per_host: int, pause_s: float, limited: bool) -> Exchanges:
    """The times this rank measures while every rank sends to the next host. The first repetition is dropped.

    Timed messages start on links that were idle for `pause_s`. If links are not `limited`, only the times of messages
    are measured.
    """
    rank, n, exchanges = dist.get_rank(), dist.get_world_size(), Exchanges()
    transport, block_s = GlooTransport(dist.group.WORLD), block_clock(setting, min(setting.sizes))
    ring = (rank + ranks_per_host) % n, (rank - ranks_per_host) % n
    messages = {size: Message(transport, size) for size in pace.message_bytes}
    short, long = min(messages), max(messages)
    pairs = Pairs(transport, middle(pace.message_bytes), ranks_per_host)
    all_to_alls = AllToAlls(short, ranks_per_host) if limited and n >= 2 * ranks_per_host else None
    sizes = sorted({short, long}) if limited else []
    rounds = {size: Rounds(setting, transport, size, ranks_per_host, size == long) for size in sizes}
    for repetition in range(1 + setting.repetitions):
        kept = exchanges if repetition else Exchanges()
        if rank == 0:
            kept.alone_blocks_per_s.append(_per_s(block_s, pace.crowd_s / n))
        dist.barrier()
        kept.crowded_blocks_per_s.append(_per_s(block_s, pace.crowd_s))
        dist.barrier()
        for size, message in messages.items():
            report((repetition, size))
            exchange_s = partial(_spaced_s, partial(message.exchange, *ring), pause_s)
            with lane_threads(1) as lane:  # as in an execution: the main thread may wait long for a core
                idle_s = lane.submit(exchange_s, TIMED).result()
            dist.barrier()
            times = messages_lasting(pace.crowd_s / len(messages), pause_s + idle_s, least=TIMED)
            beside_s, _ = beside_blocks(block_s, partial(exchange_s, times))
            dist.barrier()
            kept.idle_s.setdefault(size, []).append(idle_s)
            kept.beside_s.setdefault(size, []).append(beside_s)
        if limited and n >= 3 * ranks_per_host:
            report((repetition, "pairs"))
            firsts, _ = beside_blocks(block_s, pairs)
            kept.first_of_two += firsts
            dist.barrier()
        if all_to_alls:
            report((repetition, "all-to-alls"))
            with lane_threads(1) as lane:
                kept.all_to_all_s.setdefault(short, []).append(lane.submit(all_to_alls).result())
            dist.barrier()
        for size, hops in rounds.items():
            report((repetition, "rounds", size))
            in_a_row_s = pause_s + kept.idle_s[size][-1]  # without a burst
            times = messages_lasting(pace.crowd_s, hops.bytes / size * in_a_row_s, least=1)
            round_s, blocks_s = beside_blocks(block_s, partial(mean_s, hops, times=times))
            dist.barrier()
            kept.rounds_bytes_per_s.setdefault(size, []).append(hops.bytes / round_s)
            per_s = len(blocks_s) / sum(blocks_s) if blocks_s else 0.0
            kept.beside_blocks_per_s.setdefault(size, []).append(per_s)
            if size == long:
                kept.beside_spread += spread(blocks_s)
    for hops in rounds.values():
        hops.close()
    return exchanges


def _spaced_s(exchange: Callable[[], float], pause_s: float, times: int) -> float:
    """The mean time of `times` messages. All ranks start each together, after a pause."""
    taken_s = []
    for _ in range(times):
        time.sleep(pause_s)
        dist.barrier()
        started = time.perf_counter()
        exchange()
        taken_s.append(time.perf_counter() - started)
    return mean(taken_s)


class Pairs:
    """Pairs of concurrent messages, from the two hosts before this one, each in a lane of its own."""

    def __init__(self, transport: GlooTransport, size: int, ranks_per_host: int) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        self._exchanges = [
            partial(Message(transport, size, lane).exchange, (rank + far) % n, (rank - far) % n)
            for lane, far in enumerate((ranks_per_host, 2 * ranks_per_host))
        ]

    def __call__(self) -> Samples:
        """The arrival of the first message over the arrival of both, for each pair. All ranks start a pair together."""
        shares = []
        with lane_threads(2) as lanes:
            for _ in range(TIMED):
                dist.barrier()
                started = time.perf_counter()
                ends = [lanes.submit(exchange) for exchange in self._exchanges]
                first, last = sorted(end.result() - started for end in ends)
                shares.append(first / last)
        return shares


class AllToAlls:
    """The library's all-to-alls among one rank of each host, two at a time like those of K and V."""

    def __init__(self, size: int, ranks_per_host: int) -> None:
        """`size` is the number of bytes that go to each rank."""
        rank, n = dist.get_rank(), dist.get_world_size()
        hosts, members = n // ranks_per_host, range(rank % ranks_per_host, n, ranks_per_host)
        self._group = own_group(world(), members, "all-to-alls", backend="gloo", timeout=timeout_of(world()))
        received, sent = ([torch.zeros(hosts, size // 4) for _ in range(2)] for _ in range(2))
        self._call = Call("all_to_all", Group(ranks_per_host, hosts), received, sent)

    def __call__(self) -> float:
        """The mean time of an all-to-all. The group's ranks start together."""
        dist.barrier(self._group)
        started = time.perf_counter()
        for _ in range(ALL_TO_ALLS // 2):
            for work in begin(self._call, self._group):
                work.wait()
        return (time.perf_counter() - started) / ALL_TO_ALLS


class Rounds:
    """Executions that pass KV on from host to host. A hop has two messages, in a lane as in any plan."""

    def __init__(self, setting: Setting, transport: GlooTransport, size: int, ranks_per_host: int, few: bool) -> None:
        """`size` is the approximate size of a message in bytes; `few` limits the hops to MOST_HOPS."""
        n, dtype = dist.get_world_size(), "float32"
        problem = Problem(
            n=n,
            seqlen=n * max(size // (4 * setting.kv_heads * setting.head_dim), 1),
            heads=setting.heads,
            kv_heads=setting.kv_heads,
            head_dim=setting.head_dim,
            mask=FULL,
            dtype=dtype,
            layout=LAYOUTS["contiguous"],
        )
        hops = n // ranks_per_host - 1
        plan, device = round_of(n, ranks_per_host, min(hops, MOST_HOPS) if few else hops), torch.device("cpu")
        kernel, buffers = kernel_for(setting, dtype), Buffers(device, transport)
        self._execute = Executor(plan, problem, dist.get_rank(), transport, kernel, buffers, device)
        own = tuple(torch.zeros(problem.field_shape(field)) for field in KV.fields)
        self._inputs = dict.fromkeys(plan.starts_with, own)
        self.bytes = len(plan.ops) * sum(x.nbytes for x in own)
        """The bytes that a rank sends in each execution."""

    def __call__(self) -> None:
        self._execute(self._inputs, Action.COMMUNICATION)

    def close(self) -> None:
        """End its lane's thread."""
        self._execute.close()


def round_of(n: int, ranks_per_host: int, hops: int) -> Plan:
    """A plan in which every rank's KV goes to the same rank of the next hosts, one after the other."""
    kv, steps = Chunk(KV, 0, Group(ranks_per_host, n // ranks_per_host, DOWN)), Steps()
    for hop in range(hops):
        steps.next()
        steps.do(receive_next(kv, hop, lane="kv"))
    return steps.plan("forward", n, inputs=(kv,), outputs=())


def spread(blocks_s: Samples) -> Samples:
    """[variance / mean**2] of the time of SPREAD_BLOCKS consecutive blocks; [] for fewer than three times."""
    rows = len(blocks_s) // SPREAD_BLOCKS
    times_s = [sum(blocks_s[SPREAD_BLOCKS * row :][:SPREAD_BLOCKS]) for row in range(rows)]
    return [variance(times_s) / mean(times_s) ** 2] if rows >= 3 else []


def _per_s(call: Callable[[], object], seconds: float) -> float:
    """The number of calls per second, measured for so many seconds."""
    started, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        call()
        calls += 1
    return calls / passed
