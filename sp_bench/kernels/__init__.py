"""The block kernels that all methods share, behind one contract (BlockKernel)."""

from __future__ import annotations

import warnings

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
from sp_bench.kernels.fold import PACKAGES, fold_
from sp_bench.kernels.reference import Reference

KERNELS: dict[str, type[BlockKernel]] = {
    kernel.name: kernel for kernel in (Reference, AtenCpu, AtenFlash, Cudnn, FlashAttn, FlashAttn3, FlashAttn4)
}
"""Every backend by its name. A new one is imported above and listed here."""


def packages() -> set[str]:
    """The distributions besides torch whose code a kernel or a fold may run."""
    return {*PACKAGES.values(), *(name for kernel in KERNELS.values() for name in kernel.packages.values())}


HOPPER = 9
"""The major compute capability of Hopper GPUs."""

__all__ = ["KERNELS", "BlockKernel", "auto_order", "choose", "fold_"]


def choose(name: str, device: str, dtype: str, head_dim: int) -> BlockKernel:
    """The kernel of that name, or for `auto` the fastest that supports the device, dtype and head_dim.

    `auto` warns of a faster kernel that is there and doesn't, which is in the chosen one's `notes`.
    Raises RequestError for an unknown name, or a kernel that doesn't support them.
    """
    if name != "auto":
        if name not in KERNELS:
            raise unknown("kernel", name, [*KERNELS, "auto"])
        if why := KERNELS[name].refuses(device, dtype, head_dim):
            raise RequestError(f"kernel={name}", why, "kernel=auto would work")
        return KERNELS[name]()
    passed_over: list[str] = []
    for kernel in auto_order(device):
        if not (why := kernel.refuses(device, dtype, head_dim)):
            chosen = kernel()
            chosen.notes = tuple(passed_over)
            return chosen
        if issubclass(kernel, CudaKernel) and device == "cuda" and kernel.is_there():
            passed_over.append(f"kernel=auto passes over {kernel.name}, which is there: {why}")
            warnings.warn(passed_over[-1], stacklevel=2)
    raise RequestError(f"dtype={dtype}", f"no kernel takes it on {device}", "dtype=float32 would work")


def auto_order(device: str) -> tuple[type[BlockKernel], ...]:
    """The kernels that `auto` tries on a device, fastest first by published figures (docs/reference/kernels.md)."""
    if device != "cuda":
        return (AtenCpu, Reference)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < HOPPER:
        return (FlashAttn, AtenFlash, Cudnn, Reference)
    return (FlashAttn4, FlashAttn3, Cudnn, FlashAttn, AtenFlash, Reference)
