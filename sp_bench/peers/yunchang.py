"""yunchang (long-context-attention): Ulysses, Ring, and both at once (USP), on flash_attn.

Source: Fang, Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024,
https://github.com/feifeibear/long-context-attention.

    ulysses                  UlyssesAttention: contiguous, any mask
    ring, zigzag, stripe     LongContextAttention: `ulysses` ranks split the heads of a chunk, rings connect the chunks;
                             contiguous for any mask, zigzag and striped for causal ones only
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from sp_bench.errors import RequestError
from sp_bench.peers.peer import (
    AUTO,
    Peer,
    refuse_full_mask,
    refuse_lonely_ring,
    refuse_mixed_rings,
    refuse_uneven_heads,
)
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sp_bench.peers.peer import Attention

LAYOUTS = {"zigzag": "zigzag", "ring": "contiguous", "stripe": "striped", "ulysses": "contiguous"}
RING_IMPLEMENTATIONS = {"zigzag": "zigzag", "ring": "basic", "stripe": "strip"}
"""The package's names of the algorithms."""


@dataclass(frozen=True, kw_only=True)
class Yunchang(Peer):
    """yunchang. Auto is zigzag, which balances a causal mask, or ring for a full mask."""

    name: ClassVar[str] = "yunchang"
    distribution: ClassVar[str] = "yunchang"
    module: ClassVar[str] = "yunchang"
    algorithms: ClassVar[tuple[str, ...]] = tuple(LAYOUTS)

    ulysses: int | str = AUTO
    """The number of ranks that split the heads of a chunk; auto: as many as possible. algorithm=ulysses uses all."""

    def preferred(self) -> str:
        return "zigzag" if self.causal else "ring"

    def wanted_layout(self) -> str:
        return LAYOUTS[self.algorithm]

    def head_parallel(self, problem: Problem) -> int:
        if self.algorithm == "ulysses":
            return 1
        return max(_degrees(problem)) if self.ulysses == AUTO else int(self.ulysses)

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.algorithm in ("zigzag", "stripe"):
            refuse_full_mask(self, "ring")
        if self.algorithm == "ulysses":
            refuse_uneven_heads(self, problem, problem.n)
            return
        refuse_mixed_rings(self, problem)
        refuse_lonely_ring(self, problem.n, "gpus=2")
        degrees = _degrees(problem)
        if self.ulysses != AUTO and (type(self.ulysses) is not int or self.ulysses not in degrees):
            rule = f"must be {AUTO}, or divide gpus={problem.n} and kv_heads={problem.kv_heads} and leave rings of two"
            would_work = f"one of {', '.join(map(str, degrees))} would work"
            raise RequestError(f"method.ulysses={self.ulysses}", rule, would_work)

    def variant(self, problem: Problem) -> str:
        if self.algorithm == "ulysses":
            return self.algorithm
        u = self.head_parallel(problem)
        return f"{self.algorithm} {u}x{problem.n // u}"

    @property
    def takes_group(self) -> bool:
        """LongContextAttention has its groups from a global of the package, which are of all ranks."""
        return self.algorithm == "ulysses"

    def attention(self, problem: Problem, device: torch.device, group: ProcessGroup | None = None) -> Attention:
        from sp_bench.peers import stand_in

        stand_in.install()
        import torch.distributed as dist
        from yunchang import LongContextAttention, UlyssesAttention  # pyright: ignore

        if self.algorithm == "ulysses":
            attention = UlyssesAttention(group or dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        else:
            _make_groups(self.head_parallel(problem), problem.n)
            attention = LongContextAttention(ring_impl_type=RING_IMPLEMENTATIONS[self.algorithm])
        return lambda q, k, v: attention(q, k, v, causal=self.causal)


def _degrees(problem: Problem) -> list[int]:
    """The numbers of ranks that can split the heads of a chunk, with rings of at least two chunks."""
    return [u for u in range(1, problem.n // 2 + 1) if problem.n % u == 0 and problem.kv_heads % u == 0]


def _make_groups(ulysses: int, n: int) -> None:
    """Set the groups that modules of the package take when they are made. They hold for the whole process."""
    from yunchang.globals import PROCESS_GROUP  # pyright: ignore[reportMissingImports]

    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = _groups(ulysses, n)  # pyright: ignore


@cache
def _groups(ulysses: int, n: int) -> tuple[object, object]:
    import torch.distributed as dist
    from yunchang.globals import PROCESS_GROUP, set_seq_parallel_pg  # pyright: ignore[reportMissingImports]

    set_seq_parallel_pg(ulysses, n // ulysses, dist.get_rank(), n)
    return PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG
