"""How many copies all-to-alls take: as many for few members as for many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.run.engine import Engine
from sp_bench.run.transport import AloneTransport
from tests.support.problems import splittable_problem


class Copies(TorchDispatchMode):
    """Counts copies between tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "copy_"
        return func(*args, **(kwargs or {}))


def copies(n: int, method: str, batch: int) -> int:
    """Those of a forward and a backward of rank 1 of n."""
    chosen = build(method, {})
    problem = chosen.assigned(replace(splittable_problem(n), heads=16, kv_heads=16, batch=batch))
    chosen = chosen.candidates(problem)[0]
    plans = {phase: chosen.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    engine = Engine(plans, problem, "auto", torch.device("cpu"), rank=1, transport=AloneTransport())
    q, k, v, dout = (torch.randn(batch, problem.queries.tokens(1), 16, problem.head_dim) for _ in range(4))
    with Copies() as counted:
        _, saved = engine.forward(q, k, v)
        engine.backward(dout, saved)
    engine.close()
    return counted.count


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", ["ulysses"])
def test_pieces_alike_are_copied_at_once(method: str, batch: int) -> None:
    few, many = (copies(n, method, batch) for n in (4, 8))
    assert 0 < many == few
