"""Fold a partial output into an accumulator, in place."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

_LEAST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64)}
"""By the dtype of an lse, the least number that it can hold."""


def fold_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge (part_out, part_lse) into (out, lse): the softmax over the keys of both.

    out_BSHD and part_out_BSHD, lse_BHS and part_lse_BHS; out and lse are accumulators (fp32, or fp64), part_out may
    be narrower. Weights are exp(lse - total), as in online softmax (Milakov, Gimelshein 2018). Rows that saw no key
    on either side stay out = 0, lse = -inf.

    On CUDA, accumulators in fp32 are folded by one kernel, where triton is installed (fold_triton.py).
    """
    if out.is_cuda and out.dtype == torch.float32 and _has_triton():
        from sp_bench.kernels.fold_triton import fold_fused_

        fold_fused_(out, lse, part_out, part_lse)
    else:
        fold_unfused_(out, lse, part_out, part_lse)


def fold_unfused_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """The same in operations of torch, on any device.

    Few of them: on a CPU each costs tens of microseconds for the lse alone, and a cast to the same dtype as much, since
    the block before has emptied the caches of both code and data. Fewest where lse and part_lse lie alike in memory.
    """
    torch.logaddexp(lse, part_lse, out=lse)
    # What saw no key on either side weighs nothing; any other lse that is not finite must show in the result.
    weight = torch.sub(part_lse, lse.clamp_min(_LEAST[lse.dtype])).exp_()
    out.lerp_(in_dtype(part_out, out.dtype), weight.transpose(1, 2).unsqueeze(-1))


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x itself where it has that dtype, without asking torch to look."""
    return x if x.dtype == dtype else x.to(dtype)


def fold_bytes(out: Tensor, lse: Tensor, part_out: Tensor) -> int:
    """What a fold must read and write at least: the accumulators both ways, the part once.

    10 * head_dim + 12 bytes a row for an fp32 accumulator and a part of 2 bytes an element.
    """
    return 2 * out.nbytes + part_out.nbytes + 3 * lse.nbytes


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
