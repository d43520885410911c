"""One rank of several executed by itself, with copies for transfers, and one kernel call on the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sp_bench.calibrating.clock import Clock, cpu_seconds
from sp_bench.kernels import BlockKernel
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import Mask
from sp_bench.plan.method import PHASES, Method
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind
from sp_bench.run.engine import Engine
from sp_bench.run.executor import Action
from sp_bench.run.transport import AloneTransport


def inputs(problem: Problem, tokens: int, device: str = "cpu") -> list[torch.Tensor]:
    """q, k, v and dout of that many tokens: (1, tokens, heads, head_dim) each, k and v with kv_heads."""
    shapes = [(1, tokens, heads, problem.head_dim) for heads in (problem.heads, *2 * [problem.kv_heads], problem.heads)]
    return [torch.randn(shape, device=device).to(getattr(torch, problem.dtype)) for shape in shapes]


class Rank:
    """Rank 0 of a problem's ranks, executed by itself."""

    def __init__(
        self, method: Method, problem: Problem, kernel: str = "auto", device: str = "cpu", clock: Clock = cpu_seconds
    ) -> None:
        own = method.assigned(problem)
        self.plans = {phase: method.plan(own, phase, COMPUTE_BOUND) for phase in PHASES}
        self.engine = Engine(self.plans, own, kernel, torch.device(device), transport=AloneTransport(), timed=True)
        self._inputs, self._clock = inputs(own, own.queries.most, device), clock

    def step(self, action: Action = Action.EVERYTHING) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""
        q, k, v, dout = self._inputs
        forward_s, (_, saved) = self._clock(self.engine.forward, q, k, v, action)
        backward_s, _ = self._clock(self.engine.backward, dout, saved, action)
        return forward_s, backward_s


def one_call_s(kernel: BlockKernel, tensors: Sequence[torch.Tensor], mask: Mask, clock: Clock) -> tuple[float, float]:
    """Seconds of one call of the kernel on all of `tensors` (as `inputs` gives them), forward and backward."""
    (q, k, v, dout), kind = tensors, RegionKind(mask.name)
    forward_s, (out, lse) = clock(kernel.forward, q, k, v, kind)
    backward_s, _ = clock(kernel.backward, dout, q, k, v, out, lse, kind)
    return forward_s, backward_s
