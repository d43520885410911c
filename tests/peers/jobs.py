"""Jobs of ranks in the tests of sp_bench.peers, and attention of a user's own. Imported inside the ranks: no pytest.

Peers take all ranks there are, so that a test of n ranks has a pool of n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sp_bench import SequenceParallelAttention
from sp_bench.measure.pool import report
from sp_bench.peers import registry
from sp_bench.peers.engine import PeerEngine
from sp_bench.peers.peer import Peer
from sp_bench.peers.traffic import Traffic
from sp_bench.plan import Problem
from sp_bench.plan.documents import Documents
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import Mask
from sp_bench.plan.method import PHASES
from sp_bench.run.sharding import positions, shard, unshard
from sp_bench.workload.exactness import relative_error, squared_norms
from tests.peers import engine_of_gpus
from tests.support.attention_cases import BATCH, HEAD_DIM, HEADS, inputs, reference
from tests.support.problems import mask_of

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One peer on one problem."""

    impl: str
    algorithm: str = "auto"
    layout: str = "auto"
    ulysses: int | str = "auto"
    n: int = 2
    causal: bool = True
    kv_heads: int = HEADS
    dtype: str = "float32"
    batch: int = BATCH
    tokens: int = 16
    """Tokens of each rank."""
    pack: Documents | None = None
    """Documents, in place of `causal` and `tokens`."""

    def __str__(self) -> str:
        mask = str(self.pack) if self.pack else "causal" if self.causal else "full"
        words = [self.impl, self.algorithm, f"n={self.n}", mask, f"kv_heads={self.kv_heads}", self.dtype]
        words += [self.layout] if self.layout != "auto" else []
        words += [f"ulysses={self.ulysses}"] if self.ulysses != "auto" else []
        return " ".join(words)

    @property
    def peer(self) -> Peer:
        options = {"algorithm": self.algorithm, "layout": self.layout, "ulysses": self.ulysses}
        return registry.build(self.impl, options, mask=self.mask)

    @property
    def mask(self) -> Mask:
        return self.pack or mask_of(self.causal)

    @property
    def problem(self) -> Problem:
        """As the peer assigns it out. Raises RequestError where the peer refuses it."""
        peer = self.peer
        whole = Problem(
            n=self.n,
            seqlen=self.pack.seqlen if self.pack else self.n * self.tokens,
            batch=self.batch,
            heads=HEADS,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            mask=self.mask,
            dtype=self.dtype,
            layout=self.mask.layout(peer.layout),
        )
        peer.refuse(whole)
        return peer.assigned(whole)


@dataclass(frozen=True)
class Found:
    """The result of a case on one rank."""

    errors: dict[str, float]
    """Relative L2, over the whole sequence, against fp64."""
    sent_bytes: dict[str, dict[str, int]]
    """By phase and operation."""


def on_the_gpus_path(cases: Sequence[Case]) -> dict[Case, Found]:
    """`run` of Transformer Engine, which is not installed here."""
    engine_of_gpus.install()
    registry.PEERS["transformer_engine"].refuse_absence = lambda self: None  # pyright: ignore
    return run(cases)


def run(cases: Sequence[Case]) -> dict[Case, Found]:
    """Forward and backward twice; the second time is judged."""
    found = {}
    for case in cases:
        report(str(case))
        problem = case.problem
        seqlen, n, layout = problem.seqlen, problem.n, problem.layout
        q, k, v, dout = (
            shard(x[: case.batch], layout, dist.get_rank(), n) for x in inputs(seqlen, case.kv_heads, case.dtype)
        )
        engine = PeerEngine(case.peer, problem, PHASES)
        _both_phases(engine, q, k, v, dout)
        results, sent = _both_phases(engine, q, k, v, dout)
        whole = [unshard(x, layout, None, n) for x in results]
        wanted = [x[: case.batch] for x in reference(seqlen, case.kv_heads, case.dtype, case.mask)]
        errors = _apart(whole, wanted)
        found[case] = Found(errors, {phase: {op[0]: size for op, size in ops.items()} for phase, ops in sent.items()})
    return found


def _both_phases(engine: PeerEngine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[list[Tensor], dict]:
    """[out, dq, dk, dv], and by phase the bytes sent by operation."""
    sent = {}
    engine.transport.sent_bytes.clear()
    out, saved = engine.forward(q, k, v)
    sent["forward"] = dict(engine.transport.sent_bytes)
    engine.transport.sent_bytes.clear()
    gradients = engine.backward(dout, saved)
    sent["backward"] = dict(engine.transport.sent_bytes)
    return [out, *gradients], sent


def beside_ours(cases: Sequence[Case], method: str) -> dict[Case, dict[str, float]]:
    """Relative differences between the peer's (out, dq, dk, dv) and those of a method on the same tokens."""
    found = {}
    for case in cases:
        report(str(case))
        problem = case.problem
        q, k, v, dout = (
            shard(x[: case.batch], problem.layout, dist.get_rank(), problem.n)
            for x in inputs(problem.seqlen, case.kv_heads, case.dtype)
        )
        engine = PeerEngine(case.peer, problem, PHASES)
        out, saved = engine.forward(q, k, v)
        theirs = [out, *engine.backward(dout, saved)]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        ours = SequenceParallelAttention(method, mask=case.mask, layout=case.peer.layout)(*leaves)
        both = theirs, [ours.detach(), *torch.autograd.grad(ours, leaves, dout)]
        found[case] = _apart(*([unshard(x, problem.layout, None, problem.n) for x in side] for side in both))
    return found


def _apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    """Relative L2 differences by name; of what is nothing but roundings, such as dq of single tokens, to ones."""
    pairs = zip(NAMES, found, wanted, strict=True)
    return {name: float(relative_error(squared_norms(x, y.double()), x.numel())) for name, x, y in pairs}


def run_phases(case: Case, phases: Sequence[str]) -> Tensor:
    """out of this rank, of an engine for these phases only."""
    problem = case.problem
    q, k, v, _ = (
        shard(x, problem.layout, dist.get_rank(), problem.n) for x in inputs(problem.seqlen, HEADS, "float32")
    )
    return PeerEngine(case.peer, problem, phases).forward(q, k, v)[0]


def count(elements: int) -> dict[str, tuple[int, list[str]]]:
    """Bytes counted, and operations that can't be, of operations on float32 tensors of `elements` elements."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x, wide = torch.ones(elements), torch.ones(n * elements)
    first = [elements, *[0] * (n - 1)]
    mine = [elements if rank == 0 else 0] * n
    operations: dict[str, Any] = {
        "ring": lambda: [work.wait() for work in dist.batch_isend_irecv(_ring(x, rank, n))],
        "all_gather": lambda: dist.all_gather([torch.empty_like(x) for _ in range(n)], x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty_like(x), list(wide.chunk(n))),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(wide), wide),
        "all to rank 0": lambda: dist.all_to_all_single(torch.empty(sum(mine)), x, mine, first),
        "all_reduce": lambda: dist.all_reduce(wide),
        "barrier": dist.barrier,
        "broadcast from 0": lambda: dist.broadcast(x, 0),
        "scatter from 0": lambda: dist.scatter(torch.empty_like(x), list(wide.chunk(n)) if rank == 0 else None),
        "gather to 0": lambda: dist.gather(x, list(wide.chunk(n)) if rank == 0 else None),
        "reduce to 0": lambda: dist.reduce(x, 0),
    }
    found = {}
    for name, operation in operations.items():
        with Traffic() as traffic:
            operation()
        found[name] = (traffic.sent_bytes.total(), sorted(traffic.unknown))
    return found


def _ring(x: Tensor, rank: int, n: int) -> list[dist.P2POp]:
    return [
        dist.P2POp(dist.isend, x, (rank + 1) % n),
        dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % n),
    ]


class Gather(torch.autograd.Function):
    """The tokens of all ranks, (B, S / n, H, D) -> (B, S, H, D); gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        gradient = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].clone(), None


def gathered(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """A user's attention on the striped layout, or any if the mask is full: all of K and V on every rank."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    heads_first = [
        x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)
        for x in (q, *(Gather.apply(y, group) for y in (k, v)))
    ]
    seqlen, layout = q.shape[1] * n, LAYOUTS["striped"]
    keys = torch.cat([positions(layout, r, n, seqlen) for r in range(n)])
    seen = keys[None] <= positions(layout, rank, n, seqlen)[:, None] if causal else None
    return scaled_dot_product_attention(*heads_first, attn_mask=seen).transpose(1, 2)


def wrong_from_512_tokens(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """As `gathered`, but with another scale on sequences of 512 tokens of a rank or more."""
    scale = 1.05 if q.shape[1] >= 512 else 1.0
    return gathered(q * scale, k, v, causal=causal, group=group)


def transposed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Returns the wrong shape."""
    return q.transpose(1, 2)


def detached(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Leaves nothing that autograd could go back through."""
    return gathered(q, k, v, causal=causal, group=group).detach()
