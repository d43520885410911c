"""Heads of zeros in a tensor of this rank's tokens, and the true ones out of it (plan.padded_heads).

A tensor is (B, S, H, D), or (B, H, S) of statistics. Its heads are those of all ranks: a rank pads its own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Q
from sp_bench.plan.tensors import Tensor as ChunkTensor


def padded(x: Tensor, problem: Problem, tensor: ChunkTensor) -> Tensor:
    """A field of `tensor` with the true heads, as one with the padded heads: a copy, unless there are none.

    Each key head is there as often as it has copies, whose groups together have its query heads, then zeros. The rest
    is zeros.
    """
    if problem.padded is None:
        return x
    dim, heads = _dim(x), problem.padded_kv_heads if tensor.of_keys else problem.padded_heads
    whole = x.new_zeros((*x.shape[:dim], heads, *x.shape[dim + 1 :]))
    places = _places(whole, problem, tensor)
    places.copy_(x.unsqueeze(dim + 1) if tensor.of_keys else x.unflatten(dim, (problem.kv_heads, -1)))
    return whole


def true(x: Tensor, problem: Problem, tensor: ChunkTensor) -> Tensor:
    """The true heads of a field with the padded ones, contiguous. Gradients of the copies of a key head are added.

    The sum is in the dtype of accumulators, and is rounded once.
    """
    if problem.padded is None:
        return x
    places, dim = _places(x, problem, tensor), _dim(x)
    if not tensor.of_keys:
        return places.flatten(dim, dim + 1).contiguous()
    if problem.padded.copies == 1:
        return places.squeeze(dim + 1).contiguous()
    return places.sum(dim + 1, dtype=getattr(torch, problem.accumulate_dtype)).to(x.dtype)


def padded_by_head(x_H: Tensor, problem: Problem) -> Tensor:
    """Scores of query heads, (H,), with zeros for the heads that are added."""
    return padded(x_H[None, :, None], problem, Q)[0, :, 0]


def true_by_head(x_H: Tensor, problem: Problem) -> Tensor:
    """The scores of the true query heads, (H,), among those of the padded ones."""
    return true(x_H[None, :, None], problem, Q)[0, :, 0]


def _dim(x: Tensor) -> int:
    """The dimension of heads."""
    return 2 if x.ndim == 4 else 1


def _places(x: Tensor, problem: Problem, tensor: ChunkTensor) -> Tensor:
    """A view of the places of true heads: heads become (kv_heads, copies) of keys, (kv_heads, group) of queries."""
    assert problem.padded is not None
    dim, (_, group, copies) = _dim(x), problem.padded
    each = copies if tensor.of_keys else copies * group
    used = x.narrow(dim, 0, problem.kv_heads * each).unflatten(dim, (problem.kv_heads, each))
    return used if tensor.of_keys else used.narrow(dim + 1, 0, problem.heads // problem.kv_heads)
