"""What the streams of a rank do before what they wait for is there."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from methods import build
from sp_bench.plan import COMPUTE_BOUND, Mask
from sp_bench.run.attention import Engine
from sp_bench.run.transport import AloneTransport, Key, Message
from tests.problems import splittable_problem
from tests.ranks import WORLD, Ranks
from tests.run import jobs

PATIENCE_S = 20.0


class Expecting(AloneTransport):
    """Alone, and tells when a receive is posted ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[int, Sequence[Message]] = {}
        self.ahead = threading.Event()
        self.matched: list[bool] = []

    def expect(self, lane: int, receives: Sequence[Message]) -> None:
        self.expected[lane] = receives
        self.ahead.set()

    def exchange(
        self, lane: int, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        if lane in self.expected:
            (source, ahead), (same, tensors) = self.expected.pop(lane)[0], receives[0]
            self.matched.append(source == same and [x.data_ptr() for x in ahead] == [x.data_ptr() for x in tensors])
        super().exchange(lane, receives, sends, counted_as)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_partial_is_received_before_the_one_to_be_sent_is_computed(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TokenRing: the block whose result is sent first doesn't end before the receive beside that is posted."""
    problem, transport = splittable_problem(4), Expecting()
    method = build("tokenring", {})
    plans = {name: method.plan(problem, name, COMPUTE_BOUND) for name in ("forward", "backward")}
    engine = Engine(plans, problem, "auto", torch.device("cpu"), rank=1, transport=transport)
    kernel, posted = type(engine.kernel), []
    block = getattr(kernel, phase)

    def patient(self: object, *args: Tensor | Mask) -> tuple[Tensor, ...]:
        posted.append(transport.ahead.wait(PATIENCE_S))
        return block(self, *args)

    dtype, heads = getattr(torch, problem.dtype), (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(problem.batch, problem.local_seqlen, each, problem.head_dim) for each in heads]
    q, k, v, dout = (torch.randn(shape, dtype=dtype) for shape in shapes)
    if phase == "forward":
        monkeypatch.setattr(kernel, phase, patient)
    _, saved = engine.forward(q, k, v)
    if phase == "backward":
        transport.ahead.clear()
        transport.matched.clear()
        monkeypatch.setattr(kernel, phase, patient)
        engine.backward(dout, saved)
    engine.close()
    assert posted == [True] * 4
    assert transport.matched and all(transport.matched), "into the buffers of the transfer itself, from its source"
    assert transport.expected == {}, "each was used"


def test_gloo_receives_what_was_expected(ranks: Ranks) -> None:
    """Once, in the buffer that was posted; and the next message of the lane is the next one."""
    for rank, found in enumerate(ranks.run(jobs.receive_ahead, 1000)):
        source = (rank - 1) % WORLD
        assert found == ([[100.0 + source], [200.0 + source]], 2)
