"""Jobs of ranks in the tests of sp_bench.advise. Imported inside the ranks: no pytest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sp_bench.measure.pool import report
from sp_bench.plan.layout import Layout
from sp_bench.plan.mask import MASKS, Mask
from sp_bench.run.sharding import shard
from tests.support.attention_cases import Difference, difference, inputs, reference


@dataclass(frozen=True)
class Printed:
    """Python that advice printed, and what it is to compute."""

    code: str
    mask: Mask
    layout: Layout
    """With the method's head-parallel degree."""
    seqlen: int
    heads: int
    kv_heads: int
    dtype: str


def stand_in_for_flash_attn() -> None:
    from sp_bench.peers import stand_in

    stand_in.install()


def differences(cases: Sequence[Printed]) -> list[list[Difference]]:
    """For each case, how far this rank's out, dq, dk and dv are from fp64 with a dense mask."""
    found = []
    for case in cases:
        if dist.get_rank() == 0:
            report(case.code)
        full = inputs(case.seqlen, case.kv_heads, case.dtype, heads=case.heads)

        def own(x: torch.Tensor, layout: Layout = case.layout) -> torch.Tensor:
            return shard(x, layout, dist.get_rank(), dist.get_world_size())

        leaves = [own(x).requires_grad_() for x in full[:3]]
        names: dict[str, Any] = dict(zip(("q", "k", "v"), leaves, strict=True))
        exec(case.code, names)
        got = (names["out"].detach(), *torch.autograd.grad(names["out"], leaves, own(full.dout_BSHD)))
        mask = MASKS.get(case.mask.name, case.mask)
        wanted = reference(case.seqlen, case.kv_heads, case.dtype, mask, case.heads)
        found.append([difference(x, own(y)) for x, y in zip(got, wanted, strict=True)])
    return found
