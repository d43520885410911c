"""Folds, sums and casts as one Triton kernel each, which reads and writes everything once. It imports triton.

A program folds some tokens of one head of one batch entry. The head_dim elements of a row are contiguous, and so are
the statistics of the tokens, as tokens are the last dimension of lse_BHS.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

ELEMENTS = 4096
"""Accumulator elements of one program: 32 for each thread of its four warps."""
FOLDS, SUMS, MERGE = range(3)
"""The kernels of several results, in keys."""
Pair = tuple[Tensor, Tensor]
ALIGNED = 16
"""Triton compiles anew for addresses that are no multiple of so many bytes."""


@triton.jit
def _fold_rows(
    out, lse, part_out, part_lse, b, tokens, head_dim,
    out_b, out_s, out_h, out_d, lse_b, lse_h, lse_s,
    part_b, part_s, part_h, part_d, part_lse_b, part_lse_h, part_lse_s,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    # Offsets in 64 bits: a million tokens of 32 heads of 128 are 2^32 elements.
    h = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, HEAD_DIM).to(tl.int64)
    rows = s < tokens
    cells = rows[:, None] & (d < head_dim)[None, :]

    lse_at = lse + b * lse_b + h * lse_h + s * lse_s
    held = tl.load(lse_at, mask=rows, other=0.0)
    new = tl.load(part_lse + b * part_lse_b + h * part_lse_h + s * part_lse_s, mask=rows, other=0.0)
    # Like torch.logaddexp: two equal infinities give the same infinity.
    apart = tl.where(held == new, 0.0, -tl.abs(held - new))
    total = tl.maximum(held, new) + tl.log(1.0 + tl.exp(apart))
    weight = tl.where(new == float("-inf"), 0.0, tl.exp(new - total))[:, None]

    out_at = out + b * out_b + h * out_h + s[:, None] * out_s + d[None, :] * out_d
    part_at = part_out + b * part_b + h * part_h + s[:, None] * part_s + d[None, :] * part_d
    x = tl.load(out_at, mask=cells, other=0.0)
    y = tl.load(part_at, mask=cells, other=0.0).to(tl.float32)
    # Like torch.lerp: exactly x at weight 0, exactly y at weight 1.
    merged = tl.where(weight < 0.5, x + weight * (y - x), y - (y - x) * (1.0 - weight))
    tl.store(out_at, merged, mask=cells)
    tl.store(lse_at, total, mask=rows)


@triton.jit
def _fold_kernel(
    out, lse, part_out, part_lse, tokens, head_dim,
    out_b, out_s, out_h, out_d, lse_b, lse_h, lse_s,
    part_b, part_s, part_h, part_d, part_lse_b, part_lse_h, part_lse_s,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    _fold_rows(
        out, lse, part_out, part_lse, tl.program_id(2).to(tl.int64), tokens, head_dim,
        out_b, out_s, out_h, out_d, lse_b, lse_h, lse_s,
        part_b, part_s, part_h, part_d, part_lse_b, part_lse_h, part_lse_s, TOKENS, HEAD_DIM,
    )  # fmt: skip


@triton.jit
def _folds_kernel(
    outs, lses, part_outs, part_lses, batch, tokens, head_dim,
    out_b, out_s, out_h, out_d, lse_b, lse_h, lse_s,
    part_b, part_s, part_h, part_d, part_lse_b, part_lse_h, part_lse_s,
    RESULTS: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(2).to(tl.int64)
    for i in tl.static_range(RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
        if z // batch == i:
            _fold_rows(
                outs[i], lses[i], part_outs[i], part_lses[i], z % batch, tokens, head_dim,
                out_b, out_s, out_h, out_d, lse_b, lse_h, lse_s,
                part_b, part_s, part_h, part_d, part_lse_b, part_lse_h, part_lse_s, TOKENS, HEAD_DIM,
            )  # fmt: skip


@triton.jit
def _sums_kernel(
    intos, parts, batch, tokens, head_dim, first, part_tokens,
    into_b, into_s, into_h, into_d, part_b, part_s, part_h, part_d,
    RESULTS: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    # A part has the tokens from `first` on; the others are 0.
    # Bit i of ADDS: whether part i is added, or is all of its sum until now.
    z, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    b = z % batch
    s = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, HEAD_DIM).to(tl.int64)
    cells = (s < tokens)[:, None] & (d < head_dim)[None, :]
    at = s - first
    given = cells & ((at >= 0) & (at < part_tokens))[:, None]
    into_at = b * into_b + h * into_h + s[:, None] * into_s + d[None, :] * into_d
    part_at = b * part_b + h * part_h + at[:, None] * part_s + d[None, :] * part_d
    for i in tl.static_range(RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
        if z // batch == i:
            x = tl.load(parts[i] + part_at, mask=given, other=0.0).to(tl.float32)
            if (ADDS >> i) % 2:
                x += tl.load(intos[i] + into_at, mask=cells, other=0.0)
            tl.store(intos[i] + into_at, x, mask=cells)


@triton.jit
def _merge_kernel(
    into, into_lse, outs, lses, parts, own, tokens, head_dim,
    into_b, into_s, into_h, into_d, into_lse_b, into_lse_h, into_lse_s,
    out_n, out_b, out_s, out_h, out_d, lse_n, lse_b, lse_h, lse_s,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    s = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, HEAD_DIM).to(tl.int64)
    rows = s < tokens
    cells = rows[:, None] & (d < head_dim)[None, :]
    lse_at = lses + b * lse_b + h * lse_h + s * lse_s
    out_at = outs + b * out_b + h * out_h + s[:, None] * out_s + d[None, :] * out_d

    most = tl.full((TOKENS,), float("-inf"), tl.float32)
    total = tl.full((TOKENS,), 0.0, tl.float32)
    merged = tl.full((TOKENS, HEAD_DIM), 0.0, tl.float32)
    for i in range(parts):
        others = rows & (tl.full((TOKENS,), 0, tl.int32) + i != own)
        new = tl.load(lse_at, mask=others, other=float("-inf"))
        y = tl.load(out_at, mask=cells & others[:, None], other=0.0).to(tl.float32)
        larger = tl.maximum(most, new)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        kept, weight = tl.exp(most - base), tl.exp(new - base)
        merged = merged * kept[:, None] + tl.where(new == float("-inf"), 0.0, weight)[:, None] * y
        total = total * kept + weight
        most = larger
        lse_at += lse_n
        out_at += out_n
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    into_at = into + b * into_b + h * into_h + s[:, None] * into_s + d[None, :] * into_d
    tl.store(into_at, merged.to(into.dtype.element_ty), mask=cells)
    lse = tl.where(total == 0.0, float("-inf"), most + tl.log(total))
    tl.store(into_lse + b * into_lse_b + h * into_lse_h + s * into_lse_s, lse, mask=rows)


_Launch = tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], Callable[[int], Any]]
_launches: dict[Hashable, _Launch | None] = {}
"""(what launches a compiled kernel, its arguments before and behind the tensors, what tells the current stream), by all
that triton compiles for: shapes, strides, dtypes and alignment. triton's own function works these out at each launch,
for five times as long. None: no kernel takes such tensors."""


def _launch_again(launch: _Launch, device: int, given: Sequence[Any]) -> None:
    """Launch a kernel that was launched before on tensors like these."""
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # triton launches on the current device
            _launch_again(launch, device, given)
        return
    run, how, numbers, current_stream = launch
    run(*how[0], current_stream(device), *how[1:], *given, *numbers)


def _launch_first(key: Hashable, kernel: Any, given: Sequence[Any], grid: tuple[int, ...], numbers: Any) -> None:
    """Launch a kernel by triton's own function, which compiles it, and remember by its key how."""
    x = given[0] if isinstance(given[0], Tensor) else given[0][0]
    if x.get_device() >= 0 and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.get_device()):
            _launch_first(key, kernel, given, grid, numbers)
        return
    compiled = kernel[grid](*given, *numbers, enable_fp_fusion=True)  # as until triton 3.10
    if compiled is not None:  # None in triton's interpreter
        gpu: Any = driver.active
        how = (grid, compiled.function, compiled.packed_metadata, None, None, None)  # without hooks
        _launches[key] = compiled.run, how, numbers, gpu.get_current_stream


def fold_fused_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """`fold_` in one kernel; out, lse and part_lse in fp32, part_out in fp32, bf16 or fp16, any strides.

    The new lse is within 2^-23 and a rounding of torch.logaddexp's. Raises ValueError for other dtypes.
    """
    device = out.get_device()  # -1 of a CPU, in triton's interpreter
    a, b, c, d = out.data_ptr(), lse.data_ptr(), part_out.data_ptr(), part_lse.data_ptr()
    misaligned = (a | b | c | d) % ALIGNED and (a % ALIGNED, b % ALIGNED, c % ALIGNED, d % ALIGNED)
    key = (
        device, out.shape, out.stride(), lse.stride(), part_out.stride(), part_lse.stride(), out.dtype, lse.dtype,
        part_out.dtype, part_lse.dtype, misaligned,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is not None:
        _launch_again(launch, device, (out, lse, part_out, part_lse))
    else:
        _fold_first(key, (out, lse), (part_out, part_lse), _fold_kernel, (out, lse, part_out, part_lse))


def folds_fused_(totals: Sequence[Pair], parts: Sequence[Pair]) -> bool:
    """`fold_fused_` of several (out_BSHD, lse_BHS) in one kernel. Returns False, with nothing done, unless all are
    alike in shapes, strides and dtypes.
    """
    outs, lses, part_outs, part_lses = given = (*zip(*totals, strict=True), *zip(*parts, strict=True))
    device, key = _key(FOLDS, given)
    launch = _launches.get(key)
    if launch is not None:
        _launch_again(launch, device, given)
    elif key in _launches or not all(map(_alike, (outs, lses, part_outs, part_lses))):
        _launches[key] = None
        return False
    else:
        _fold_first(key, totals[0], parts[0], _folds_kernel, given, results=len(totals))
    return True


def _fold_first(
    key: Hashable, total: Pair, part: Pair, kernel: Any, given: Sequence[Any], *, results: int | None = None
) -> None:
    """Launch a kernel that folds what is like this part into what is like this total; of several, how many `results`
    there are.
    """
    (out, lse), (part_out, part_lse) = total, part
    if not out.dtype == lse.dtype == part_lse.dtype == torch.float32:
        raise ValueError(f"accumulators of {out.dtype}, {lse.dtype}, {part_lse.dtype}: the fused fold is for float32")
    if not out.numel():
        return
    batch, tokens, heads, head_dim = out.shape
    before, count = ((batch,), (results,)) if results else ((), ())
    at_once, padded = _rows_at_once(head_dim)
    strides = chain(out.stride(), lse.stride(), part_out.stride(), part_lse.stride())
    numbers = (*before, tokens, head_dim, *strides, *count, at_once, padded)
    grid = (triton.cdiv(tokens, at_once), heads, batch * (results or 1))
    _launch_first(key, kernel, given, grid, numbers)


def merge_fused_(into: Pair, parts: Pair, own: int) -> None:
    """Merge all parts but one into a new result, in one kernel: parts are (N, B, S, H, D) and (N, B, H, S).

    The outputs may be of any dtype, statistics are fp32. Raises ValueError for others.
    """
    (out, lse), (outs, lses) = into, parts
    if not lse.dtype == lses.dtype == torch.float32:
        raise ValueError(f"statistics of {lse.dtype}, {lses.dtype}: the fused merge is for float32")
    if not out.numel():
        return
    given = (out, lse, outs, lses)
    device, key = _key((MERGE, own), (given,))
    launch = _launches.get(key)
    if launch is not None:
        _launch_again(launch, device, given)
        return
    batch, tokens, heads, head_dim = out.shape
    at_once, padded = _rows_at_once(head_dim)
    strides = chain(out.stride(), lse.stride(), outs.stride(), lses.stride())
    numbers = (outs.shape[0], own, tokens, head_dim, *strides, at_once, padded)
    _launch_first(key, _merge_kernel, given, (triton.cdiv(tokens, at_once), heads, batch), numbers)


def sums_fused_(into: Sequence[Tensor], parts: Sequence[Tensor], *, added: int, first: int = 0) -> bool:
    """Add to tensors x_BSHD in fp32, or overwrite them, in one kernel: into[i] += parts[i] where bit i of `added`
    is set, else into[i] = parts[i]. Parts have the tokens from `first` on, and those that they lack are zeros.

    Returns False, with nothing done, unless all are alike in shapes, strides and dtypes. Raises ValueError for sums of
    other dtypes.
    """
    # `_key`'s, without its call: this is launched for every block.
    given, device = (tuple(into), tuple(parts)), into[0].get_device()
    of_each = [(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED) for x in (*into, *parts)]
    key = (SUMS, added, first, device, *of_each)
    launch = _launches.get(key)
    if launch is not None:
        _launch_again(launch, device, given)
        return True
    if key in _launches or not (_alike(into) and _alike(parts)):
        _launches[key] = None
        return False
    x, part = into[0], parts[0]
    if x.dtype != torch.float32:
        raise ValueError(f"sums of {x.dtype}: the fused sum is for float32")
    if x.numel():
        batch, tokens, heads, head_dim = x.shape
        at_once, padded = _rows_at_once(head_dim)
        strides = (*x.stride(), *part.stride())
        numbers = (batch, tokens, head_dim, first, part.shape[1], *strides, len(into), at_once, padded, added)
        grid = (triton.cdiv(tokens, at_once), heads, batch * len(into))
        _launch_first(key, _sums_kernel, given, grid, numbers)
    return True


def _key(which: Hashable, given: Sequence[Sequence[Tensor]]) -> tuple[int, Hashable]:
    """(the device of some tensors, all that a launch on them depends on)."""
    device = given[0][0].get_device()  # -1 of a CPU, in triton's interpreter
    of_each = [(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED) for tensors in given for x in tensors]
    return device, (which, device, *of_each)


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all have one shape, dtype and order in memory."""
    x = tensors[0]
    return all(y.shape == x.shape and y.dtype == x.dtype and y.stride() == x.stride() for y in tensors[1:])


def _rows_at_once(head_dim: int) -> tuple[int, int]:
    """(tokens of a program, head_dim rounded up to a power of two)."""
    padded = triton.next_power_of_2(head_dim)
    return max(1, ELEMENTS // padded), padded
