"""ring-flash-attention: Ring, zigzag and Striped attention, and the all-gather of Llama 3, on flash_attn.

Source: Zhu, https://github.com/zhuzilin/ring-flash-attention. The package's __init__ imports transformers, which
attention doesn't need, so its modules are imported without it.

    ring     contiguous, any mask       zigzag   zigzag, causal only
    stripe   striped, causal only       llama3   contiguous, any mask, batch 1: its sequences are packed

In the first three a rank adds up dKV in fp32 and sends it on, in a ring of one to itself.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer, refuse_full_mask, refuse_lonely_ring, refuse_mixed_rings
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    from sp_bench.peers.peer import Attention

NAME = "ring_flash_attn"
LAYOUTS = {"ring": "contiguous", "zigzag": "zigzag", "stripe": "striped", "llama3": "contiguous"}
HEADS_STRIDE = 1
"""Key heads that llama3 gathers at a time: the fewest, for the most overlap."""


@dataclass(frozen=True, kw_only=True)
class RingFlashAttn(Peer):
    """ring-flash-attention. Auto is zigzag, which balances a causal mask, or ring for a full mask."""

    name: ClassVar[str] = NAME
    distribution: ClassVar[str] = "ring-flash-attn"
    module: ClassVar[str] = NAME
    algorithms: ClassVar[tuple[str, ...]] = tuple(LAYOUTS)

    def preferred(self) -> str:
        return "zigzag" if self.causal else "ring"

    def wanted_layout(self) -> str:
        return LAYOUTS[self.algorithm]

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.algorithm in ("zigzag", "stripe"):
            refuse_full_mask(self, "ring")
        if self.algorithm != "llama3":
            refuse_mixed_rings(self, problem)
            refuse_lonely_ring(self, problem.n, "gpus=2")
        if self.algorithm == "llama3" and problem.batch > 1:
            rule = f"{self.name}'s llama3 splits packed sequences as one, not each of a batch"
            raise RequestError(f"batch={problem.batch}", rule, "batch=1 would work")

    def attention(self, problem: Problem) -> Attention:
        from sp_bench.peers import stand_in

        stand_in.install()
        _without_transformers()
        match self.algorithm:
            case "zigzag":
                from ring_flash_attn.zigzag_ring_flash_attn import (  # pyright: ignore[reportMissingImports]
                    zigzag_ring_flash_attn_func as function,
                )
            case "stripe":
                from ring_flash_attn.stripe_flash_attn import (  # pyright: ignore[reportMissingImports]
                    stripe_flash_attn_func as function,
                )
            case "llama3":
                return _llama3(problem, self.causal)
            case _:
                from ring_flash_attn.ring_flash_attn import (  # pyright: ignore[reportMissingImports]
                    ring_flash_attn_func as function,
                )
        return lambda q, k, v: function(q, k, v, causal=self.causal)


def _llama3(problem: Problem, causal: bool) -> Attention:
    import torch
    import torch.distributed as dist
    from ring_flash_attn.llama3_flash_attn_varlen import (  # pyright: ignore[reportMissingImports]
        llama3_flash_attn_prepare_cu_seqlens,
        llama3_flash_attn_varlen_func,
    )

    whole = torch.tensor([0, problem.seqlen], dtype=torch.int32)
    *bounds, k_slice = llama3_flash_attn_prepare_cu_seqlens(whole, causal, dist.get_rank(), problem.n)
    options = {"heads_k_stride": HEADS_STRIDE, "local_k_slice": k_slice, "causal": causal}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return llama3_flash_attn_varlen_func(q[0], k[0], v[0], *bounds, **options)[None]

    return attend


def _without_transformers() -> None:
    """Make the package's modules importable without its __init__."""
    if NAME not in sys.modules:
        spec = importlib.util.find_spec(NAME)
        assert spec, "checked before the ranks were started"
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
