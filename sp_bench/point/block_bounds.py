"""A lower bound on what a variant's blocks and folds take, in closed form: nothing is planned."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sp_bench.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.plan.method import Method
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DQ, O, Tensor

SUMMED = {"forward": (O,), "backward": (DQ, DKV)}
"""The tensors that each block of a phase adds to."""


def blocks_s(method: Method, problem: Problem, phase: str, cluster: Cluster) -> float:
    """A lower bound on the time of a phase by the kernel calls of its blocks and by the folds of their results, for the
    assigned problem: nothing is planned. 0.0 where what a block takes depends on the plan.

    Where every pair of chunks is a block of its own, the busiest rank computes at least the mean of all ranks. A rank
    folds each block's results but for the first one of a chunk, which may be kept as it is; and what partial sums of
    other ranks it gets. Nor does it take less time than the host to launch the calls.
    """
    device = cluster.device
    of_plan = problem.decodes or isinstance(problem.blocks, PackBlocks) or device.implementation.repeats_keys
    if not method.blocks_are_pairs or of_plan or cluster.stragglers.jitter:
        return 0.0
    kernels_s = device.block_s(problem, phase)
    computed = _computed(problem) * (kernels_s > 0)
    mean_s = float(computed @ kernels_s)
    if not device.implementation.joins_blocks:
        if method.folds_arrivals:
            mean_s += sum(_folds_s(method, problem, phase, device, computed, tensor) for tensor in SUMMED[phase])
        mean_s = max(mean_s, float(computed.sum()) * device.implementation.host_s_per_block)
    return cluster.least_compute_s(np.full(problem.n, mean_s))


@lru_cache(maxsize=16)
def _computed(problem: Problem) -> np.ndarray:
    """How many blocks of each class a rank computes, in the mean: (classes,). The ranks that split a chunk's heads
    compute it in all of its slices.
    """
    blocks, chunks = problem.blocks, np.arange(0, problem.n, problem.layout.head_parallel)
    counts = sum(np.bincount(blocks.of(chunk, chunks), minlength=blocks.classes) for chunk in chunks)
    return problem.head_slices * np.asarray(counts) / chunks.size


def _folds_s(
    method: Method, problem: Problem, phase: str, device: DeviceCosts, computed: np.ndarray, summed: Tensor
) -> float:
    """Seconds in which a rank folds at least, in the mean, into the chunks of one tensor.

    It has its own chunk and those whose operands come to it. With a tile these are its rows or columns: each gets a
    result of every block there, and comes back from all ranks of its group but one; elsewhere each gets perhaps a
    single result, which takes no fold.
    """
    tensor, tile = summed.by_heads if problem.layout.head_parallel > 1 else summed, method.tile_shape(problem.n)
    if tile:
        rows, columns = tile
        held, several = (columns, rows > 1) if tensor.of_keys else (rows, columns > 1)
        arriving = held - 1
    else:
        sent = method.chunks_sent(problem, phase)
        operands = (each for each in sent if not each.is_partial and each.of_keys == tensor.of_keys)
        held, several, arriving = 1 + sum(float(sent[each]) for each in operands), False, float(sent.get(tensor, 0))
    parts = problem.blocks.parts(keys=tensor.of_keys)

    def by_class(*, first: bool) -> np.ndarray:
        costs = {
            part: device.fold_s(problem, tensor, first=first, share=part.share, sliced=part.sliced)
            for part in set(parts)
        }
        return np.array([costs[part] for part in parts])

    fold_s = by_class(first=False)
    saved_s = float(np.max(fold_s - by_class(first=True) if several else fold_s))
    here_s = max(0.0, float(computed @ fold_s) - problem.head_slices * held * saved_s)
    return here_s + problem.head_slices * arriving * device.fold_s(problem, tensor, arriving=True)
