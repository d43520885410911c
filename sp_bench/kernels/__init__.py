"""The block kernels that all methods share, behind one contract (BlockKernel)."""

from __future__ import annotations

from sp_bench.errors import RequestError, unknown
from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.kernels.contract import BlockKernel
from sp_bench.kernels.fold import fold_
from sp_bench.kernels.reference import Reference

KERNELS: dict[str, type[BlockKernel]] = {kernel.name: kernel for kernel in (Reference, AtenCpu)}
"""Every backend by its name. A new one is imported above and listed here."""

__all__ = ["KERNELS", "BlockKernel", "choose", "fold_"]


def choose(name: str, device: str, dtype: str) -> BlockKernel:
    """The kernel of that name, or for `auto` the fastest that takes the device and dtype.

    Raises RequestError for an unknown name, or one that refuses the device or dtype.
    """
    if name != "auto":
        if name not in KERNELS:
            raise unknown("kernel", name, [*KERNELS, "auto"])
        if why := KERNELS[name].refuses(device, dtype):
            raise RequestError(f"kernel={name}", why, "kernel=auto would work")
        return KERNELS[name]()
    for kernel in (AtenCpu, Reference):
        if not kernel.refuses(device, dtype):
            return kernel()
    raise RequestError(f"dtype={dtype}", f"no kernel takes it on {device}", "dtype=float32 would work")
