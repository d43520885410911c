"""The common base of backends for NVIDIA GPUs that compute decode steps alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sp_bench.kernels.contract import PagedKernel
from sp_bench.kernels.cuda import CudaKernel
from sp_bench.kernels.entries import ABSORBED, Entries


class StepKernel(CudaKernel, PagedKernel):
    """A kernel of entries, without a backward, whose package plans for the lengths of caches.

    What it plans is made once, as these are the same at every step.
    """

    narrow = frozenset({ABSORBED})

    def __init__(self) -> None:
        self._planned: dict[tuple[Any, ...], tuple[Entries, Any]] = {}

    def planned(self, entries: Entries, shape: tuple[Any, ...], plan: Callable[[], Any]) -> Any:
        """The plan for these entries and queries of that shape and dtype, made at the first call."""
        key = (id(entries), *shape)
        if key not in self._planned:
            self._planned[key] = entries, plan()  # the entries live as long, so that the id is theirs
        return self._planned[key][1]

    @classmethod
    def refuses(cls, device: str, dtype: str, head_dim: int) -> str:
        return super().refuses(device, dtype, head_dim) or "it has no backward, and is for workload=decode alone"

    @classmethod
    def refuses_caches(cls, device: str, dtype: str, head_dim: int, value_dim: int) -> str:
        return super().refuses(device, dtype, head_dim) or cls.refuses_widths(head_dim, value_dim)

    @classmethod
    @abstractmethod
    def refuses_widths(cls, head_dim: int, value_dim: int) -> str:
        """Why it doesn't take keys and values of these widths; empty if it does."""

    @classmethod
    def most_head_dim(cls, capability: tuple[int, int]) -> int:
        return ABSORBED[0]

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError(f"{self.name} has no backward: `refuses` says so")
