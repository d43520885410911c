"""Checks of memory, in ranks: what a subject keeps from call to call. As in checks.py, a text says what is wrong."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from itertools import pairwise

import torch

from sp_bench.conform.stage import Inputs, Stage
from sp_bench.machine import give_back_memory
from sp_bench.measure.memory import resident_bytes

WARM_UP, CALLS, ROUNDS = 3, 5, 3
"""Calls before memory is read, and between readings. An allocator may grow once; a leak grows in every round."""
NEW_SHAPES, SHAPE_ROUNDS = 16, 3
"""The same where each call has a new shape. Keeping what belongs to so many shapes is no leak."""
STRIDE = 13
"""Between the lengths of calls that follow each other, in steps of the length."""
SMALLEST_LEAK_BYTES = 100_000
"""Tensors below this size don't show in the resident memory of a process."""


def memory(stage: Stage) -> str:
    """Resident memory doesn't grow from call to call, in each of several rounds."""
    local = stage.local(stage.inputs())
    growth = _growth(lambda number: stage.backward(*stage.forward(local), local.dout), CALLS, ROUNDS)
    return _too_much(growth, local.q.nbytes, "call")


def memory_of_shapes(stage: Stage) -> str:
    """The same over calls that each have another length, and with it other documents if there are some.

    Lengths follow each other without a trend: buffers of the last few, or of the longest, don't grow with them.
    """
    count = WARM_UP + SHAPE_ROUNDS * NEW_SHAPES
    assert math.gcd(count, STRIDE) == 1, "each length once"
    cases = [stage.case.simpler(tokens=stage.case.tokens + 2 * (STRIDE * number % count)) for number in range(count)]
    longest = max(other.seqlen for other in cases)
    heads = (stage.case.heads, stage.case.kv_heads, stage.case.kv_heads, stage.case.heads)
    dtype = stage.inputs().q.dtype
    whole = [torch.randn(stage.case.batch, longest, h, stage.case.head_dim).to(dtype) for h in heads]
    q_bytes: list[int] = []

    def call(number: int) -> None:
        other = cases[number]
        instance = stage.instance.at(other) if stage.instance.at else stage.another(other)
        local = Inputs(*(instance.shard(x[:, : other.seqlen]) for x in whole))
        stage.backward(*stage.forward(local, instance.attend), local.dout)
        q_bytes.append(local.q.nbytes)

    growth = _growth(call, NEW_SHAPES, SHAPE_ROUNDS)
    return _too_much(growth, sum(q_bytes) // count, "new shape")


def _growth(call: Callable[[int], object], calls: int, rounds: int) -> float:
    """Bytes that a call adds to the resident memory, in the one of `rounds` of so many `calls` that adds least."""
    marks, number = [], 0
    for count in (WARM_UP, *[calls] * rounds):
        for _ in range(count):
            call(number)
            number += 1
        gc.collect()
        give_back_memory()
        marks.append(resident_bytes("VmRSS"))
    return min(after - before for before, after in pairwise(marks)) / calls


def _too_much(growth: float, q_bytes: int, each: str) -> str:
    """Describe growth by half of q or more in each call; tensors that are too small to tell are never wrong."""
    if q_bytes < SMALLEST_LEAK_BYTES or growth <= q_bytes / 2:
        return ""
    return f"memory grows by {growth / 1e3:,.0f} kB with each {each}, whose q has {q_bytes / 1e3:,.0f} kB"
