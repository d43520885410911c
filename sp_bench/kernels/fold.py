"""Fold a partial output into an accumulator, in place."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch
from torch import Tensor

PACKAGES = {"triton": "triton"}
"""The modules besides torch's that folds call, with the distribution that each is installed by."""
_LEAST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64)}
"""The lowest finite number of each dtype of an lse."""


def fold_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge (part_out, part_lse) into (out, lse): the softmax over the keys of both.

    out_BSHD and part_out_BSHD, lse_BHS and part_lse_BHS; out and lse are accumulators (fp32, or fp64), part_out may
    be narrower. Weights are exp(lse - total), as in online softmax (Milakov, Gimelshein 2018). Rows that saw no key
    on either side stay out = 0, lse = -inf.

    On CUDA, accumulators in fp32 are folded by one kernel, where triton can compile it (fold_triton.py).
    """
    if takes_triton(out):
        from sp_bench.kernels.fold_triton import fold_fused_

        fold_fused_(out, lse, part_out, part_lse)
    else:
        fold_unfused_(out, lse, part_out, part_lse)


def takes_triton(x: Tensor) -> bool:
    """Whether sums like x are folded by triton's kernels: in fp32 on a GPU, where triton can compile them."""
    return x.is_cuda and x.dtype == torch.float32 and _has_triton() and not triton_fails(x.device)


def fold_unfused_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """`fold_` in torch operations, on any device.

    It uses as few operations as possible. After a block has evicted code and data from a CPU's caches, each costs tens
    of microseconds for the lse alone, even a cast to the same dtype. It is fastest if lse and part_lse have the same
    strides.
    """
    torch.logaddexp(lse, part_lse, out=lse)
    # Rows that saw no key on either side get weight 0. Any other lse that is not finite must show in the result.
    weight = torch.sub(part_lse, lse.clamp_min(_LEAST[lse.dtype])).exp_()
    out.lerp_(in_dtype(part_out, out.dtype), weight.transpose(1, 2).unsqueeze(-1))


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in that dtype; x itself, without a torch call, if it has it."""
    return x if x.dtype == dtype else x.to(dtype)


def fold_bytes(out: Tensor, lse: Tensor, part_out: Tensor) -> int:
    """The fewest bytes that a fold reads and writes: accumulators twice, the part once.

    For an fp32 accumulator and a part of 2 bytes per element this is 10 * head_dim + 12 bytes per row.
    """
    return 2 * out.nbytes + part_out.nbytes + 3 * lse.nbytes


def fold_notes(device: torch.device) -> tuple[str, ...]:
    """What a reader of the times of folds on a device must know. The first call on a GPU tries the fused fold."""
    failure = triton_fails(device) if device.type == "cuda" and _has_triton() else ""
    return (failure,) if failure else ()


@cache
def triton_fails(device: torch.device) -> str:
    """Why triton can't compile and run the fold there; empty if it can. Tried once.

    It needs a compiler, and a ptxas for the GPU.
    """
    from sp_bench.kernels.fold_triton import fold_fused_

    out, lse = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, device=device)
    why = "its result is not finite"
    try:
        fold_fused_(out, lse, out.to(torch.bfloat16), lse.clone())
        if lse.isfinite().all():
            return ""
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    failure = f"triton can't compile the fold, which takes torch's operations: {why}"
    warnings.warn(failure, stacklevel=2)
    return failure


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
