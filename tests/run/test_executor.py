"""An executor keeps nothing of a call but its times."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sp_bench.kernels import choose
from sp_bench.methods import build
from sp_bench.plan import KV, Q
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.run.buffers import Buffers
from sp_bench.run.executor import Action, Executor
from sp_bench.run.gloo import GlooTransport
from tests.support.problems import small_problem

CPU = torch.device("cpu")


@pytest.mark.parametrize("action", [Action.EVERYTHING, Action.COMPUTE], ids=lambda action: action.value)
def test_a_call_leaves_no_tensors(action: Action) -> None:
    """Tensors of a call are gone with its results, and two calls don't know of each other."""
    problem, transport = small_problem(1), GlooTransport(None)
    plan = build("ring", {}).plan(problem, "forward", COMPUTE_BOUND)
    kernel = choose("reference", "cpu", "float32", problem.head_dim)
    executor = Executor(plan, problem, 0, transport, kernel, Buffers(CPU, transport), CPU)
    readings, seen = [], []
    for _ in range(2):
        q, k, v = (torch.rand(1, 2, heads, problem.head_dim) for heads in (4, 2, 2))
        given = {Q: (q,), KV: (k, v)}
        results = executor({chunk: given[chunk.tensor] for chunk in plan.inputs}, action)
        readings.append(executor.reading())
        seen += [weakref.ref(x) for x in (q, k, v, *(x for tensors in results.values() for x in tensors))]
        del q, k, v, given, results
    gc.collect()
    assert seen and all(tensor() is None for tensor in seen)
    first, second = (reading() for reading in readings)
    assert first.caller_s > 0 < second.caller_s and first != second
    executor.close()
