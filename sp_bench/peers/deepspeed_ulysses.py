"""DeepSpeed-Ulysses: the original DistributedAttention, around flash_attn.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", 2023, https://github.com/deepspeedai/DeepSpeed, deepspeed/sequence/layer.py.

Layout: contiguous. Each all-to-all blocks: overlapping them takes CUDA streams.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sp_bench.peers.peer import Peer, refuse_uneven_heads
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sp_bench.peers.peer import Attention

HEADS_DIM, TOKENS_DIM, BATCH_DIM = 2, 1, 0


@dataclass(frozen=True, kw_only=True)
class DeepSpeedUlysses(Peer):
    """DeepSpeed-Ulysses, which has one algorithm."""

    name: ClassVar[str] = "deepspeed_ulysses"
    distribution: ClassVar[str] = "deepspeed"
    module: ClassVar[str] = "deepspeed"
    algorithms: ClassVar[tuple[str, ...]] = ("ulysses",)

    def wanted_layout(self) -> str:
        return "contiguous"

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        refuse_uneven_heads(self, problem, problem.n)

    def attention(self, problem: Problem, device: torch.device, group: ProcessGroup | None = None) -> Attention:
        from sp_bench.peers import stand_in

        stand_in.install()
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        import deepspeed  # pyright: ignore[reportMissingImports]
        import torch.distributed as dist
        from deepspeed.sequence.layer import DistributedAttention  # pyright: ignore[reportMissingImports]
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

        # Without this DeepSpeed looks which C++ extensions it can compile here, and compiles one. None is used.
        deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
        ranks: Any = group or dist.group.WORLD  # the package declares its own class of groups
        attention = DistributedAttention(flash_attn_func, ranks, HEADS_DIM, TOKENS_DIM)
        return lambda q, k, v: attention(q, k, v, BATCH_DIM, causal=self.causal)
