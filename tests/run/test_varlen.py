"""Packs on kernels of variable lengths: what they copy to the device is made at the first execution."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sp_bench.kernels import KERNELS
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.documents import Documents
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.run.engine import Engine
from sp_bench.run.transport import AloneTransport
from tests.kernels import fakes


@pytest.mark.parametrize("batch", [1, 2])
def test_no_tensor_is_copied_from_the_second_execution_on(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """A copy makes the caller wait for a GPU, and a capture refuses it."""
    pack, method = Documents((5, 9, 3, 21, 26)), build("ring", {"layout": "striped"})
    problem = Problem(
        n=2, seqlen=pack.seqlen, batch=batch, heads=2, kv_heads=2, head_dim=32, mask=pack, dtype="bfloat16",
        layout=method.layout_of(pack, 2),
    )  # fmt: skip
    problem = method.assigned(problem)
    plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    with fakes.installed("flash_attn"):
        kernel = KERNELS["flash_attn"]()
        assert kernel.takes_varlen(problem.head_dim)
        engine = Engine(plans, problem, kernel, torch.device("cpu"), rank=0, transport=AloneTransport())
        q, k, v, dout = (torch.randn(batch, problem.queries.tokens(0), 2, 32).bfloat16() for _ in range(4))
        copied, made_of = [0, 0], {name: getattr(torch, name) for name in ("tensor", "from_numpy")}
        for turn in range(2):

            def counted(name: str, turn: int, *args: object, **how: object) -> torch.Tensor:
                copied[turn] += 1
                return made_of[name](*args, **how)

            for name in made_of:
                monkeypatch.setattr(torch, name, partial(counted, name, turn))
            _, saved = engine.forward(q, k, v)
            engine.backward(dout, saved)
        engine.close()
    assert copied[0] > 0 and copied[1] == 0
