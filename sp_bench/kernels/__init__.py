"""The block kernels that all methods share, behind one contract (BlockKernel)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from sp_bench.errors import RequestError, unknown
from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.kernels.aten_flash import AtenFlash
from sp_bench.kernels.contract import BlockKernel
from sp_bench.kernels.cuda import CudaKernel
from sp_bench.kernels.cudnn import Cudnn
from sp_bench.kernels.flash_attn import FlashAttn
from sp_bench.kernels.flash_attn_3 import FlashAttn3
from sp_bench.kernels.flash_attn_4 import FlashAttn4
from sp_bench.kernels.flash_mla import FlashMla
from sp_bench.kernels.flashinfer import FlashInfer
from sp_bench.kernels.fold import PACKAGES, fold_
from sp_bench.kernels.reference import Reference

KERNELS: dict[str, type[BlockKernel]] = {
    kernel.name: kernel
    for kernel in (Reference, AtenCpu, AtenFlash, Cudnn, FlashAttn, FlashAttn3, FlashAttn4, FlashInfer, FlashMla)
}
"""Every backend by its name. A new one is imported above and listed here."""


def packages() -> set[str]:
    """The distributions besides torch whose code a kernel or a fold may run."""
    return {*PACKAGES.values(), *(name for kernel in KERNELS.values() for name in kernel.packages.values())}


HOPPER = 9
"""The major compute capability of Hopper GPUs."""

__all__ = ["KERNELS", "BlockKernel", "auto_order", "choose", "choose_for_caches", "fold_"]


def choose(name: str, device: str, dtype: str, head_dim: int) -> BlockKernel:
    """The kernel of that name, or for `auto` the fastest that supports the device, dtype and head_dim.

    `auto` warns of a faster kernel that is there and doesn't, which is in the chosen one's `notes`.
    Raises RequestError for an unknown name, or a kernel that doesn't support them.
    """
    if name != "auto":
        return _named(name, lambda kernel: kernel.refuses(device, dtype, head_dim))
    passed_over: list[str] = []
    for kernel in auto_order(device):
        if not (why := kernel.refuses(device, dtype, head_dim)):
            chosen = kernel()
            chosen.notes = tuple(passed_over)
            return chosen
        if issubclass(kernel, CudaKernel) and device == "cuda" and kernel.is_there():
            passed_over.append(f"kernel=auto passes over {kernel.name}, which is there: {why}")
            warnings.warn(passed_over[-1], stacklevel=2)
    raise _none_takes(dtype, device)


def choose_for_caches(
    name: str, device: str, dtype: str, head_dim: int, value_dim: int, page: int | None
) -> BlockKernel:
    """The kernel of that name for decode steps, or for `auto` the first of `caches_order` that supports the device,
    dtype and widths; those that read pages of `page` tokens as they lie come before the others, if there are pages.

    Raises RequestError for an unknown name, or a kernel that doesn't support them.
    """

    def refusal(kernel: type[BlockKernel]) -> str:
        return kernel.refuses_caches(device, dtype, head_dim, value_dim)

    if name != "auto":
        chosen = _named(name, refusal)
    else:
        order = sorted(caches_order(device), key=lambda kernel: page is not None and not kernel.takes_pages(page))
        kind = next((kernel for kernel in order if not refusal(kernel)), None)
        if kind is None:
            raise _none_takes(dtype, device)
        chosen = kind()
    chosen.decodes = True
    if page is not None and not chosen.takes_pages(page):
        chosen.notes = (f"{chosen.name} reads no pages of {page} tokens: keys are copied by an index before it",)
    return chosen


def _named(name: str, refusal: Callable[[type[BlockKernel]], str]) -> BlockKernel:
    """The kernel of that name. Raises RequestError for an unknown one, or what it refuses."""
    if name not in KERNELS:
        raise unknown("kernel", name, [*KERNELS, "auto"])
    if why := refusal(KERNELS[name]):
        raise RequestError(f"kernel={name}", why, "kernel=auto would work")
    return KERNELS[name]()


def _none_takes(dtype: str, device: str) -> RequestError:
    return RequestError(f"dtype={dtype}", f"no kernel takes it on {device}", "dtype=float32 would work")


def caches_order(device: str) -> tuple[type[BlockKernel], ...]:
    """The kernels that `auto` tries for decode steps: first those that cut a cache into parts and read pages.

    No source compares them for rows and caches as they are here.
    """
    if device != "cuda":
        return auto_order(device)
    first = (FlashAttn3, FlashMla, FlashAttn, FlashInfer)
    return (*first, *(kernel for kernel in auto_order(device) if kernel not in first))


def auto_order(device: str) -> tuple[type[BlockKernel], ...]:
    """The kernels that `auto` tries on a device, fastest first by published figures (docs/reference/kernels.md)."""
    if device != "cuda":
        return (AtenCpu, Reference)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < HOPPER:
        return (FlashAttn, AtenFlash, Cudnn, Reference)
    return (FlashAttn4, FlashAttn3, Cudnn, FlashAttn, AtenFlash, Reference)
