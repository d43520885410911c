"""SequenceParallelAttention: any method as one differentiable torch module."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import fields
from functools import lru_cache
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.kernels import choose
from sp_bench.kernels.row_sums import statistics_dtype
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND, CostProfile
from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import Layout
from sp_bench.plan.mask import Mask, mask_named
from sp_bench.plan.method import PHASES, Method
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.run import sharding
from sp_bench.run.calls import Calls, calls_of
from sp_bench.run.differentiable import attend, untraced
from sp_bench.run.engine import Engine
from sp_bench.run.engines import Engines
from sp_bench.run.groups import world
from sp_bench.run.nccl import transport_for
from sp_bench.run.sms import share


def _fewest_bytes(method: Method, problem: Problem) -> Method:
    """The variant that sends the fewest bytes, as the machine is unknown here."""
    return min(method.candidates(problem), key=lambda m: sum(m.bytes_sent(problem, phase) for phase in PHASES))


@lru_cache(maxsize=16)
def _proven(method: Method, problem: Problem, costs: CostProfile) -> Mapping[str, Plan]:
    """Checked plans by phase. Kept, since the layers of a model ask for the same ones."""
    plans = {phase: method.plan(problem, phase, costs) for phase in PHASES}
    check_all(plans, problem)
    return MappingProxyType(plans)


class SequenceParallelAttention(torch.nn.Module):
    """Exact attention, softmax(q k^T / sqrt(D)) v masked by global position, over a sequence sharded across `group`.

    Example: SequenceParallelAttention("mesh", causal=True, tile=(2, 2)). Further keywords are the method's options;
    `tile="auto"` takes the tile that sends the fewest bytes.

    An option that decides which tokens a rank owns (`ulysses="auto"`) is chosen in the same way if `heads`, and
    `kv_heads` if they differ, are given: SequenceParallelAttention("usp", heads=32, kv_heads=8).

    A causal sequence is assigned striped by methods that can, since neither the cluster nor the length is known here.
    `python -m sp_bench method=ring gpus=8 cluster=...` simulates striped and zigzag and says which is faster, often
    zigzag: SequenceParallelAttention("ring", layout="zigzag").

    There may be more keys than queries. Under a causal mask the queries are the last tokens: the keys of the history
    before them are assigned on their own, shard(k, history=P), so that a rank has the others with their queries. With
    mask="full" there may be any number of keys (cross-attention), assigned like any sequence.

    Documents and windows have their histories in the mask, documents([n1, n2], histories=[p1, p2]). Keys of all are in
    the order of tokens, each document's history before its queries, and a rank's shard has those that some query sees.
    """

    def __init__(
        self,
        method: str,
        *,
        causal: bool = True,
        mask: str | Mask = "",
        group: dist.ProcessGroup | None = None,
        kernel: str = "auto",
        wire_dtype: str = "",
        costs: CostProfile = COMPUTE_BOUND,
        heads: int | None = None,
        kv_heads: int | None = None,
        scale: float | None = None,
        **method_options: object,
    ) -> None:
        """`mask` is "causal", "full", or a pack of documents (sp_bench.Documents); if empty, `causal` decides.
        Scores are multiplied by `scale`; None stands for 1 / sqrt(D), the D of keys.

        Raises RequestError for an unknown method, mask, option or kernel, or one that doesn't fit the group, and for a
        scale that is not finite and positive.
        """
        super().__init__()
        if scale is not None and not 0 < scale < math.inf:
            rule = "multiplies scores, and must be finite and more than 0"
            raise RequestError(f"scale={scale}", rule, "leaving it out, for 1 / sqrt(D), would work")
        self.scale = scale
        self.method = build(method, method_options)
        self.mask = mask if isinstance(mask, Mask) else mask_named(mask or ("causal" if causal else "full"))
        self.group, self.kernel, self.wire_dtype, self.costs = group, kernel, wire_dtype, costs
        self._layout = self.method.layout_of(self.mask, self.n)
        self._heads = (heads, kv_heads or heads)
        if heads:
            self.method = self._chosen(heads, kv_heads or heads)
        self._uneven: dict[int, int] = {}
        """Local length -> length of the last sequence of unequal shards that `shard` cut to it."""
        self._engines = Engines()

    @property
    def n(self) -> int:
        """Number of ranks that share the sequence."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @property
    def layout(self) -> Layout:
        """Assignment of tokens to ranks. Raises RequestError if it depends on an option left at "auto"."""
        return self.method.layout_for(self._layout, self.n)

    def _chosen(self, heads: int, kv_heads: int) -> Method:
        """The variant that sends the fewest bytes. Only how their payload compares with statistics is assumed here."""
        seqlen = self.mask.seqlen if isinstance(self.mask, Packed) else 4096 * self.n
        assumed = Problem(
            n=self.n,
            seqlen=seqlen,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=128,
            mask=self.mask,
            layout=self._layout,
        )
        return _fewest_bytes(self.method, assumed)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seqlen: int | None = None,
        kv_seqlen: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention output of this rank's queries: q (B, S, H, D), k and v (B, S, kv_heads, D) -> (B, S, H, D).

        Values may have fewer elements a head than keys, and the output then has as many as they. Scores are multiplied
        by `scale`: kernels multiply them by 1 / sqrt(D), the D of keys, and what is missing is multiplied into q, in
        its dtype.
        `seqlen` is the global length, by default S * n or that of the documents; pass it if n doesn't divide it.
        `kv_seqlen` is that of keys, history included; pass it if there are more or fewer than queries. Documents and
        windows know theirs.
        `sinks`, (H,), are learned scores by head that every softmax has besides those of keys (gpt-oss, OpenAI 2025);
        their gradients on all ranks add up to the whole one, as those of other parameters do.
        Differentiable in q, k and v.
        All ranks must call it, with shapes that differ in S only. Raises RequestError for shapes or dtypes that the
        method or kernel refuses.
        """
        return untraced(self._attend)(q, k, v, seqlen, kv_seqlen, sinks)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, seqlen: int | None, kv_seqlen: int | None, sinks: Tensor | None
    ) -> Tensor:
        if self.scale is not None and self.scale != q.shape[-1] ** -0.5:
            q = q * (self.scale * math.sqrt(q.shape[-1]))
        engine = self.engine(q, k, v, seqlen=seqlen, kv_seqlen=kv_seqlen, sinks=sinks)
        if sinks is not None:
            sinks = sinks.to(statistics_dtype(q))
        with calls.running(engine) if (calls := self._calls) else nullcontext():
            return attend(q, k, v, engine, sinks)

    def shard(self, x: Tensor, history: int = 0) -> Tensor:
        """This rank's shard of a full tensor: (B, seqlen, H, D) -> (B, S, H, D), S = seqlen / n or nearly.

        Of keys under a causal mask the first `history` are those before all queries; of those of documents or a window,
        `history` is how many tokens all of their histories have.
        """
        seqlen, of_pack = x.shape[1], self._keys_of_pack(x.shape[1], history)
        if of_pack is not None:
            return x.index_select(1, of_pack.to(x.device))
        local = sharding.shard(x, self.layout, self.rank, self.n, history)
        self._uneven.pop(local.shape[1], None)
        self._uneven |= {local.shape[1]: seqlen} if seqlen % self.n or history % self.n else {}
        return local

    def unshard(self, x: Tensor, history: int = 0) -> Tensor:
        """All-gather the full tensor on every rank: (B, S, H, D) -> (B, seqlen, H, D). Not differentiable.

        Keys of a history that no query sees, of which no rank has any, are 0.
        """
        mask = self.mask
        if history and isinstance(mask, Packed) and mask.new:
            seqlen = mask.seqlen + mask.cached_tokens
            whole = x.new_zeros((x.shape[0], seqlen, *x.shape[2:]))
            kept = sharding.gathered(x, mask.keys(self.layout, self.n), self.group)
            whole[:, torch.from_numpy(mask.key_places).to(x.device)] = kept
            return whole
        return sharding.unshard(x, self.layout, self.group, self.n, history)

    def positions(self, seqlen: int, history: int = 0) -> Tensor:
        """Global ids of the tokens that this rank owns in a sequence of `seqlen`: (S,) int64."""
        of_pack = self._keys_of_pack(seqlen, history)
        return sharding.positions(self.layout, self.rank, self.n, seqlen, history) if of_pack is None else of_pack

    def _keys_of_pack(self, seqlen: int, history: int) -> Tensor | None:
        """The places of this rank's keys among those of documents or a window behind histories; None for others."""
        mask = self.mask
        if not (history and isinstance(mask, Packed)):
            return None
        if (seqlen, history) != (mask.seqlen + mask.cached_tokens, mask.cached_tokens):
            rule = f"the mask has {mask.seqlen} queries behind histories of {mask.cached_tokens} tokens together"
            works = f"history={mask.cached_tokens} of {mask.seqlen + mask.cached_tokens} tokens would work"
            raise RequestError(f"history={history} of {seqlen} tokens", rule, works)
        return torch.from_numpy(mask.key_places)[sharding.owned(mask.keys(self.layout, self.n), self.rank)]

    @property
    def sent_bytes(self) -> Counter[tuple[str, str, str]]:
        """Bytes this rank has sent so far, by (lane, tensor, field)."""
        return self._engines.sent_bytes

    def under(self, mask: Mask) -> SequenceParallelAttention:
        """The same attention under another mask, of tokens that are assigned as here. Both share engines and memory."""
        other = copy(self)
        other.mask = mask
        return other

    def share(self, other: SequenceParallelAttention) -> None:
        """Keep engines together with another attention of the same group: few in all, and in the same memory."""
        self._engines = other._engines

    def engine(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seqlen: int | None = None,
        kv_seqlen: int | None = None,
        sinks: Tensor | None = None,
    ) -> Engine:
        """Return the engine for these shapes and dtypes; it is built at first use. Those used last are kept.

        All ranks must call it, with the same shapes in the same order. Of a shape that is new to it a rank tells the
        others. RequestError is raised on all ranks if one can't serve its tensors, or if they have different shapes: at
        once if these are new to all, and within seconds if some ranks have theirs and wait in that call.

        Of shapes that all have, ranks say nothing. If ranks mix them up, messages over gloo don't match, and ranks that
        wait in different calls raise RequestError within seconds; in a collective of gloo sizes that differ end the
        process, and over NCCL transfers may match. What was called is compared on a thread, every 256 calls and
        whenever none was begun for a second, so that a later call raises it. On GPUs a rank that waits for a transfer
        can't be interrupted: it logs the error.
        """
        shapes = tuple((x.shape, x.dtype, x.device) for x in (q, k, v))
        uneven = self._cut_unevenly(q, seqlen), self._cut_unevenly(k, kv_seqlen or seqlen)
        # Attentions that share engines may differ in these.
        kind = (self.method, self.kernel, self.wire_dtype, self.costs, self.scale, self.group)
        sunk = None if sinks is None else (sinks.shape, sinks.device)
        key = (kind, self.mask, self._layout, shapes, seqlen, kv_seqlen, uneven, sunk)
        engine, calls = self._engines.get(key), self._calls
        if engine is None:
            return self._engines.keep(key, self._new_engine(q, k, v, seqlen, kv_seqlen, sinks))
        if calls:
            calls.begin(engine.words)
        return engine

    @property
    def _calls(self) -> Calls | None:
        """The calls on the group; None if this rank is alone in it."""
        return calls_of(self.group or world()) if self.n > 1 else None

    def _cut_unevenly(self, x: Tensor, told: int | None) -> int | None:
        """The length of a sequence that `shard` cut to as many tokens, and other ranks to other numbers of them.

        None where the call has told its length.
        """
        return self._uneven.get(x.shape[1]) if told is None else None

    def _new_engine(
        self, q: Tensor, k: Tensor, v: Tensor, seqlen: int | None, kv_seqlen: int | None, sinks: Tensor | None
    ) -> Engine:
        """Raises RequestError on all ranks if one refuses its tensors, or if ranks have different problems."""
        method, problem, refused = self.method, None, None
        try:
            problem = self._problem(q, k, v, seqlen, kv_seqlen)
            method = _fewest_bytes(self.method, problem)
            problem = method.assigned(problem)
            self._refuse_shard(q, k, problem)
            _refuse_sinks(q, sinks)
        except RequestError as error:
            refused = error
        mine = refused or self._in_words(method, problem, sinks is not None)
        number = calls.agree(mine) if (calls := self._calls) else 0
        if isinstance(mine, RequestError):
            raise mine
        assert problem is not None
        plans = _proven(method, problem, self.costs)
        group = (self.group or dist.group.WORLD) if self.n > 1 else None
        kernel = choose(self.kernel, q.device.type, problem.dtype, problem.head_dim)
        shares = share(kernel, plans, q.device)
        transport = transport_for(group, q.device, plans, shares.lane_ctas if shares else None, number)
        return Engine(
            plans,
            problem,
            kernel,
            q.device,
            rank=self.rank,
            transport=transport,
            shares=shares,
            arena=self._engines.arena(q.device),
            words=mine,
        )

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, seqlen: int | None, kv_seqlen: int | None) -> Problem:
        """The problem before a variant of the method is chosen. Raises RequestError for tensors that don't fit."""
        if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
            raise RequestError(
                f"q {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}",
                "must be of one dtype and on one device",
                f"{q.dtype} on {q.device} for all would work",
            )
        if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise RequestError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
                "k must be like q but for the numbers of tokens and heads, and v like k but for the elements of a head",
                "(B, S, heads, D), (B, S, kv_heads, D), (B, S, kv_heads, D) would work",
            )
        if self._heads[0] and (q.shape[2], k.shape[2]) != self._heads:
            rule = f"the method was chosen for heads={self._heads[0]} and kv_heads={self._heads[1]}"
            raise RequestError(f"q {tuple(q.shape)}, k {tuple(k.shape)}", rule, "as many of each would work")
        seqlen = seqlen or (self.mask.seqlen if isinstance(self.mask, Packed) else None)
        if kv_seqlen is None and isinstance(self.mask, Packed):
            kv_seqlen = self.mask.seqlen + self.mask.cached_tokens
        if kv_seqlen is None and q.shape[1] != k.shape[1]:
            rule = f"there are {q.shape[1]} queries here, so that the call must say how many keys all ranks have"
            raise RequestError(f"k {tuple(k.shape)}", rule, f"kv_seqlen={k.shape[1] * self.n} would work")
        for name, x, key, told in (("q", q, "seqlen", seqlen), ("k", k, "kv_seqlen", kv_seqlen or seqlen)):
            if uneven := self._cut_unevenly(x, told):
                rule = f"{self.n} ranks don't share {uneven} tokens evenly, so that the call must say {key}"
                raise RequestError(f"{name} {tuple(x.shape)}", rule, f"{key}={uneven} would work")
        return Problem(
            n=self.n,
            seqlen=seqlen or q.shape[1] * self.n,
            kv_seqlen=kv_seqlen,
            batch=q.shape[0],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            mask=self.mask,
            dtype=str(q.dtype).removeprefix("torch."),
            wire_dtype=self.wire_dtype,
            layout=self.layout,
        )

    def _in_words(self, method: Method, problem: Problem | None, sunk: bool) -> str:
        """The properties that all ranks must have alike, short even for thousands of documents.

        Among them is all that a plan follows from, as ranks with different plans could compute wrong results.
        """
        assert problem is not None
        mask, documents = problem.mask, ""
        if isinstance(mask, Packed):
            documents = f", {len(mask.lengths)} documents ({_digest(mask.__reduce__()[1])})"
        names = ("seqlen", "batch", "heads", "kv_heads", "head_dim", "dtype")
        told = [f"{name}={getattr(problem, name)}" for name in names]
        told += [f"{name}={value}" for name in ("kv_seqlen", "v_head_dim") if (value := getattr(problem, name))]
        told += [f"wire_dtype={problem.wire_dtype}"] * (problem.wire_dtype != problem.dtype)
        told += [f"mask={mask.name}{documents}", method.name, f"layout={problem.layout.name}"]
        set_here = (f for f in fields(method) if f.name != "layout" and getattr(method, f.name) != f.default)
        told += [f"{f.name}={getattr(method, f.name)}" for f in set_here]
        told += [f"scale={self.scale}"] * (self.scale is not None)
        told += [f"costs ({_digest(self.costs)})"] * (self.costs != COMPUTE_BOUND)
        return ", ".join(told) + ", sinks" * sunk

    def _refuse_shard(self, q: Tensor, k: Tensor, problem: Problem) -> None:
        for name, x, side in (("q", q, problem.queries), ("k", k, problem.keys)):
            if x.shape[1] != (owned := side.tokens(self.rank)):
                raise RequestError(
                    f"{name} {tuple(x.shape)}",
                    f"rank {self.rank} of {self.n} owns {owned} tokens of {side.seqlen}",
                    "what `shard` returns would work",
                )


def _refuse_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Raise RequestError for sinks that are not one number for each query head, on the same device."""
    if sinks is not None and (sinks.shape != q.shape[2:3] or sinks.device != q.device):
        rule = f"are a score for each of {q.shape[2]} query heads, on {q.device}"
        raise RequestError(f"sinks {tuple(sinks.shape)} on {sinks.device}", rule, f"({q.shape[2]},) would work")


def _digest(value: object) -> str:
    """Eight letters that differ where the values' representations do."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
