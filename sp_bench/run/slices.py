"""Slices of the heads of a tensor (Problem.head_slices), which is (B, S, H, D) or (B, H, S)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Tensor as ChunkTensor


def one_slice(x: Tensor, problem: Problem, tensor: ChunkTensor, number: int) -> Tensor:
    """Slice `number` of the heads of a field of `tensor`: a view."""
    if problem.head_slices == 1:
        return x
    dim, parts = 2 if x.ndim == 4 else 1, 1 if tensor.of_keys else problem.query_parts
    part = slice(number % parts, None, parts)
    of_key_heads = x.chunk(problem.key_slices, dim=dim)[number // parts]
    return of_key_heads[:, :, part] if dim == 2 else of_key_heads[:, part]


def together(slices: Sequence[Tensor], problem: Problem, tensor: ChunkTensor) -> Tensor:
    """All heads of a field of `tensor`, from its slices in order."""
    if len(slices) == 1:
        return slices[0]
    dim = 2 if slices[0].ndim == 4 else 1
    if len(slices) == problem.key_slices:
        return torch.cat(tuple(slices), dim=dim)
    shape = list(slices[0].shape)
    shape[dim] *= len(slices)
    whole = slices[0].new_empty(shape)
    for number, x in enumerate(slices):
        one_slice(whole, problem, tensor, number).copy_(x)
    return whole
