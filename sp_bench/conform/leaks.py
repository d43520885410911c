"""Checks of memory, in ranks: what a subject keeps from call to call. As in checks.py, a text says what is wrong."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import torch

from sp_bench.conform.stage import Inputs, Stage
from sp_bench.machine import give_back_memory
from sp_bench.measure.memory import resident_bytes
from sp_bench.run.groups import gathered

WARM_UP, CALLS = 3, 5
"""Calls before memory is read, and in a round. An allocator may grow once; a leak grows in every round."""
NEW_SHAPES = 16
"""Calls in a round where each has a new shape. Keeping what belongs to so many shapes is no leak."""
ROUNDS = 8
"""At most, until one adds little: caches of a bounded size fill up over several rounds."""
STRIDE = 13
"""Between the lengths of calls that follow each other, in steps of the length."""
SMALLEST_LEAK_BYTES = 100_000
"""Tensors below this size don't show in the resident memory of a process."""


def memory(stage: Stage) -> str:
    """Resident memory doesn't grow from call to call, in each of several rounds."""
    local = stage.local(stage.inputs())

    def call(_: int) -> int:
        stage.backward(*stage.forward(local), local.dout)
        return local.q.nbytes

    return _growth(stage, call, CALLS, "call")


def memory_of_shapes(stage: Stage) -> str:
    """The same over calls that each have another length, and with it other documents if there are some.

    Lengths follow each other without a trend: buffers of the last few, or of the longest, don't grow with them.
    """
    count = WARM_UP + ROUNDS * NEW_SHAPES
    assert math.gcd(count, STRIDE) == 1, "each length once"
    cases = [stage.case.simpler(tokens=stage.case.tokens + 2 * (STRIDE * number % count)) for number in range(count)]
    longest = max(other.seqlen for other in cases)
    heads = (stage.case.heads, stage.case.kv_heads, stage.case.kv_heads, stage.case.heads)
    dtype = stage.inputs().q.dtype
    whole = [torch.randn(stage.case.batch, longest, h, stage.case.head_dim).to(dtype) for h in heads]

    def call(number: int) -> int:
        other = cases[number]
        instance = stage.instance.at(other) if stage.instance.at else stage.another(other)
        local = Inputs(*(instance.shard(x[:, : other.seqlen]) for x in whole))
        stage.backward(*stage.forward(local, instance.attend), local.dout)
        return local.q.nbytes

    return _growth(stage, call, NEW_SHAPES, "new shape")


def _growth(stage: Stage, call: Callable[[int], int], calls: int, each: str) -> str:
    """Describe growth by half of q or more in each call of every round; tensors that are too small to tell are never
    wrong.

    `call` gets its number and returns the bytes of its q. No more rounds follow once each rank had one that holds.
    """
    _, before = _memory_after(call, range(WARM_UP))
    text, holds = "", False
    for first in range(WARM_UP, WARM_UP + ROUNDS * calls, calls):
        q_bytes, now = _memory_after(call, range(first, first + calls))
        growth, before = (now - before) / calls, now
        holds = holds or q_bytes < SMALLEST_LEAK_BYTES or growth <= q_bytes / 2
        text = f"memory grows by {growth / 1e3:,.0f} kB with each {each}, whose q has {q_bytes / 1e3:,.0f} kB"
        if all(gathered(holds, stage.group)):
            break
    return "" if holds else text


def _memory_after(call: Callable[[int], int], numbers: range) -> tuple[int, int]:
    """Bytes of q in the mean of some calls, and resident bytes after them."""
    q_bytes = sum(map(call, numbers)) // len(numbers)
    gc.collect()
    give_back_memory()
    return q_bytes, resident_bytes("VmRSS")
