"""A method is one file: one that is defined here gets run, simulate, account, check and draw with no other change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from sp_bench import account, draw
from sp_bench.check import check
from sp_bench.plan import (
    DKV,
    DQ,
    KV,
    ODOQ,
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Group,
    Method,
    O,
    Plan,
    Problem,
    Q,
    Steps,
    receive_next,
    return_home,
)
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import PlanError
from sp_bench.plan.tensors import Tensor
from sp_bench.simulate import simulate
from tests.support.clusters import cluster
from tests.support.ranks import Ranks, group_of


@dataclass(frozen=True, kw_only=True)
class GatherHome(Method):
    """All KV first, then all blocks; dKV goes straight home. Nothing overlaps, and so nobody published it."""

    name: ClassVar[str] = "gather_home"
    citation: ClassVar[str] = "this file"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "4*k*(n-1)"}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        q, kv, o = (Chunk(tensor, 0, Group(1, problem.n)) for tensor in (Q, KV, O))
        steps = Steps()
        steps.next()
        steps.do(*(receive_next(kv, s, "kv") for s in range(problem.n - 1)))
        steps.do(*(Attend(q, kv.at(s), o) for s in range(problem.n)))
        return steps.plan("forward", problem.n, (q, kv), (o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        odoq, kv, dq, dkv = (Chunk(tensor, 0, Group(1, problem.n)) for tensor in (ODOQ, KV, DQ, DKV))
        steps = Steps()
        steps.next()
        steps.do(*(receive_next(kv, s, "kv") for s in range(problem.n - 1)))
        steps.do(*(AttendBackward(odoq, kv.at(s), dq, dkv.at(s)) for s in range(problem.n)))
        for s in range(1, problem.n):
            steps.do(*return_home(dkv.at(s), "dkv"))
        return steps.plan("backward", problem.n, (odoq, kv), (dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float]:
        hops = problem.n - 1
        return {KV: hops} if phase == "forward" else {KV: hops, DKV: hops}


def problem(n: int, tokens: int = 8) -> Problem:
    layout = CAUSAL.layout("auto")
    return Problem(n=n, seqlen=tokens * n, heads=4, kv_heads=2, head_dim=64, dtype="float32", layout=layout)


@pytest.mark.parametrize("n", [1, 2, 6, 64])
def test_it_is_proven_counted_simulated_and_drawn(n: int) -> None:
    p, on = problem(n), cluster()
    for phase in PHASES:
        plan = GatherHome().plan(p, phase, COMPUTE_BOUND)
        check(plan, p)
        assert account.volume(plan, p).total_bytes == GatherHome().bytes_sent(p, phase)
        run = simulate(plan, p, on)
        assert run.makespan_s >= run.busy_s.max() > 0
        assert (np.arange(n) == draw.assignment(plan, p).T).all(), "a rank computes its row"


def test_it_is_refused_when_it_is_wrong() -> None:
    plan = GatherHome().forward(problem(3), COMPUTE_BOUND)
    lacking = Plan("forward", 3, plan.ops[:-1], plan.steps[:-1], plan.inputs, plan.outputs)
    with pytest.raises(PlanError, match="lacks its block"):
        check(lacking, problem(3))


def run_it(n: int) -> float | None:
    """On a rank: the largest difference from what ring computes."""
    from sp_bench.methods.ring import Ring
    from sp_bench.run.engine import Engine
    from sp_bench.run.gloo import GlooTransport

    group = group_of(n, "gather_home")
    if group is None:
        return None
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    q, dout = (torch.randn((1, 8, 4, 64), generator=generator) for _ in range(2))
    k, v = (torch.randn((1, 8, 2, 64), generator=generator) for _ in range(2))
    results = []
    for method in (GatherHome(), Ring()):
        plans = {phase: method.plan(problem(n), phase, COMPUTE_BOUND) for phase in PHASES}
        rank, transport = torch.distributed.get_rank(group), GlooTransport(group)
        engine = Engine(plans, problem(n), "auto", torch.device("cpu"), rank=rank, transport=transport)
        out, saved = engine.forward(q, k, v)
        results.append((out, *engine.backward(dout, saved)))
        engine.close()
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))


def test_it_runs(ranks: Ranks) -> None:
    assert all(difference < 1e-5 for difference in ranks.run(run_it, 6)[:6])
