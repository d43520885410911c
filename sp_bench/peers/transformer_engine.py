"""Transformer Engine: context parallelism of DotProductAttention, on its cuDNN and FlashAttention kernels.

Source: https://github.com/NVIDIA/TransformerEngine, transformer_engine/pytorch/attention/dot_product_attention. It
takes GPUs only, and chooses its kernel itself (variables NVTE_FLASH_ATTN and NVTE_FUSED_ATTN, which records keep).

    p2p          KV goes round a ring                a2a       ranks split the heads, as in Ulysses
    all_gather   KV is gathered before it is used    a2a+p2p   `ulysses` consecutive ranks split the heads of a chunk,
                                                               and rings connect the chunks

Layout: zigzag, with two equal chunks on each rank, for any mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from sp_bench.errors import RequestError
from sp_bench.peers.peer import AUTO, Peer, refuse_uneven_heads
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sp_bench.peers.peer import Attention

HIERARCHICAL = "a2a+p2p"


@dataclass(frozen=True, kw_only=True)
class TransformerEngine(Peer):
    """Transformer Engine. Algorithms are the values of its cp_comm_type; auto is p2p, its default."""

    name: ClassVar[str] = "transformer_engine"
    distribution: ClassVar[str] = "transformer-engine"
    module: ClassVar[str] = "transformer_engine"
    install: ClassVar[str] = 'pip install "transformer-engine[pytorch]"'
    algorithms: ClassVar[tuple[str, ...]] = ("p2p", "all_gather", "a2a", HIERARCHICAL)
    on_cpus: ClassVar[bool] = False

    ulysses: int | str = AUTO
    """With a2a+p2p: the number of ranks that split the heads of a chunk; auto: as many as possible."""

    def wanted_layout(self) -> str:
        return "zigzag"

    def kernel_on(self, device: str) -> str:
        return self.name

    def refuse_device(self, device: str) -> None:
        if device != "cuda":
            rule = f"{self.distribution} takes tensors of GPUs only"
            raise RequestError(f"impl={self.name}", rule, "device=cuda, on a machine with GPUs, would work")

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.algorithm == "a2a":
            refuse_uneven_heads(self, problem, problem.n)
        if self.algorithm != HIERARCHICAL:
            return
        degrees = _degrees(problem)
        if not degrees or (self.ulysses != AUTO and (type(self.ulysses) is not int or self.ulysses not in degrees)):
            rule = f"must divide gpus={problem.n}, heads and kv_heads={problem.kv_heads}, and leave rings of two"
            choices = f"one of {', '.join(map(str, degrees))}" if degrees else "method.algorithm=p2p"
            raise RequestError(f"method.ulysses={self.ulysses}", rule, f"{choices} would work")

    def variant(self, problem: Problem) -> str:
        if self.algorithm != HIERARCHICAL:
            return self.algorithm
        u = self._degree(problem)
        return f"{self.algorithm} {u}x{problem.n // u}"

    @property
    def takes_group(self) -> bool:
        """The two groups of a2a+p2p are made here, of all ranks."""
        return self.algorithm != HIERARCHICAL

    def attention(self, problem: Problem, device: torch.device, group: ProcessGroup | None = None) -> Attention:
        import torch
        import torch.distributed as dist
        from transformer_engine.pytorch import DotProductAttention  # pyright: ignore[reportMissingImports]

        hierarchical = self.algorithm == HIERARCHICAL
        attention = DotProductAttention(
            problem.heads,
            problem.head_dim,
            num_gqa_groups=problem.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal" if self.causal else "no_mask",
            cp_group=_groups(self._degree(problem), problem.n) if hierarchical else group or dist.group.WORLD,
            cp_global_ranks=dist.get_process_group_ranks(group),
            cp_stream=torch.cuda.Stream(device) if device.type == "cuda" else None,
            cp_comm_type=self.algorithm,
        )
        return lambda q, k, v: attention(q, k, v).view(q.shape)  # its heads come side by side

    def _degree(self, problem: Problem) -> int:
        return max(_degrees(problem), default=1) if self.ulysses == AUTO else int(self.ulysses)


def _degrees(problem: Problem) -> list[int]:
    """The numbers of ranks that can split the heads of a chunk, more than one, with rings of at least two chunks."""
    n, heads, kv_heads = problem.n, problem.heads, problem.kv_heads
    return [u for u in range(2, n // 2 + 1) if n % u == heads % u == kv_heads % u == 0]


@cache
def _groups(ulysses: int, n: int) -> list[object]:
    """This rank's group of consecutive ranks, for the all-to-alls, and its ring of every `ulysses`-th rank."""
    import torch.distributed as dist

    inner = [list(range(first, first + ulysses)) for first in range(0, n, ulysses)]
    outer = [list(range(first, n, ulysses)) for first in range(ulysses)]
    return [dist.new_subgroups_by_enumeration(ranks)[0] for ranks in (inner, outer)]
