"""What the backends for NVIDIA GPUs have in common: what they refuse, and why."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.kernels.contract import BlockKernel


class CudaKernel(BlockKernel):
    """Attention in fp16 or bf16 on GPUs of some compute capabilities, from torch or from a package beside it."""

    majors: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)
    """The compute capabilities that it has kernels for, by their first number: 8 Ampere and Ada, 9 Hopper, 10 and up
    Blackwell."""
    package: ClassVar[str] = ""
    """The module that has its functions; empty for torch's own."""
    install: ClassVar[str] = ""
    """How to get the package."""

    @classmethod
    def refuses(cls, device: str, dtype: str, head_dim: int) -> str:
        if device != "cuda":
            return f"it runs on cuda only, not on {device}"
        if dtype not in ("float16", "bfloat16"):
            return f"it takes float16 and bfloat16, not {dtype}"
        if head_dim % 8:
            return f"it takes a head_dim that is a multiple of 8, not {head_dim}"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device here"
        capability = torch.cuda.get_device_capability()
        if capability[0] not in cls.majors:
            known = ", ".join(f"{major}.x" for major in cls.majors)
            return f"it is for GPUs of compute capability {known}, and this one has {capability[0]}.{capability[1]}"
        if head_dim > (most := cls.most_head_dim(capability)):
            return f"it takes a head_dim of at most {most} on this GPU, not {head_dim}"
        return cls._refuses_software()

    @classmethod
    def most_head_dim(cls, capability: tuple[int, int]) -> int:
        """The largest head_dim, forward and backward, on a GPU of that compute capability."""
        return 256

    @classmethod
    def _refuses_software(cls) -> str:
        """Why what is installed, or how torch is set, won't do; empty if it will."""
        try:
            cls.module()
        except RequestError as error:
            return str(error)
        return ""

    @classmethod
    def module(cls) -> Any:
        """The package. Raises RequestError where it can't be imported."""
        if not cls.package:
            return torch.ops.aten
        try:
            module = import_module(cls.package)
        except Exception as error:  # not there, or not made for this torch, CUDA or what else it builds on
            raise RequestError(
                f"import {cls.package}", str(error) or type(error).__name__, f"{cls.install} would install it"
            ) from None
        if _stands_in(module, cls.package):
            raise RequestError(f"import {cls.package}", "is not installed", f"{cls.install} would install it")
        return module


def _stands_in(module: ModuleType, package: str) -> bool:
    # Ranks that run peers on CPUs put a module of ours in flash_attn's place.
    return module.__name__ != package


def deterministic() -> bool:
    """Whether torch was asked for results that are the same in each run: backends with such a backward take that."""
    return torch.are_deterministic_algorithms_enabled()


def unit_stride(x: Tensor) -> Tensor:
    """x, with head_dim elements that lie together: no backend takes them otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()
