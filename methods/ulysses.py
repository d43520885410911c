"""DeepSpeed-Ulysses: an all-to-all gives every rank its heads of all tokens, and another returns its tokens.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", 2023, section 3.1. Between the all-to-alls, attention is one block on each rank. The forward keeps
Q, KV and O by heads, so that of the backward's inputs only dO travels. The all-to-alls are the library's; with
`collectives=messages` they are a message to each rank.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, h heads, k = kv_heads / heads. A rank
needs at least one key head: if kv_heads < n, each goes to n / kv_heads ranks. K = max(k, n / h).
    forward   (2 + 2K) (n - 1) / n for Q, KV and O
    backward  (2 + 2K) (n - 1) / n for dO, dQ and dKV; the dKV of a key head that ranks share is summed at its owner

Layout: contiguous. A rank has all tokens of its heads, so that a causal mask leaves all ranks equal work. Refuses an n
that doesn't divide heads, or that neither divides kv_heads nor is a multiple of it; with `pad_heads` only an n above
heads: heads of zeros are added (sp_bench/plan/padded_heads.py), and h, k and K are those of the padded heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import ClassVar

from sp_bench.plan import (
    DKV,
    DO,
    DOWN,
    DQ,
    KV,
    ODOQ,
    OUT,
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    CollectiveMethod,
    CostProfile,
    Group,
    O,
    Plan,
    Problem,
    Q,
    RequestError,
    SplitsHeads,
    Steps,
    Tensor,
    divisors,
    impossible,
)

LANE = "all-to-all"


@dataclass(frozen=True, kw_only=True)
class Ulysses(SplitsHeads, CollectiveMethod):
    """DeepSpeed-Ulysses: all ranks split the heads."""

    name: ClassVar[str] = "ulysses"
    colour: ClassVar[str] = "#de8f05"
    marker: ClassVar[str] = "<"
    citation: ClassVar[str] = "Jacobs et al. 2023"
    by_blocks: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous",)
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 2*max(k, n/h))*(n-1)/n",
        "backward": "(2 + 2*max(k, n/h))*(n-1)/n",
    }
    limit: ClassVar[str] = "heads"

    layout: str = "contiguous"

    def head_parallel(self, n: int) -> int:
        """n, as all ranks split the heads."""
        return n

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where n ranks can't split heads and key heads (`degrees`)."""
        n, degrees = problem.n, self.degrees(problem)
        if n not in degrees:
            if self.pad_heads:
                rule = f"{self.name} splits heads={problem.heads}, and each rank must have one of them or of zeros"
                raise RequestError(f"gpus={n}", rule, f"{problem.heads} or fewer would work")
            rule = f"{self.name} splits heads={problem.heads} evenly, and kv_heads={problem.kv_heads} must "
            rule += "divide evenly too or be a divisor of the ranks"
            raise impossible(f"gpus={n}", rule, degrees, self.if_padded(problem, n))

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """All-to-all of Q and KV, attention, all-to-all of O."""
        chunks = self._chunks(problem, Q.by_heads, KV.by_heads, O.by_heads)
        return by_heads(problem, chunks, lambda steps: self._attend(problem, steps, *chunks), self._by_messages)

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """All-to-all of dO, attention backward, all-to-all of dQ and dKV."""
        chunks = self._chunks(problem, ODOQ.by_heads, KV.by_heads, DQ.by_heads, DKV.by_heads)
        attend = partial(self._attend_backward, problem)
        return by_heads_backward(problem, chunks, lambda steps: attend(steps, *chunks), self._by_messages)

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas; a chunk of kv_h has max(kv_heads, n) heads."""
        exchanged = Fraction(problem.n - 1, problem.n)
        if phase == "forward":
            return {Q: exchanged, KV.by_heads: exchanged, OUT: exchanged}
        return {DO: exchanged, DQ: exchanged, DKV.by_heads: exchanged}

    @property
    def _by_messages(self) -> bool:
        return self.collectives == "messages"

    def _attend(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        """Add the attention of q_h, kv_h and o_h."""
        steps.next(Attend(*chunks))

    def _attend_backward(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        """Add the attention backward of odoq_h, kv_h, dq_h and dkv_h."""
        steps.next(AttendBackward(*chunks))

    def _chunks(self, problem: Problem, *tensors: Tensor) -> tuple[Chunk, ...]:
        """The rank's own chunks by heads. Their home is the ring of ranks that have the same heads."""
        u = self.head_parallel(problem.n)
        return tuple(Chunk(tensor, 0, Group(u, problem.n // u, DOWN)) for tensor in tensors)


def by_heads(
    problem: Problem, chunks: Sequence[Chunk], attend: Callable[[Steps], None], by_messages: bool = False
) -> Plan:
    """The forward plan whose attention, of `chunks` q_h, kv_h and o_h, `attend` adds between the all-to-alls."""
    q_h, kv_h, o_h = chunks
    q, kv, out = (Chunk(tensor, 0, Group(1, problem.n)) for tensor in (Q, KV, OUT))
    exchange, steps = _exchange(problem, by_messages), Steps()
    steps.next(exchange(q, q_h), exchange(kv, kv_h))
    attend(steps)
    steps.next(exchange(o_h, out))
    return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(out,), kept=(q_h, kv_h, o_h))


def by_heads_backward(
    problem: Problem, chunks: Sequence[Chunk], attend: Callable[[Steps], None], by_messages: bool = False
) -> Plan:
    """The backward plan whose attention, of `chunks` odoq_h, kv_h, dq_h and dkv_h, `attend` adds between the
    all-to-alls.
    """
    odoq_h, kv_h, dq_h, dkv_h = chunks
    do, dq, dkv = (Chunk(tensor, 0, Group(1, problem.n)) for tensor in (DO, DQ, DKV))
    q_h, o_h, do_h = (odoq_h._replace(tensor=tensor.by_heads) for tensor in (Q, O, DO))
    exchange, steps = _exchange(problem, by_messages), Steps()
    steps.next(exchange(do, do_h), Bundle((q_h, o_h, do_h), odoq_h))
    attend(steps)
    steps.next(exchange(dq_h, dq), exchange(dkv_h, dkv))
    return steps.plan("backward", problem.n, inputs=(do,), outputs=(dq, dkv), kept=(q_h, kv_h, o_h))


def _exchange(problem: Problem, by_messages: bool) -> Callable[[Chunk, Chunk], AllToAll]:
    group = Group(1, problem.layout.head_parallel)
    return lambda send, recv: AllToAll(LANE, send, recv, group, by_messages)


def settled_degree(ulysses: str | int, n: int) -> int:
    """The option `ulysses` as a number.

    Raises RequestError where it doesn't divide n, or while it is auto and matters.
    """
    if n == 1:
        return 1
    if not isinstance(ulysses, int):
        raise RequestError(
            f"method.ulysses={ulysses}",
            "decides which tokens a rank owns, and must be chosen before they are assigned",
            "a number, such as method.ulysses=2, would work",
        )
    if n % ulysses:
        raise impossible(f"method.ulysses={ulysses}", f"must divide gpus={n}", divisors(n))
    return ulysses
