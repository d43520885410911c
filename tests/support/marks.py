"""Tests that are skipped or left out, and why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import SIZES

NEEDS_A_GPU = "needs a GPU"
"""The reason of the only skips that CI has, whose machines have none."""


def exhaustive(*case: object) -> Any:
    """A further case of what others cover, which only `make test-all` runs."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def long(*case: object) -> Any:
    """A case that takes long and is the only one of something, which `make test` leaves out."""
    return pytest.param(*case, marks=pytest.mark.long)


def exhaustive_from(n: int) -> list[Any]:
    """SIZES, of which `make test` leaves out those from n on."""
    return [exhaustive(size) if size >= n else size for size in SIZES]
