"""Times of a Mesh tile's blocks and hops, and the paper's greedy schedules for them."""

from __future__ import annotations

from hypothesis import strategies as st

from sp_bench.methods.mesh_schedule import Step, backward_schedule, forward_schedule
from sp_bench.methods.mesh_times import Hop, Tensors, TileTimes
from sp_bench.plan.tensors import DKV, DQ, KV, ODOQ, O, Q, Tensor

FORWARD, BACKWARD = Tensors(Q, KV, O, None), Tensors(ODOQ, KV, DQ, DKV)
seconds = st.sampled_from([0.0, 0.3, 1.0, 1.7, 4.0])


@st.composite
def times(draw: st.DrawFn, most: int = 5, most_slices: int = 3) -> TileTimes:
    tensors = draw(st.sampled_from([FORWARD, BACKWARD]))
    names = [name for name in (tensors.q, tensors.kv, tensors.o, tensors.dkv) if name]
    hop_s, slices = {name: draw(seconds) for name in names}, draw(st.integers(1, most_slices))
    a, b = (draw(st.integers(1, most if slices == 1 else 3)) for _ in range(2))
    return TileTimes(a, b, tensors, draw(st.sampled_from([0.5, 1.0])), hop_s, slices)


def greedy(t: TileTimes) -> list[Step]:
    hiding = {name: max(1, round(s / t.block_s)) for name, s in t.hop_s.items()}
    return (forward_schedule if t.tensors.dkv is None else backward_schedule)(t.a, t.b, hiding)


def order_of(steps: list[Step]) -> list[Tensor]:
    return [step.transfer for step in steps if step.transfer]


def in_turn(t: TileTimes, order: list[Tensor]) -> list[Hop]:
    """One slice after the other."""
    return [Hop(i, name) for i in range(t.slices) for name in order]
