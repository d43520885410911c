"""A lower bound on what a variant's blocks and folds take, in closed form: nothing is planned."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sp_bench.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.plan.groups import Grid, Group
from sp_bench.plan.method import Method
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DQ, O, Tensor

SUMMED = {"forward": (O,), "backward": (DQ, DKV)}
"""The tensors that each block of a phase adds to."""
MOST_LOOKED_AT = 256
"""Ranks of which what they compute is part of a bound: the busiest of them is hardly less busy than that of all."""
PAIRS_AT_ONCE = 2**20
"""So many pairs of chunks are looked at together: of 4096 ranks there are 16 million."""


def looked_at(cluster: Cluster, n: int) -> range:
    """The ranks that a bound looks at: all where they share cores, MOST_LOOKED_AT at most elsewhere."""
    some = n if cluster.shared_cores(n) else min(n, MOST_LOOKED_AT)
    return range(0, n, -(-n // some) | 1)  # of a tile not always the same columns


def blocks_s(method: Method, problem: Problem, phase: str, cluster: Cluster) -> float:
    """A lower bound on the time of a phase by the kernel calls of its blocks and by the folds of their results, for the
    assigned problem: nothing is planned. 0.0 where what a block takes depends on the plan.

    Where every pair of chunks is a block of its own, a rank computes those of its homes (Method.homes). It folds each
    block's results but for the first one of a chunk, which may be kept as it is; and what partial sums of other ranks
    it gets. Nor does it take less time than the host to launch the calls.
    """
    device = cluster.device
    of_plan = problem.decodes or isinstance(problem.blocks, PackBlocks) or device.implementation.repeats_keys
    if not method.blocks_are_pairs or of_plan or cluster.stragglers.jitter:
        return 0.0
    # Without a tile, some ranks may get fewer partial sums than others: what all get in the mean bounds the mean.
    in_mean = method.folds_arrivals and not method.tile_shape(problem.n)
    ranks = range(problem.n) if in_mean else looked_at(cluster, problem.n)
    kernels_s = device.block_s(problem, phase)
    computed = _computed(problem, method.homes(problem, phase), ranks) * (kernels_s > 0)
    if in_mean:
        computed = computed.mean(axis=0, keepdims=True)
    each_s = computed @ kernels_s
    if not device.implementation.joins_blocks:
        each_s += sum(_folds_s(method, problem, phase, device, computed, tensor) for tensor in SUMMED[phase])
        each_s = np.maximum(each_s, computed.sum(axis=1) * device.implementation.host_s_per_block)
    return cluster.least_compute_s(np.full(problem.n, each_s[0]) if in_mean else each_s)


@lru_cache(maxsize=256)
def _computed(problem: Problem, homes: tuple[Group | Grid, Group | Grid], ranks: range) -> np.ndarray:
    """How many blocks of each class some ranks compute: (ranks, classes). The ranks that split a chunk's heads compute
    it in all of its slices.
    """
    classes, of_queries, of_keys = problem.blocks.classes, *(np.arange(home.size) for home in homes)
    at_once, counts = max(1, PAIRS_AT_ONCE // (of_queries.size * of_keys.size)), list[np.ndarray]()
    for first in range(0, len(ranks), at_once):
        some = np.array(ranks[first : first + at_once])[:, None]
        queries, keys = homes[0].member(some, of_queries), homes[1].member(some, of_keys)
        of = problem.blocks.of(queries[:, :, None], keys[:, None, :]) + classes * np.arange(some.size)[:, None, None]
        counts.append(np.bincount(of.ravel(), minlength=classes * some.size).reshape(-1, classes))
    return problem.head_slices * np.concatenate(counts)


def _folds_s(
    method: Method, problem: Problem, phase: str, device: DeviceCosts, computed: np.ndarray, summed: Tensor
) -> np.ndarray:
    """Seconds in which ranks that compute so many blocks of each class fold at least, into the chunks of one tensor:
    (ranks,).

    With several blocks for each chunk, the first one's result is a fold, too, if a cheaper one; a single one takes no
    fold.
    """
    tensor = summed.by_heads if problem.layout.head_parallel > 1 else summed
    queries, keys = (home.size for home in method.homes(problem, phase))
    held, several = (keys, queries > 1) if tensor.of_keys else (queries, keys > 1)
    arriving = float(method.partials_folded(problem, phase, tensor))
    if held <= arriving:  # what has gone is not added to any more: it may have had a single result
        held, several = 1 + arriving, False
    parts = problem.blocks.parts(keys=tensor.of_keys)

    def by_class(*, first: bool) -> np.ndarray:
        costs = {
            part: device.fold_s(problem, tensor, first=first, share=part.share, sliced=part.sliced)
            for part in set(parts)
        }
        return np.array([costs[part] for part in parts])

    fold_s = by_class(first=False)
    saved_s = float(np.max(fold_s - by_class(first=True) if several else fold_s))
    here_s = np.maximum(0.0, computed @ fold_s - problem.head_slices * held * saved_s)
    return here_s + problem.head_slices * arriving * device.fold_s(problem, tensor, arriving=True)
