"""Agreement with an implementation that is not ours: torch's private templated ring attention, on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.run import torch_ring
from tests.support.attention_cases import Case
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks

MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
THERE = Path(torch.__file__).parents[1].joinpath(*MODULE.split(".")).with_suffix(".py").exists()
"""find_spec would import what the module is in, which takes a second."""


@pytest.mark.skipif(not THERE, reason=f"this torch has no {MODULE}: nothing independent to agree with")
@pytest.mark.parametrize("n", [2, 3, 4, exhaustive(8)])
@pytest.mark.parametrize(("layout", "causal"), [("contiguous", True), ("contiguous", False), ("zigzag", True)])
def test_ring_agrees_with_torch(ranks: Ranks, n: int, layout: str, causal: bool) -> None:
    case = Case(n=n, method="ring", layout=layout, causal=causal, dtype="float32", tokens=16)
    for found in ranks.run(torch_ring.disagreement, case)[:n]:
        assert max(found.values()) < 1e-6, found
        assert set(found) == {"out", "dq", "dk", "dv"}
