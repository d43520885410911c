"""Buffers in memory that NCCL allocates and that is registered with communicators, so that it sends without copies.

With symmetric registration, from NCCL 2.27 on, a window of the memory is known to all ranks of a communicator. All
ranks allocate the same buffers in the same order, as that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_bench.errors import RequestError

REGISTERED_FROM = (2, 27)
"""The first NCCL with windows (ncclCommWindowRegister)."""


class Registered:
    """A pool of NCCL's memory on one GPU, registered with the communicators of a transport."""

    def __init__(self, device: torch.device, version: tuple[Any, ...]) -> None:
        """`version` is NCCL's. Raises RequestError for one that registers no windows."""
        if version[:2] < REGISTERED_FROM:
            given, least = (".".join(map(str, numbers)) for numbers in (version, REGISTERED_FROM))
            rule = f"windows of registered memory take NCCL {least}, and this is {given}"
            raise RequestError("registered_buffers=true", rule, "registered_buffers=false would work")
        self._device = device
        self._pool: Any = None
        self._with: list[Any] = []
        """The backends of the groups that the pool is registered with."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, groups: Sequence[Any]) -> Tensor:
        """A tensor in the pool, which is registered with no group until `register`."""
        if self._with:  # what is registered may be in use
            torch.cuda.synchronize(self._device)
            for backend in self._with:
                backend.deregister_mem_pool(self._pool)
            self._with = []
        if self._pool is None:
            self._pool = torch.cuda.MemPool(groups[0]._get_backend(self._device).mem_allocator)
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def register(self, groups: Sequence[Any]) -> None:
        """Register what was allocated with NCCL's groups. Raises RequestError for a torch without windows."""
        if self._pool is None or self._with:
            return
        for group in groups:
            backend = group._get_backend(self._device)
            try:
                backend.register_mem_pool(self._pool, symm=True)
            except TypeError as error:  # the argument is not known
                rule = f"torch {torch.__version__} has no symmetric registration ({error})"
                raise RequestError("registered_buffers=true", rule, "torch 2.9 or later would work") from error
            self._with.append(backend)
