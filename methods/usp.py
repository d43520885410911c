"""USP: DeepSpeed-Ulysses inside groups of consecutive ranks, Ring Attention between the groups.

Source: Fang, Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024, algorithm 1.
The n ranks form n / u groups of u = `ulysses` consecutive ranks. Inside a group it is Ulysses (methods/ulysses.py), but
instead of one block, KV by heads goes round the ring of ranks that have the same heads. The ranks of a group share one
layout chunk, so that a block is one kernel call on a whole chunk.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, h heads, K = max(kv_heads, u) / h:
    forward   (2 + 2K) (u - 1) / u for Q, KV and O, and 2K (n / u - 1) along the ring
    backward  (2 + 2K) (u - 1) / u for dO, dQ and dKV, and 4K (n / u - 1) for KV and dKV along the ring

Layouts: contiguous, striped, zigzag. Masks: full, causal. Refuses a u that doesn't divide both n and heads, or that
neither divides kv_heads nor is a multiple of it; with `pad_heads` one that doesn't divide n or is above heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from sp_bench.methods.ring import pass_round, pass_round_backward
from sp_bench.methods.ulysses import Ulysses, settled_degree
from sp_bench.plan import DKV, DO, DQ, KV, OUT, Chunk, Problem, Q, Sized, Steps, Tensor


@dataclass(frozen=True, kw_only=True)
class USP(Sized, Ulysses):
    """Ulysses inside groups, Ring between them."""

    name: ClassVar[str] = "usp"
    colour: ClassVar[str] = "#d55e00"
    marker: ClassVar[str] = ">"
    citation: ClassVar[str] = "Fang and Zhao 2024"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 2*max(k, u/h))*(u-1)/u + 2*max(k, u/h)*(n/u-1)",
        "backward": "(2 + 2*max(k, u/h))*(u-1)/u + 4*max(k, u/h)*(n/u-1)",
    }
    limit: ClassVar[str] = "any number"

    layout: str = "auto"
    size_option: ClassVar[str] = "ulysses"

    ulysses: str | int = "auto"
    """u, how many ranks split the heads; auto stands for every possible degree."""

    def sizes(self, problem: Problem) -> list[int]:
        """Every u that divides n and splits heads and key heads."""
        return [u for u in self.degrees(problem) if problem.n % u == 0]

    def size_rule(self, problem: Problem) -> str:
        """The rule for `ulysses`, in words that follow "must"."""
        return f"divide gpus={problem.n} and {self.degree_rule(problem)}"

    def or_else(self, problem: Problem, size: object) -> str:
        """Padded heads, where they make a u possible."""
        return self.if_padded(problem, size)

    def head_parallel(self, n: int) -> int:
        """The Ulysses degree u. Raises RequestError where it doesn't divide n, or while it is auto and matters."""
        return settled_degree(self.ulysses, n)

    def variant(self, n: int) -> str:
        """The Ulysses and the ring degree, in words."""
        u = self.head_parallel(n)
        return f"ulysses {u} x ring {n // u}"

    def partials_folded(self, problem: Problem, phase: str, tensor: Tensor) -> int:
        """dKV of each hop along the ring."""
        return problem.n // self.head_parallel(problem.n) - 1 if tensor.by_tokens == DKV else 0

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The value of u."""
        return {"u": self.head_parallel(problem.n)}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas; a chunk of kv_h has max(kv_heads, u) heads."""
        u = self.head_parallel(problem.n)
        exchanged, hops = Fraction(u - 1, u), problem.n // u - 1
        if phase == "forward":
            return {Q: exchanged, KV.by_heads: exchanged + hops, OUT: exchanged}
        return {DO: exchanged, KV.by_heads: hops, DQ: exchanged, DKV.by_heads: exchanged + hops}

    def _attend(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        pass_round(steps, *chunks)

    def _attend_backward(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        pass_round_backward(steps, *chunks)
