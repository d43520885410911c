"""UPipe, or Untied Ulysses: Ulysses' all-to-alls and attention for a few heads at a time, in buffers that are reused.

Source: Ghadia et al., "Untied Ulysses: Memory-Efficient Context Parallelism via Headwise Chunking", 2026
(arXiv 2602.21196). A stage exchanges, attends to and returns 1/S of the heads, S = `stages`; at most S = heads / n, one
head of each rank in a stage. The paper's order of heads for GQA: stages that follow each other have other query heads
of the same key heads, which are exchanged once. T of the S stages bring key heads, T = gcd(S, kv_heads / n), or 1 where
ranks share key heads.

The forward keeps O by heads alone, of which nothing travels. Backward, Q and KV are exchanged again, with dO: this is
Ulysses (methods/ulysses.py) with less memory for more volume. The paper exchanges them again where it recomputes a
layer's forward. It also projects q, k and v a stage at a time, which is not an attention's business.

`overlap` is ours: a stage's all-to-alls go on while the stage before is computed, with a second set of buffers. Without
it, a stage starts when the one before is done, as in the paper.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, h heads, K = max(kv_heads, n) / h:
    forward   (2 + 2K) (n - 1) / n for Q, KV and O
    backward  (3 + 4K) (n - 1) / n for Q, dO, KV, dQ and dKV

Memory forward, batch 1, in the same chunks, with k = kv_heads / heads and c = 2 sets of buffers (1 without overlap or
if S = 1, and for KV if T = 1): 1 + 2k of Q and KV, 1 of O by heads, 1 of O, and (c + 2) / S + 2K (c + 1) / T for what
is exchanged and packed.

Layout: contiguous. Refuses what Ulysses refuses, and stages that don't divide heads / n. Heads are the padded ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from sp_bench.methods.ulysses import LANE, Ulysses
from sp_bench.plan import (
    DKV,
    DO,
    DQ,
    KV,
    ODOQ,
    OUT,
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    CostProfile,
    Group,
    O,
    Op,
    Plan,
    Problem,
    Q,
    Steps,
    Tensor,
    divisors,
    impossible,
)


@dataclass(frozen=True, kw_only=True)
class UPipe(Ulysses):
    """Ulysses in stages of a few heads."""

    name: ClassVar[str] = "upipe"
    colour: ClassVar[str] = "#8c4512"
    marker: ClassVar[str] = "$u$"
    citation: ClassVar[str] = "Ghadia et al. 2026"
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 2*max(k, n/h))*(n-1)/n",
        "backward": "(3 + 4*max(k, n/h))*(n-1)/n",
    }

    stages: Literal["most", "auto"] | int = "most"
    """S; most stands for heads / n, as in the paper, and auto for every divisor of that."""
    overlap: bool = True
    """Whether a stage's all-to-alls go on while the stage before is computed."""

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where Ulysses does, and for stages that don't divide heads / n."""
        super().refuse(problem)
        of_a_rank = self._heads(problem)[0] // problem.n
        possible = divisors(of_a_rank)
        if isinstance(self.stages, int) and self.stages not in possible:
            raise impossible(f"method.stages={self.stages}", f"must divide heads / gpus = {of_a_rank}", possible)

    def candidates(self, problem: Problem) -> tuple[UPipe, ...]:
        """One variant for each number of stages that the option stands for, the most first."""
        self.refuse(problem)
        possible = divisors(self._heads(problem)[0] // problem.n)[::-1]
        chosen = {"most": possible[:1], "auto": possible}.get(str(self.stages), [self.stages])
        return tuple(replace(self, stages=stages) for stages in chosen)

    def head_slices(self, problem: Problem) -> int:
        """S, the number of stages."""
        assert isinstance(self.stages, int), "a caller picks one of the candidates first"
        return self.stages

    def query_parts(self, problem: Problem) -> int:
        """S / T: how many stages in a row have the same key heads."""
        slices, kv_heads = self.head_slices(problem), self._heads(problem)[1]
        return slices // math.gcd(slices, max(kv_heads // problem.n, 1))

    def leaner(self) -> tuple[UPipe, ...]:
        """Every number of stages, with one set of buffers and with two."""
        return tuple(replace(self, stages="auto", overlap=overlap) for overlap in (True, False))

    def variant(self, n: int) -> str:
        """The number of stages, in words."""
        return f"{self.stages} stages" + ("" if self.overlap else " one by one")

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas; a chunk has the heads of one stage here."""
        exchanged = Fraction(problem.n - 1, problem.n)
        queries, keys = problem.head_slices * exchanged, problem.key_slices * exchanged
        if phase == "forward":
            return {Q: queries, KV.by_heads: keys, OUT: queries}
        return {Q: queries, DO: queries, KV.by_heads: keys, DQ: queries, DKV.by_heads: keys}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """For each stage: all-to-all of Q, and of KV where it is new, attention, all-to-all of O."""
        q, kv, out = (of_tokens(problem, tensor) for tensor in (Q, KV, OUT))
        q_h, kv_h, o_h = (self._by_heads(problem, tensor) for tensor in (Q.by_heads, KV.by_heads, O.by_heads))

        def exchange(stage: int) -> list[Op]:
            return [self._all_to_all(problem, x[i], x_h[i]) for x, x_h, i in _new(problem, stage, (q, q_h), (kv, kv_h))]

        def attend(stage: int) -> list[Op]:
            return [Attend(q_h[stage], kv_h[stage // problem.query_parts], o_h[stage])]

        def give_back(stage: int) -> list[Op]:
            return [self._all_to_all(problem, o_h[stage], out[stage])]

        steps = self._staged(problem, exchange, attend, give_back)
        return steps.plan("forward", problem.n, inputs=(*q, *kv), outputs=tuple(out), kept=tuple(o_h))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """For each stage: all-to-all of Q, dO and new KV, attention backward, all-to-all of dQ and of whole dKV."""
        q, do, kv, dq, dkv = (of_tokens(problem, tensor) for tensor in (Q, DO, KV, DQ, DKV))
        by_heads = (Q.by_heads, O.by_heads, DO.by_heads, ODOQ.by_heads, KV.by_heads, DQ.by_heads, DKV.by_heads)
        q_h, o_h, do_h, odoq_h, kv_h, dq_h, dkv_h = (self._by_heads(problem, tensor) for tensor in by_heads)

        def exchange(stage: int) -> list[Op]:
            new = _new(problem, stage, (q, q_h), (do, do_h), (kv, kv_h))
            return [self._all_to_all(problem, x[i], x_h[i]) for x, x_h, i in new]

        def attend(stage: int) -> list[Op]:
            keys = stage // problem.query_parts
            parts = (q_h[stage], o_h[stage], do_h[stage])
            return [
                Bundle(parts, odoq_h[stage]),
                AttendBackward(odoq_h[stage], kv_h[keys], dq_h[stage], dkv_h[keys]),
            ]

        def give_back(stage: int) -> list[Op]:
            keys, part = divmod(stage, problem.query_parts)
            ops: list[Op] = [self._all_to_all(problem, dq_h[stage], dq[stage])]
            last = part + 1 == problem.query_parts
            return [*ops, self._all_to_all(problem, dkv_h[keys], dkv[keys])] if last else ops

        steps = self._staged(problem, exchange, attend, give_back)
        return steps.plan("backward", problem.n, inputs=(*q, *do, *kv), outputs=(*dq, *dkv), kept=tuple(o_h))

    def _heads(self, problem: Problem) -> tuple[int, int]:
        """The query heads and the key heads that ranks split."""
        padded = self.padded(problem)
        return (padded.heads, padded.kv_heads) if padded else (problem.heads, problem.kv_heads)

    def _staged(self, problem: Problem, exchange, attend, give_back) -> Steps:
        """The operations of all stages; with overlap, a stage is exchanged before the blocks of the one before it."""
        steps, stages = Steps(), range(problem.head_slices)
        ahead = int(self.overlap)
        for number in range(problem.head_slices + ahead):
            steps.next(*(exchange(number) if number in stages else []))
            if (stage := number - ahead) in stages:
                steps.do(*attend(stage), *give_back(stage))
        return steps

    def _all_to_all(self, problem: Problem, send: Chunk, recv: Chunk) -> AllToAll:
        return AllToAll(LANE, send, recv, Group(1, problem.n), self._by_messages)

    def _by_heads(self, problem: Problem, tensor: Tensor) -> list[Chunk]:
        (chunk,) = self._chunks(problem, tensor)
        return chunk.slices(problem.slices_of(tensor))


def of_tokens(problem: Problem, tensor: Tensor) -> list[Chunk]:
    """The rank's own chunks of a tensor by tokens, one for each slice of the heads."""
    return Chunk(tensor, 0, Group(1, problem.n)).slices(problem.slices_of(tensor))


def _new(
    problem: Problem, stage: int, *pairs: tuple[list[Chunk], list[Chunk]]
) -> list[tuple[list[Chunk], list[Chunk], int]]:
    """(chunks by tokens, chunks by heads, slice) of what a stage needs and the stage before hasn't: KV comes last."""
    *queries, keys = pairs
    number, part = divmod(stage, problem.query_parts)
    return [(*pair, stage) for pair in queries] + [(*keys, number)] * (part == 0)
