"""Stubs of all that a GPU and NCCL would do, so that what is left of a step is the work of its host.

Kernels return tensors with nothing in them, streams and events are numbers, torch.distributed is torch's own with its
backend that sends nothing (`fake`), and triton compiles its kernels for an H100, and launches none.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_bench.kernels import fold
from sp_bench.kernels.contract import BlockKernel
from sp_bench.run.devices import HostClock


class StubKernel(BlockKernel):
    """Returns tensors with nothing in them."""

    name: ClassVar[str] = "stub"

    @classmethod
    def refuses(cls, device: str, dtype: str, head_dim: int) -> str:
        return ""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def stub_flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """flash_attn's function of that name (2.7 and 2.8): tensors with nothing in them."""
    out, lse = torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return out, lse, None, None


def stub_flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """flash_attn's function of that name, which writes nothing to the gradients that it is given."""


@dataclass
class StubDevice(HostClock):
    """A device that does nothing (run.devices.Device), and counts what is asked of it."""

    capturing: bool = False
    finished: Any = None
    asked: Counter[str] = field(default_factory=Counter)

    def current(self) -> int:
        return -1

    def lane(self, number: int) -> int:
        return number

    def switch(self, stream: int) -> None:
        """Change no stream: this device has one."""

    def record(self, stream: int, event: int | None = None) -> int:
        self.asked["record"] += 1
        return 0

    def wait(self, stream: int, event: int) -> None:
        self.asked["wait"] += 1

    def recorder(self, stream: int) -> tuple[int, Callable[[], Any]]:
        return 0, partial(self.record, stream)

    def waiter(self, stream: int, event: int) -> Callable[[], Any]:
        return partial(self.wait, stream, event)

    def switcher(self, stream: int) -> Callable[[], Any]:
        return partial(self.switch, stream)

    def mark(self) -> float:
        self.asked["mark"] += 1
        return 0.0

    def capture(self, queue: Callable[[], Any]) -> tuple[None, Any]:
        return None, queue()

    def replay(self, graph: None) -> None:
        """Do nothing: capture has called what it would queue."""


class TritonDriver:
    """A GPU for triton (triton.runtime.driver) on which nothing is launched."""

    launched: ClassVar[list[tuple]] = []
    """The arguments of the last launch."""
    utils = SimpleNamespace(
        load_binary=lambda *kernel: (0, 0, 0, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 2**20},
    )

    @staticmethod
    def launcher_cls(source: object, metadata: object) -> Callable[..., None]:
        """The function that would launch a kernel."""

        def launch(*given: Any) -> None:
            TritonDriver.launched[:] = [given]

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def triton_stubbed() -> Iterator[Any]:
    """The module of the kernels that GPUs take, which are compiled and not launched; folds of CPU tensors take them."""
    from triton.runtime import driver

    fold_triton = importlib.import_module("sp_bench.kernels.fold_triton")
    with ExitStack() as all_of:
        all_of.enter_context(patch.object(driver, "_active", TritonDriver()))
        all_of.enter_context(patch.object(fold, "fused_on", lambda device: fold_triton))
        yield fold_triton


@contextmanager
def stubbed(rank: int, n: int) -> Iterator[None]:
    """torch.distributed of n ranks that takes everything and sends nothing, and triton that launches nothing.

    Messages are taken as by NCCL, several as one operation.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # pyright: ignore[reportOptionalMemberAccess]
    try:
        with ExitStack() as all_of:
            all_of.enter_context(triton_stubbed())
            all_of.enter_context(patch.object(c10d, "_set_pg_timeout", lambda *timeout: None))
            all_of.enter_context(patch.object(type(backend), "supports_coalescing", True))
            yield
    finally:
        dist.destroy_process_group()
