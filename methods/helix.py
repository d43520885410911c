"""Helix: KV parallelism for decoding. Every rank computes all queries, so that only partial outputs travel.

Source: Bhatia et al., "Helix Parallelism: Rethinking Sharding Strategies for Interactive Multi-Million-Token LLM
Decoding", 2025 (arXiv 2507.07120), section 2.1: the ranks that share a cache by tokens each compute the QKV projection
of the whole batch, which costs them weights, not transfers. Each attends to its share of the keys; one all-to-all
brings the partial outputs, with their lse, to the ranks that go on with them, which merge them.

It is DCP (methods/dcp.py) without the gather of Q. Only in a decode step do all ranks have the hidden states that
queries are made of: elsewhere it gathers Q, and is DCP. In the paper a rank goes on with some of the heads of all
sequences, here with some of the rows; as many bytes go from each rank to each other one.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, lse apart: (n - 1) O in a decode step, for
any length of the caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from sp_bench.methods.dcp import DCP
from sp_bench.plan import O, Problem, Tensor


@dataclass(frozen=True, kw_only=True)
class Helix(DCP):
    """Queries that all ranks compute, keys that stay, and outputs that are exchanged."""

    name: ClassVar[str] = "helix"
    citation: ClassVar[str] = "Bhatia et al. 2025"

    def assigned(self, problem: Problem) -> Problem:
        """The problem with all queries on all ranks, if it is a decode step."""
        return replace(super().assigned(problem), queries_everywhere=problem.decodes)

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """n - 1 chunks of O in a decode step; elsewhere DCP's."""
        sent = super().chunks_sent(problem, phase)
        return {O: sent[O]} if problem.queries_everywhere else sent
