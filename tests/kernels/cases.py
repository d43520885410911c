"""The kernels that the contract's tests run with: all that this machine's devices can do, and fakes of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest
import torch

from sp_bench.kernels import KERNELS, BlockKernel
from tests.kernels import fakes
from tests.support.dense import HEAD_DIM, TOLERANCE

ON_CPU = sorted(name for name, kernel in KERNELS.items() if not kernel.refuses("cpu", "float32", HEAD_DIM))
NARROW = (torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """A kernel, and what it computes with."""

    name: str
    dtype: torch.dtype
    device: str
    fake: bool

    @contextmanager
    def kernel(self) -> Iterator[BlockKernel]:
        """The kernel, with what it calls in its place."""
        with fakes.installed(self.name) if self.fake else nullcontext():
            yield KERNELS[self.name]()

    def __str__(self) -> str:
        where = "fake" if self.fake else self.device
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}-{where}"


def _real(device: str) -> list[Case]:
    """Those that take the dtype on that device of this machine."""
    found = []
    for name, kernel in KERNELS.items():
        for dtype in TOLERANCE:
            if not kernel.refuses(device, str(dtype).removeprefix("torch."), HEAD_DIM):
                found.append(Case(name, dtype, device, fake=False))
    return found


CASES = [
    *_real("cpu"),
    *(Case(name, dtype, "cpu", fake=True) for name in fakes.FAKED for dtype in NARROW),
    *(_real("cuda") if torch.cuda.is_available() else ()),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
one_dtype_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.dtype == (torch.float32 if case.name in ON_CPU else NARROW[0])], ids=str
)
