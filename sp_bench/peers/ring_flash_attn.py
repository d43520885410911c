"""ring-flash-attention: Ring, zigzag and Striped attention, and the all-gather of Llama 3, on flash_attn.

Source: Zhu, https://github.com/zhuzilin/ring-flash-attention. The package's __init__ imports transformers, which
attention doesn't need, so its modules are imported without it.

    ring     contiguous, any mask       zigzag   zigzag, causal only
    stripe   striped, causal only       llama3   contiguous, any mask, batch 1: its sequences are packed

In the first three a rank adds up dKV in fp32 and sends it on, in a ring of one to itself.

Documents (batch 1): llama3 takes them as they are. The variable-length forms of zigzag (causal) and ring (full) cut
each document into equal pieces, so that their number must divide its length. `ring` wants the pieces of a causal
document in the order of the ranks, which no layout of ours has. stripe has no such form.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer, refuse_full_mask, refuse_lonely_ring, refuse_mixed_rings
from sp_bench.plan.documents import Documents
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sp_bench.peers.peer import Attention

NAME = "ring_flash_attn"
LAYOUTS = {"ring": "contiguous", "zigzag": "zigzag", "stripe": "striped", "llama3": "contiguous"}
OF_DOCUMENTS = {"ring": "zigzag_documents", "zigzag": "zigzag_documents", "llama3": "contiguous"}
"""The layouts of the algorithms that take documents."""
HEADS_STRIDE = 1
"""Key heads that llama3 gathers at a time: the fewest, for the most overlap."""


@dataclass(frozen=True, kw_only=True)
class RingFlashAttn(Peer):
    """ring-flash-attention. Auto is zigzag, which balances a causal mask, or ring for a full mask."""

    name: ClassVar[str] = NAME
    distribution: ClassVar[str] = "ring-flash-attn"
    module: ClassVar[str] = NAME
    algorithms: ClassVar[tuple[str, ...]] = tuple(LAYOUTS)
    takes_documents: ClassVar[bool] = True

    def preferred(self) -> str:
        return "zigzag" if self.causal else "ring"

    def wanted_layout(self) -> str:
        return {**LAYOUTS, **(OF_DOCUMENTS if self.documents else {})}[self.algorithm]

    def document_unit(self, n: int) -> int:
        return {"zigzag": 2 * n, "ring": n}.get(self.algorithm, 1)

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.algorithm in ("zigzag", "stripe"):
            refuse_full_mask(self, "ring")
        if self.documents:
            self._refuse_documents(self.documents, problem)
        if self.algorithm != "llama3":
            refuse_mixed_rings(self, problem)
            refuse_lonely_ring(self, problem.n, "gpus=2")
        if (self.algorithm == "llama3" or self.documents) and problem.batch > 1:
            rule = f"{self.name}'s {self.algorithm} splits packed sequences as one, not each of a batch"
            raise RequestError(f"batch={problem.batch}", rule, "batch=1 would work")

    def _refuse_documents(self, documents: Documents, problem: Problem) -> None:
        if self.algorithm == "stripe" or (self.algorithm == "ring" and self.causal):
            rule = f"{self.name}'s {self.algorithm} takes no {'causal ' * self.causal}documents on a layout of ours"
            other = "zigzag or llama3" if self.causal else "ring or llama3"
            raise RequestError(f"mask={self.mask.name}", rule, f"method.algorithm={other} would work")
        unit = self.document_unit(problem.n)
        for number, length in enumerate(documents.lengths):
            if length % unit:
                rule = f"{self.name}'s {self.algorithm} cuts each document into {unit} equal pieces"
                choices = f"a multiple of {unit}, or method.algorithm=llama3, would work"
                raise RequestError(f"document {number} has length {length}", rule, choices)

    def attention(self, problem: Problem, device: torch.device, group: ProcessGroup | None = None) -> Attention:
        from sp_bench.peers import stand_in

        stand_in.install()
        _without_transformers()
        if self.algorithm == "llama3":
            return _llama3(problem, self.causal, device, group)
        if isinstance(problem.mask, Documents):
            return _varlen(problem, problem.mask, device, group)
        match self.algorithm:
            case "zigzag":
                from ring_flash_attn.zigzag_ring_flash_attn import (  # pyright: ignore[reportMissingImports]
                    zigzag_ring_flash_attn_func as function,
                )
            case "stripe":
                from ring_flash_attn.stripe_flash_attn import (  # pyright: ignore[reportMissingImports]
                    stripe_flash_attn_func as function,
                )
            case _:
                from ring_flash_attn.ring_flash_attn import (  # pyright: ignore[reportMissingImports]
                    ring_flash_attn_func as function,
                )
        return lambda q, k, v: function(q, k, v, causal=self.causal, group=group)


def _varlen(problem: Problem, documents: Documents, device: torch.device, group: ProcessGroup | None) -> Attention:
    """The variable-length form of zigzag (causal) or ring (full): a rank has 1/n of each document."""
    import torch

    if documents.causal:
        from ring_flash_attn.zigzag_ring_flash_attn_varlen import (  # pyright: ignore[reportMissingImports]
            zigzag_ring_flash_attn_varlen_func as function,
        )
    else:
        from ring_flash_attn.ring_flash_attn_varlen import (  # pyright: ignore[reportMissingImports]
            ring_flash_attn_varlen_func as function,
        )
    ends = torch.tensor(documents.edges // problem.n, dtype=torch.int32, device=device)
    longest = max(documents.lengths) // problem.n
    return lambda q, k, v: function(q[0], k[0], v[0], ends, longest, causal=documents.causal, group=group)[None]


def _llama3(problem: Problem, causal: bool, device: torch.device, group: ProcessGroup | None) -> Attention:
    import torch
    import torch.distributed as dist
    from ring_flash_attn.llama3_flash_attn_varlen import (  # pyright: ignore[reportMissingImports]
        llama3_flash_attn_prepare_cu_seqlens,
        llama3_flash_attn_varlen_func,
    )

    edges = problem.mask.edges if isinstance(problem.mask, Documents) else [0, problem.seqlen]
    ends = torch.tensor(edges, dtype=torch.int32, device=device)
    q_ends, kv_ends, most_q, most_kv, kv = llama3_flash_attn_prepare_cu_seqlens(
        ends, causal, dist.get_rank(group), problem.n
    )
    own = (q_ends, kv_ends, most_q, most_kv, HEADS_STRIDE, kv)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return llama3_flash_attn_varlen_func(q[0], k[0], v[0], *own, causal=causal, group=group)[None]

    return attend


def _without_transformers() -> None:
    """Make the package's modules importable without its __init__."""
    if NAME not in sys.modules:
        spec = importlib.util.find_spec(NAME)
        assert spec, "checked before the ranks were started"
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
