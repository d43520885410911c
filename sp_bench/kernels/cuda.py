"""The common base of backends for NVIDIA GPUs: the checks of what they support."""

from __future__ import annotations

from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.kernels.contract import BlockKernel


class CudaKernel(BlockKernel):
    """Attention in fp16 or bf16 on GPUs of some compute capabilities, from torch or another package."""

    majors: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)
    """The major compute capabilities that it supports: 8 Ampere and Ada, 9 Hopper, 10 and up Blackwell."""
    package: ClassVar[str] = ""
    """The module with its functions; empty for torch's own."""
    install: ClassVar[str] = ""
    """The command that installs the package."""

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
        if deterministic() and (why := cls.refuses_deterministic(capability, head_dim)):
            return why
        return cls._refuses_software()

    @classmethod
    def most_head_dim(cls, capability: tuple[int, int]) -> int:
        """The largest head_dim that forward and backward support on a GPU of that compute capability."""
        return 256

    @classmethod
    def refuses_deterministic(cls, capability: tuple[int, int], head_dim: int) -> str:
        """Why it has no deterministic backward there; empty if it has one."""
        return ""

    @classmethod
    def is_there(cls) -> bool:
        """Whether its package is there, of whatever release."""
        try:
            return bool(cls.package) and find_spec(cls.package) is not None
        except (ImportError, ValueError):  # the package above it is not there
            return False

    @classmethod
    def _refuses_software(cls) -> str:
        """Why the installed software or torch's settings rule the backend out; empty if they don't."""
        try:
            cls.module()
        except RequestError as error:
            return str(error)
        return ""

    @cached_property
    def functions(self) -> Any:
        """Its `module`, looked up once: to look it up takes longer than to launch a kernel."""
        return self.module()

    @classmethod
    def module(cls) -> Any:
        """The imported package. Raises RequestError if it can't be imported."""
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
    # Ranks that run peers on CPUs put a module of this suite in flash_attn's place.
    return module.__name__ != package


def deterministic() -> bool:
    """Whether torch.use_deterministic_algorithms is on: backends that have a deterministic backward then use it."""
    return torch.are_deterministic_algorithms_enabled()


def beneath(function: Any) -> Any:
    """The function that torch.library.custom_op wraps; the function itself, if none does.

    The wrapper is for autograd and compilers, of which a block has neither, and takes longer than a launch.
    """
    return getattr(function, "_init_fn", function)


@cache
def no_state(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A placeholder for the state of a generator, which nobody reads without dropout."""
    return torch.empty(shape, dtype=dtype, device=device)


def unit_stride(x: Tensor) -> Tensor:
    """x with head_dim contiguous, which every backend needs; a copy if it wasn't."""
    return x if x.stride(-1) == 1 else x.contiguous()
