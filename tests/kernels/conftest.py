"""Fixtures that the tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sp_bench.kernels import BlockKernel
from tests.kernels.cases import Case


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Blocks of a few tokens gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernel(case: Case) -> Iterator[BlockKernel]:
    """The kernel of a test's case."""
    with case.kernel() as found:
        yield found
