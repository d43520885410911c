"""Model FLOPs, and the (query, key) pairs that each rank computes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sp_bench.plan.block_classes import block_classes
from sp_bench.plan.ops import Plan
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem, flops_per_pair


def model_flops(problem: Problem, phase: str) -> float:
    """FLOPs of the whole attention for MFU: 4 B N^2 H D forward, half of that if causal; backward 2.5 times as many.

    Of a history of P keys, every query sees all: 4 B N P H D more. Forward one of the two matrix products is of values,
    which may be narrower, backward two of five.
    """
    per_pair = flops_per_pair(phase, problem.head_dim, problem.value_dim)
    return float(problem.batch * problem.pairs * problem.heads * per_pair)


def pairs(plan: Plan, problem: Problem) -> np.ndarray:
    """(query, key) pairs that each rank computes per batch entry, summed over heads: (n,)."""
    return block_classes(plan, problem).totals(np.asarray(problem.blocks.pairs)) * problem.block_heads


def work_imbalance(executed: Iterable[tuple[int, Plan, Problem]]) -> float:
    """(query, key) pairs of the rank that computes most over the mean of all, of plans, each executed so often."""
    work = sum((times * pairs(plan, problem) for times, plan, problem in executed), np.zeros(1))
    return float(work.max() / work.mean())


def least_imbalance(problem: Problem) -> float:
    """The least that work_imbalance can be: above 1 only where documents stay whole and one is too long."""
    blocks = problem.blocks
    if not isinstance(blocks, PackBlocks) or problem.layout.name != "whole_documents":
        return 1.0
    work = blocks.mask.work_of_documents
    return max(1.0, float(work.max() / work.sum()) * blocks.chunks)
