"""Attentions to run on real ranks, their inputs, and what fp64 makes of them. Imported inside the ranks: no pytest.

Shape legend: B batch, S tokens, H heads, K kv_heads, D head_dim; tensors of the whole sequence have S = n * tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sp_bench import SequenceParallelAttention
from sp_bench.methods import build
from sp_bench.plan import CostProfile, Method, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.documents import Packed
from sp_bench.plan.mask import CAUSAL, Mask
from sp_bench.workload.exactness import NAMES
from tests.support.bounds import too_far
from tests.support.problems import mask_of
from tests.support.seen import seen_of_whole

BATCH, HEADS, HEAD_DIM = 2, 4, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention on the first `n` ranks."""

    n: int
    method: str
    tile: tuple[int, int] | None = None
    lanes: str = ""
    options: tuple[tuple[str, object], ...] = ()
    """Other than these two."""
    layout: str = "striped"
    causal: bool = True
    heads: int = HEADS
    kv_heads: int = HEADS
    dtype: str = "float64"
    wire_dtype: str = ""
    kernel: str = "auto"
    tokens: int = 8
    """Tokens of each rank."""
    more: int = 0
    """Tokens beyond these, which not all ranks get."""
    kv_seqlen: int | None = None
    """Keys of the whole sequence, if there are more or fewer than queries."""
    v_head_dim: int | None = None
    """Elements of a head of values, if they are fewer."""
    batch: int = BATCH
    costs: CostProfile = COMPUTE_BOUND
    says_heads: bool = False
    """Whether the module is told the heads before it sees tensors."""
    pack: Packed | None = None
    """Documents, in place of `causal`, `tokens` and `more`."""

    def __str__(self) -> str:
        shape = f"{self.tile[0]}x{self.tile[1]} " if self.tile else ""
        words = [f"{self.method} {shape}n={self.n}", self.layout, "causal" if self.causal else "full"]
        words += [f"heads={self.heads}/{self.kv_heads}", self.dtype, f"tokens={self.tokens}+{self.more}"]
        words += [str(self.pack)] if self.pack else []
        words += [f"keys={self.kv_seqlen}"] if self.kv_seqlen else []
        words += [f"values={self.v_head_dim}"] if self.v_head_dim else []
        words += [f"batch={self.batch}"] if self.batch != BATCH else []
        words += [f"lanes={self.lanes}"] if self.lanes else []
        words += [f"{name}={value}" for name, value in self.options]
        words += [f"wire={self.wire_dtype}"] if self.wire_dtype else []
        words += [f"kernel={self.kernel}"] if self.kernel != "auto" else []
        words += [str(self.costs)] if self.costs != COMPUTE_BOUND else []
        return " ".join(words)

    @property
    def seqlen(self) -> int:
        return self.pack.seqlen if self.pack else self.n * self.tokens + self.more

    @property
    def keys(self) -> int | None:
        """All keys if they are others than queries, those of a pack's histories that no query sees included."""
        cached = self.pack.cached_tokens if self.pack else 0
        return self.seqlen + cached if cached else self.kv_seqlen

    @property
    def mask(self) -> Mask:
        return self.pack or mask_of(self.causal)

    def inputs(self, seqlen: int, seed: int = 0) -> Inputs:
        whole = inputs(seqlen, self.kv_heads, self.dtype, seed, self.heads, self.keys, self.v_head_dim)
        return Inputs(*(x[: self.batch] for x in whole))

    def reference(self, seqlen: int) -> Results:
        whole = reference(seqlen, self.kv_heads, self.dtype, self.mask, self.heads, self.keys, self.v_head_dim)
        return Results(*(x[: self.batch] for x in whole))

    @property
    def method_options(self) -> dict[str, Any]:
        """All options of the method but the layout."""
        options = dict(self.options)
        options |= {"tile": self.tile} if self.tile else {}
        options |= {"lanes": self.lanes} if self.lanes else {}
        return options

    @property
    def built(self) -> Method:
        return build(self.method, {"layout": self.layout, **self.method_options})

    @property
    def problem(self) -> Problem:
        """As the method assigns it out."""
        return self.built.assigned(self.whole)

    @property
    def whole(self) -> Problem:
        """With all heads on each rank: options of the method may still be auto."""
        return Problem(
            n=self.n,
            seqlen=self.seqlen,
            kv_seqlen=self.keys,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            v_head_dim=self.v_head_dim,
            mask=self.mask,
            dtype=self.dtype,
            wire_dtype=self.wire_dtype,
            layout=self.built.layout_of(self.mask, self.n),
        )

    def attention(self, group: dist.ProcessGroup | None) -> SequenceParallelAttention:
        return SequenceParallelAttention(
            self.method,
            mask=self.mask,
            group=group,
            kernel=self.kernel,
            wire_dtype=self.wire_dtype,
            costs=self.costs,
            heads=self.heads if self.says_heads else None,
            kv_heads=self.kv_heads if self.says_heads else None,
            layout=self.layout,
            **self.method_options,
        )


def of_one_batch_entry(cases: Iterable[Case]) -> list[Case]:
    """Those with AllToAlls, which then receive, and send where dtypes allow it, in place."""
    assigned = ("ulysses", "usp")
    return [replace(c, batch=1) for c in cases if c.method in assigned or "ulysses" in dict(c.options)]


def together(cases: Iterable[Case], of: Callable[[Case], Hashable]) -> list[list[Case]]:
    """Cases of which this is the same, in their order."""
    found: dict[Hashable, list[Case]] = {}
    for case in cases:
        found.setdefault(of(case), []).append(case)
    return [*found.values()]


def of_each_method(cases: Iterable[Case], count: int = 1, turn: int = 0) -> list[Case]:
    """Up to `count` cases of each method, apart from each other, and others for another `turn`."""
    found = []
    for own in together(cases, lambda case: case.method):
        step = -(-len(own) // count)
        found += own[turn % step :: step]
    return found


class Inputs(NamedTuple):
    """The inputs of the whole sequence, in the compute dtype."""

    q_BSHD: Tensor
    k_BSKD: Tensor
    v_BSKD: Tensor
    dout_BSHD: Tensor


class Results(NamedTuple):
    """The results of the whole sequence or of one rank."""

    out_BSHD: Tensor
    dq_BSHD: Tensor
    dk_BSKD: Tensor
    dv_BSKD: Tensor


def sinks_of(heads: int) -> Tensor:
    """Scores of sinks, from ones that nothing is left for to ones that hardly count."""
    return torch.linspace(-3, 5, heads, dtype=torch.float64)


def with_sinks(case: Case) -> tuple[Results, Tensor, Tensor]:
    """Results in fp64 of one more score a head in every softmax, whose value is 0, and the gradient of these sinks.

    With it the sum of the sizes of its terms, one for each row, beside which roundings are small: (H,) each.
    """
    leaves = [x.double().requires_grad_() for x in case.inputs(case.seqlen)[:3]]
    sinks = sinks_of(case.heads).requires_grad_()
    q, k, v = (x.repeat_interleave(case.heads // x.shape[2], dim=2) for x in leaves)
    keys = case.keys or case.seqlen
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[3])
    visible = torch.ones(case.seqlen, keys, dtype=torch.bool)
    if case.pack:
        visible = torch.from_numpy(seen_of_whole(case.pack))
    elif case.causal:
        visible = visible.tril(keys - case.seqlen)
    scores = scores.masked_fill(~visible, -math.inf)
    last = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    shares, of_last = torch.cat([scores, last], dim=3).softmax(3).split([keys, 1], 3)
    out = torch.einsum("bhst,bthd->bshd", shares, v)
    dout = case.inputs(case.seqlen).dout_BSHD.double()
    *gradients, of_sinks = torch.autograd.grad(out, [*leaves, sinks], dout)
    terms = of_last[..., 0] * (dout * out).sum(3).transpose(1, 2)
    return Results(out.detach(), *gradients), of_sinks, terms.detach().abs().sum((0, 2))


@lru_cache
def inputs(
    seqlen: int,
    kv_heads: int,
    dtype: str,
    seed: int = 0,
    heads: int = HEADS,
    kv_seqlen: int | None = None,
    v_head_dim: int | None = None,
) -> Inputs:
    """Unit normal tensors, equal on all ranks."""
    source = torch.Generator().manual_seed(1000 * seqlen + 10 * kv_heads + seed)
    queries, keys, values = (seqlen, heads), (kv_seqlen or seqlen, kv_heads), v_head_dim or HEAD_DIM
    shapes = ((*queries, HEAD_DIM), (*keys, HEAD_DIM), (*keys, values), (*queries, values))
    tensors = (torch.randn(BATCH, *shape, generator=source, dtype=torch.float64) for shape in shapes)
    return Inputs(*(x.to(getattr(torch, dtype)) for x in tensors))


@lru_cache
def reference(
    seqlen: int,
    kv_heads: int,
    dtype: str,
    mask: Mask,
    heads: int = HEADS,
    kv_seqlen: int | None = None,
    v_head_dim: int | None = None,
) -> Results:
    """torch's own attention, from its parts and in fp64, on the whole sequence."""
    whole = inputs(seqlen, kv_heads, dtype, heads=heads, kv_seqlen=kv_seqlen, v_head_dim=v_head_dim)
    q, k, v, dout = (x.double() for x in whole)
    leaves = [x.requires_grad_() if x.requires_grad else x.clone().requires_grad_() for x in (q, k, v)]
    q_BHSD, k_BHSD, v_BHSD = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in leaves)
    with sdpa_kernel(SDPBackend.MATH):
        visible = torch.from_numpy(seen_of_whole(mask)) if isinstance(mask, Packed) else None
        if mask == CAUSAL:  # the queries are the last tokens
            everything = torch.ones(seqlen, kv_seqlen or seqlen, dtype=torch.bool)
            visible = everything.tril((kv_seqlen or seqlen) - seqlen)
        out = scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, visible).transpose(1, 2)
    return Results(out.detach(), *torch.autograd.grad(out, leaves, dout))


class Difference(NamedTuple):
    """One rank's share of a relative L2 error."""

    error2: float
    norm2: float
    elements: int


def difference(got: Tensor, wanted: Tensor) -> Difference:
    assert got.shape == wanted.shape, f"{got.shape} instead of {wanted.shape}"
    return Difference(float((got.double() - wanted).square().sum()), float(wanted.square().sum()), wanted.numel())


DTYPES = ("float64", "float32", "bfloat16")


def errors_of(by_rank: Iterable[Sequence[Difference]]) -> dict[str, float]:
    """The relative L2 errors of out, dq, dk and dv, from each rank's shares of them."""
    return dict(zip(NAMES, map(relative, zip(*by_rank, strict=True)), strict=True))


def wrong_in(case: Case, errors: Mapping[str, float]) -> dict[str, float]:
    """Those relative L2 errors of out, dq, dk and dv that roundings can't make on the case's inputs."""
    return too_far(case.whole, case.inputs(case.seqlen), errors)


def relative(shares: Iterable[Difference]) -> float:
    """The error in relation to the reference's norm, or to unit elements where the reference is rounding noise."""
    error2, norm2, elements = (sum(column) for column in zip(*shares, strict=True))
    return math.sqrt(error2 / (norm2 if norm2 > 1e-20 * elements else elements))
