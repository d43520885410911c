"""Fold partial outputs into accumulators, and add gradients to them: on GPUs in one kernel each."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

PACKAGES = {"triton": "triton"}
"""The modules besides torch's that folds call, with the distribution that each is installed by."""
Tensors = tuple[Tensor, ...]
Pair = tuple[Tensor, Tensor]
"""A partial output and its statistics: (out_BSHD, lse_BHS)."""
_LEAST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64)}
"""The lowest finite number of each dtype of an lse."""


def fold_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge (part_out, part_lse) into (out, lse): the softmax over the keys of both.

    out_BSHD and part_out_BSHD, lse_BHS and part_lse_BHS; out and lse are accumulators (fp32, or fp64), part_out may
    be narrower. Weights are exp(lse - total), as in online softmax (Milakov, Gimelshein 2018). Rows that saw no key
    on either side stay out = 0, lse = -inf.

    On CUDA, accumulators in fp32 are folded by one kernel, where triton can compile it (fold_triton.py).
    """
    if out.dtype == torch.float32 and (fused := fused_on(out.device)):
        fused.fold_fused_(out, lse, part_out, part_lse)
    else:
        fold_unfused_(out, lse, part_out, part_lse)


def fused_on(device: torch.device) -> Any:
    """The module of the kernels that fold and add on a GPU, where triton can compile them; else None."""
    return _fused_on(device) if device.type == "cuda" else None


@cache
def _fused_on(device: torch.device) -> Any:
    if not _has_triton() or triton_fails(device):
        return None
    return importlib.import_module("sp_bench.kernels.fold_triton")


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


def add_(totals: Tensors, parts: Tensors, fused: Any = None) -> None:
    """Add gradients_BSHD to their sums, in place: all in one kernel on CUDA, casts included, if they are alike.

    `fused` is `fused_on` their device, if the caller knows it.
    """
    x = totals[0]
    fused = fused or (fused_on(x.device) if x.dtype == torch.float32 else None)
    if fused and fused.sums_fused_(totals, parts, added=2 ** len(totals) - 1):
        return
    if len(totals) == 1:
        x.add_(parts[0])
    else:
        torch._foreach_add_(totals, parts)  # pyright: ignore[reportPrivateImportUsage]


def packed_in(parts: Tensors, dtype: torch.dtype, fused: Any = None) -> Tensors:
    """x_BSHD in that dtype, contiguous: x itself if it is so, else on CUDA by one kernel for all of a chunk.

    `fused` as in `add_`.
    """
    if all(x.dtype == dtype and x.is_contiguous() for x in parts):
        return parts
    fused = (fused or fused_on(parts[0].device)) if dtype == torch.float32 else None
    if fused and _alike(parts):
        made = tuple([torch.empty(x.shape, dtype=dtype, device=x.device) for x in parts])
        if fused.sums_fused_(made, parts, added=0):
            return made
    return tuple([in_dtype(x, dtype).contiguous() for x in parts])


def among_zeros(parts: Tensors, tokens: int, first: int, dtype: torch.dtype, fused: Any) -> Tensors:
    """New x_BSHD of so many tokens in that dtype: those from `first` on are the parts', the others 0. On CUDA by one
    kernel of `fused` for all of a chunk.
    """
    made = tuple([x.new_empty((x.shape[0], tokens, *x.shape[2:]), dtype=dtype) for x in parts])
    if fused and dtype == torch.float32 and fused.sums_fused_(made, parts, added=0, first=first):
        return made
    for whole, x in zip(made, parts, strict=True):
        whole[:, :first].zero_()
        whole[:, first : first + x.shape[1]].copy_(x)
        whole[:, first + x.shape[1] :].zero_()
    return made


def fold_each_(totals: Sequence[Pair], parts: Sequence[Pair], fused: Any = None) -> None:
    """`fold_` of several parts, each into an accumulator of its own: on CUDA in one kernel, if all are alike.

    `fused` as in `add_`.
    """
    out = totals[0][0]
    fused = fused or (fused_on(out.device) if out.dtype == torch.float32 else None)
    if fused and len(totals) > 1 and fused.folds_fused_(totals, parts):
        return
    for total, part in zip(totals, parts, strict=True):
        fold_(*total, *part)


def merge_(into: Pair, parts: Pair, own: int) -> None:
    """Merge all parts but number `own` into a new result: `fold_` of each, on CUDA in one kernel for all.

    Parts are (N, B, S, H, D) and (N, B, H, S), the result (B, S, H, D) and (B, H, S), outputs in any dtype.
    """
    (out, lse), (outs, lses) = into, parts
    if lse.dtype == torch.float32 and (fused := fused_on(out.device)):
        fused.merge_fused_(into, parts, own)
        return
    others = [number for number in range(len(outs)) if number != own]
    total_out, total_lse = outs[others[0]].to(lse.dtype, copy=True), lses[others[0]].clone()
    for number in others[1:]:
        fold_(total_out, total_lse, outs[number], lses[number])
    out.copy_(total_out)
    lse.copy_(total_lse)


def _alike(tensors: Tensors) -> bool:
    """Whether one kernel takes them as they are: all have one shape, dtype and order in memory."""
    x = tensors[0]
    return all(y.shape == x.shape and y.dtype == x.dtype and y.stride() == x.stride() for y in tensors[1:])


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in that dtype; x itself, without a torch call, if it has it."""
    return x if x.dtype == dtype else x.to(dtype)


def fold_bytes(out: Tensor, lse: Tensor, part_out: Tensor) -> int:
    """The fewest bytes that a fold reads and writes: accumulators twice, the part once.

    For an fp32 accumulator and a part of 2 bytes per element this is 10 * head_dim + 12 bytes per row.
    """
    return 2 * out.nbytes + part_out.nbytes + 3 * lse.nbytes


def fold_notes(device: torch.device) -> tuple[str, ...]:
    """Notes for a reader of the times of folds on a device. The first call on a GPU tries the fused fold."""
    failure = triton_fails(device) if device.type == "cuda" and _has_triton() else ""
    return (failure,) if failure else ()


@cache
def triton_fails(device: torch.device) -> str:
    """Why triton can't compile and run folds and sums there; empty if it can. Tried once, each twice.

    It needs a compiler, and a ptxas for the GPU. The second launch of a kernel goes past triton's own function.
    """
    from sp_bench.kernels.fold_triton import fold_fused_, folds_fused_, merge_fused_, sums_fused_

    part = torch.ones(1, 3, 1, 16, device=device, dtype=torch.bfloat16), torch.ones(1, 1, 3, device=device)
    operands = torch.zeros(1, 3, 1, 16, device=device), torch.ones(1, 1, 3, device=device)
    others, wanted, wanted_others = ((operands[0].clone(), operands[1].clone()) for _ in range(3))
    sums = torch.zeros_like(operands[0]), torch.zeros_like(operands[0])
    merged = torch.zeros_like(operands[0]), torch.zeros_like(operands[1])
    why = "its result is wrong"
    try:
        for _ in range(2):
            fold_fused_(*operands, *part)
            folds_fused_((operands, others), (part, part))
            for _ in range(2):
                fold_unfused_(*wanted, *part)
            fold_unfused_(*wanted_others, *part)
            sums_fused_(sums, (part[0], part[0]), added=0b11)
            merge_fused_(merged, (torch.stack([part[0]] * 3), torch.stack([part[1]] * 3)), 1)
        wanted += (*wanted_others, 2 * part[0].float(), 2 * part[0].float(), part[0].float(), part[1] + math.log(2))
        if all(map(torch.allclose, (*operands, *others, *sums, *merged), wanted)):
            return ""
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    failure = f"triton can't compile the fold, which takes torch's operations: {why}"
    warnings.warn(failure, stacklevel=2)
    return failure


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
