"""Checks of memory, in ranks: what a subject keeps from call to call. As in checks.py, a text says what is wrong."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import torch

from sp_bench.conform.case import Case
from sp_bench.conform.stage import Inputs, Stage
from sp_bench.conform.subjects import Subject
from sp_bench.measure.memory import resident_bytes

WARM_UP, CALLS, ROUNDS = 3, 5, 3
"""Calls before memory is read, and between readings. An allocator may grow once; a leak grows in every round."""
NEW_SHAPES = 16
"""Calls between readings where each has a new shape. Keeping what belongs to twice as many shapes is no leak."""
SMALLEST_LEAK_BYTES = 100_000
"""Tensors below this size don't show in the resident memory of a process."""


def memory(subject: Subject, case: Case) -> str:
    """Resident memory doesn't grow from call to call, in each of several rounds."""
    stage = Stage(subject, case)
    local = stage.local(stage.inputs())
    growth = _growth(lambda number: stage.backward(*stage.forward(local), local.dout), CALLS)
    return _too_much(growth, local.q.nbytes, "call")


def memory_of_shapes(subject: Subject, case: Case) -> str:
    """The same over calls that each have another length, and with it other documents if there are some."""
    stage = Stage(subject, case)
    longest = _longer(case, WARM_UP + ROUNDS * NEW_SHAPES)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    dtype = stage.inputs().q.dtype
    whole = [torch.randn(case.batch, longest.seqlen, h, case.head_dim).to(dtype) for h in heads]

    def call(number: int) -> None:
        other = _longer(case, number)
        instance = stage.instance.at(other) if stage.instance.at else stage.another(other)
        local = Inputs(*(instance.shard(x[:, : other.seqlen]) for x in whole))
        stage.backward(*stage.forward(local, instance.attend), local.dout)

    smallest = stage.instance.shard(whole[0][:, : case.seqlen]).nbytes
    return _too_much(_growth(call, NEW_SHAPES), smallest, "new shape")


def _longer(case: Case, number: int) -> Case:
    """The case of the call of that number: two more tokens on each rank than in the one before it."""
    return case.simpler(tokens=case.tokens + 2 * number)


def _growth(call: Callable[[int], object], calls: int) -> float:
    """Bytes that a call adds to the resident memory, in the round of so many `calls` that adds least."""
    marks, number = [], 0
    for count in (WARM_UP, *[calls] * ROUNDS):
        for _ in range(count):
            call(number)
            number += 1
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        marks.append(resident_bytes("VmRSS"))
    return min(after - before for before, after in pairwise(marks)) / calls


def _too_much(growth: float, q_bytes: int, each: str) -> str:
    """What is wrong if a call adds half of what its q has; tensors that are too small to tell are never wrong."""
    if q_bytes < SMALLEST_LEAK_BYTES or growth <= q_bytes / 2:
        return ""
    return f"memory grows by {growth / 1e3:,.0f} kB with each {each}, whose q has {q_bytes / 1e3:,.0f} kB"
