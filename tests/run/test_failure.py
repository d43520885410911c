"""A block that fails in the middle of an execution."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench import SequenceParallelAttention
from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.measure.pool import RankPool
from sp_bench.run.attention import SequenceParallelAttention as Attention
from tests.support.processes import LONG_S


class Breaking(AtenCpu):
    """A kernel whose second block raises, on rank 0."""

    blocks = 0
    error: Exception

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        self.blocks += 1
        if dist.get_rank() == 0 and self.blocks == 2:
            raise self.error
        return super()._forward(q, k, v, causal)


def break_then_use_again(error: Exception) -> list[str]:
    """The errors of the failing call and of the next one, by another module on the same group, on each rank."""
    q = torch.randn(1, 8, 2, 8)
    said = []
    for broken in (True, False):
        attn: Attention = SequenceParallelAttention("ring", causal=False)
        try:
            if broken:
                engine = attn.engine(q, q, q)
                kernel = engine.kernel = Breaking()
                kernel.error = error
            attn(q, q, q)
            said.append("ok")
        except (RuntimeError, ValueError, MemoryError) as caught:
            said.append(f"{type(caught).__name__}: {caught}")
        if dist.get_rank() != 0:
            break  # its peers have got all that rank 0 sent, or wait; they are not the point here
    return said


def test_the_group_is_refused_afterwards() -> None:
    """Messages of the failed execution are under way, which the next one would take for its own."""
    with RankPool(1) as pool:  # one rank has no messages, so nothing to refuse
        assert pool.run(single) == [["ValueError: the first block is broken", "ok"]]
    for error in (ValueError("the second block is broken"), MemoryError()):
        with RankPool(2, timeout_s=LONG_S) as pool:
            said = pool.run(break_then_use_again, error)[0]
        assert said[0] == f"{type(error).__name__}: {error}"
        assert said[1].startswith("RuntimeError: this process group can't be used any more")
        assert repr(error) in said[1]


def infer_then_train(method: str, **options: Any) -> bool:
    """An evaluation step in inference mode, then a training step of the same module, in bf16: lanes cast."""
    attn = SequenceParallelAttention(method, **options)
    q = torch.randn(1, 8, 2, 8, dtype=torch.bfloat16)
    with torch.inference_mode():
        first = attn(q, q, q).clone()
    leaf = q.clone().requires_grad_()
    out = attn(leaf, leaf, leaf)
    out.sum().backward()
    return bool((out.detach() == first).all()) and leaf.grad is not None


def test_inference_mode_leaves_the_module_fit_for_training() -> None:
    with RankPool(2, timeout_s=LONG_S) as pool:
        for train in (partial(infer_then_train, "mesh", tile=(2, 1)), partial(infer_then_train, "ulysses")):
            assert pool.run(train) == [True, True]


def shards_between() -> list[int]:
    """The tokens of each result, where other lengths are assigned between two calls with one length."""
    attn: Attention = SequenceParallelAttention("ring", causal=True, layout="contiguous")
    odd, even = (attn.shard(torch.randn(1, seqlen, 2, 8)) for seqlen in (5, 4))
    found = [attn(odd, odd, odd, seqlen=5), attn(even, even, even, seqlen=4), attn(odd, odd, odd, seqlen=5)]
    attn.shard(torch.randn(1, 4, 2, 8))
    found.append(attn(odd, odd, odd, seqlen=5))
    return [x.shape[1] for x in found]


def test_what_is_assigned_between_calls_leaves_no_rank_alone() -> None:
    """A rank that looks for an engine that the other has would wait for it."""
    with RankPool(2, timeout_s=LONG_S) as pool:
        assert pool.run(shards_between) == [[3, 2, 3, 3], [2, 2, 2, 2]]


def single() -> list[str]:
    """A call whose first block breaks, and one with a kernel that doesn't, by modules on the same group."""
    q, said = torch.randn(1, 8, 2, 8), []
    for broken in (True, False):
        attn: Attention = SequenceParallelAttention("ring")
        if broken:
            kernel = attn.engine(q, q, q).kernel = Breaking()
            kernel.blocks, kernel.error = 1, ValueError("the first block is broken")
        try:
            said.append("ok" if attn(q, q, q).isfinite().all() else "not finite")
        except ValueError as error:
            said.append(f"ValueError: {error}")
    return said
