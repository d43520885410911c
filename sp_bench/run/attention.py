"""SequenceParallelAttention: any method as one differentiable torch module."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.kernels import BlockKernel, choose
from sp_bench.kernels.fold import fold_notes
from sp_bench.lower import lower
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND, CostProfile
from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import Layout
from sp_bench.plan.mask import Mask, mask_named
from sp_bench.plan.method import PHASES, Method
from sp_bench.plan.ops import Chunk, Plan
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DO, DQ, KV, ODOQ, OUT, Field, Kind, O, Q
from sp_bench.plan.tensors import Tensor as ChunkTensor
from sp_bench.run import sharding
from sp_bench.run.buffers import Arena, Borrowed, Buffers
from sp_bench.run.devices import Cuda, Device
from sp_bench.run.engines import Engines, agree
from sp_bench.run.executor import Action, Executor, Spent
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.nccl import transport_for
from sp_bench.run.partials import Tensors
from sp_bench.run.slices import one_slice, together
from sp_bench.run.sms import SmShares, share
from sp_bench.run.transport import GlooTransport, Transport

Saved = dict[Any, Tensors]
"""What a forward leaves for its backward. An Engine: the fields of each tensor of its plans (KV, ODOQ, ...)."""


class Engine:
    """Runs checked plans of one problem on this rank. All plans share one set of buffers."""

    def __init__(
        self,
        plans: Mapping[str, Plan],
        problem: Problem,
        kernel: str | BlockKernel,
        device: torch.device,
        *,
        rank: int = 0,
        transport: Transport | None = None,
        queues: Device | None = None,
        shares: SmShares | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Execute `plans` (by phase) as `rank` of problem.n ranks; a single rank needs no `transport`.

        `queues` is the stream interface of an asynchronous device; default: Cuda on a GPU, none on a CPU. `shares` says
        what kernel and transport were told to take of the GPU. `arena` is memory for its buffers, where the transport
        doesn't make them; engines that share one share `queues`.
        Raises RequestError if the kernel refuses the device or dtype.
        """
        self.plans, self.problem, self.shares = plans, problem, shares
        chosen = isinstance(kernel, BlockKernel)
        self.kernel = kernel if chosen else choose(kernel, device.type, problem.dtype, problem.head_dim)
        self.transport = transport or GlooTransport(None)
        self._rank, self._device = rank, device
        lent = arena is not None and not self.transport.makes_memory
        self.buffers = Borrowed(arena, self.transport, self) if arena and lent else Buffers(device, self.transport)
        self.queues = queues or (Cuda(device) if device.type == "cuda" else None)
        """The asynchronous device; None on a CPU."""
        self._executors: dict[str, Executor] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, Saved]:
        """Return out_BSHD of this rank's queries in the compute dtype, and the tensors saved for the backward."""
        found = self._run("forward", {Q: (q,), KV: (k, v)}, action, live)
        out, *lse = found.pop(O, None) or found.pop(OUT)
        if "backward" in self.plans:
            needs = {chunk.tensor for chunk in self.plans["backward"].inputs}
            found |= {KV: (k, v)} if KV in needs else {}
            found |= {Q: (q,)} if Q in needs else {}
            found |= {ODOQ: (q, out, *lse)} if ODOQ in needs else {}
        return out, found

    def backward(
        self, dout: Tensor, saved: Saved, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, ...]:
        """Return (dq, dk, dv) of this rank's tokens in the compute dtype."""
        inputs = {**saved, DO: (dout,)}
        if ODOQ in saved:
            q, out, lse = saved[ODOQ]
            inputs[ODOQ] = (q, out, dout, lse)
        found = self._run("backward", inputs, action, live)
        return (*found[DQ], *found[DKV])

    @property
    def kernel_name(self) -> str:
        """Name of the block kernel in use."""
        return self.kernel.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its times must know of its kernels."""
        return (*self.kernel.notes, *fold_notes(self._device))

    def spent(self, phase: str) -> Spent:
        """Time breakdown of the phase's last execution. On a GPU, synchronize first."""
        return self._executors[phase].spent

    def reading(self, phase: str) -> Callable[[], Spent]:
        """What tells the time breakdown of the phase's last execution, even after the next one."""
        return self._executors[phase].reading()

    def close(self) -> None:
        """End the executors' streams and let go of their buffers; a later execution makes them again."""
        while self._executors:
            self._executors.popitem()[1].close()

    def _executor(self, phase: str) -> Executor:
        if phase not in self._executors:
            self._executors[phase] = Executor(
                self.plans[phase],
                self.problem,
                self._rank,
                self.transport,
                self.kernel,
                self.buffers,
                self._device,
                self.queues,
            )
        return self._executors[phase]

    def _run(self, phase: str, inputs: Saved, action: Action, live: LiveBytes | None) -> Saved:
        """Run a phase on its input tensors by chunk type; return its results likewise, in the compute dtype."""
        plan = self.plans[phase]
        given = {chunk: self._given(chunk, inputs, plan) for chunk in plan.starts_with}
        if live:
            live.always = [x for tensors in inputs.values() for x in tensors]
        whole = self._results(plan)
        views = {c: self._slices(c, whole[c.tensor]) for c in plan.outputs if c.tensor in whole}
        found = self._executor(phase)(given, action, live, views)
        for tensor in dict.fromkeys(c.tensor for c in plan.ends_with if c.tensor not in whole):
            whole[tensor] = self._whole(tensor, found, plan)
        if live:
            held = [*given.values(), *found.values(), *whole.values()]
            live.see([*self.buffers.tensors(), *(x for tensors in held for x in tensors)])
        return whole

    def _given(self, chunk: Chunk, inputs: Saved, plan: Plan) -> Tensors:
        """The tensors that a chunk starts with: a slice of an input, or what the forward kept of it."""
        if chunk in plan.kept:
            width, alike = len(chunk.tensor.fields), [c for c in plan.kept if c.tensor == chunk.tensor]
            first = width * alike.index(chunk)
            return inputs[chunk.tensor][first : first + width]
        slices = self._slices(chunk, inputs[chunk.tensor])
        return slices if chunk in self._views(plan) else tuple(x.contiguous() for x in slices)

    def _slices(self, chunk: Chunk, whole: Tensors) -> Tensors:
        return tuple(one_slice(x, self.problem, chunk.tensor, chunk.heads) for x in whole)

    def _views(self, plan: Plan) -> frozenset[Chunk]:
        return lower(plan, self.problem, self.transport.kind).views

    def _results(self, plan: Plan) -> Saved:
        """The tensors, with all heads, that the slices of results are views of."""
        found = {}
        for tensor in dict.fromkeys(chunk.tensor for chunk in plan.outputs if chunk in self._views(plan)):
            tokens, whole = self.problem.tokens(self._rank), self.problem.in_one_slice
            shapes = [whole.field_shape(field, tokens) for field in tensor.fields]
            dtype = getattr(torch, self.problem.dtype)
            found[tensor] = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in shapes)
        return found

    def _whole(self, tensor: ChunkTensor, found: Mapping[Chunk, Tensors], plan: Plan) -> Tensors:
        """All head slices of a result together; of what is kept, one after another. Sums are cast to compute dtype."""
        chunks = sorted((chunk for chunk in plan.ends_with if chunk.tensor == tensor), key=lambda chunk: chunk.heads)
        fields = [[self._cast(field, found[chunk][i]) for chunk in chunks] for i, field in enumerate(tensor.fields)]
        if chunks[0] in plan.kept:
            return tuple(x for tensors in zip(*fields, strict=True) for x in tensors)
        return tuple(together(slices, self.problem, tensor) for slices in fields)

    def _cast(self, field: Field, x: Tensor) -> Tensor:
        return x if field.kind is Kind.STATISTIC else x.to(getattr(torch, self.problem.dtype))


class Differentiable(Protocol):
    """What computes an attention and its gradients: an Engine, or something around one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Saved]: ...

    def backward(self, dout: Tensor, saved: Saved, /) -> tuple[Tensor, ...]: ...


def attend(q: Tensor, k: Tensor, v: Tensor, engine: Differentiable) -> Tensor:
    """The engine's attention of this rank's tokens, differentiable in q, k and v; all are (B, S, heads, D)."""
    return _Attention.apply(q, k, v, engine)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, engine: Differentiable) -> Tensor:
        out, saved = engine.forward(q, k, v)
        ctx.save_for_backward(*(x for tensors in saved.values() for x in tensors))
        ctx.engine, ctx.names = engine, {name: len(tensors) for name, tensors in saved.items()}
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        saved = {name: tuple(itertools.islice(tensors, count)) for name, count in ctx.names.items()}
        return (*ctx.engine.backward(grad_outputs[0], saved), None)


def _fewest_bytes(method: Method, problem: Problem) -> Method:
    """The variant that sends the fewest bytes, as the machine is unknown here."""
    return min(method.candidates(problem), key=lambda m: sum(m.bytes_sent(problem, phase) for phase in PHASES))


@lru_cache(maxsize=16)
def _proven(method: Method, problem: Problem, costs: CostProfile) -> Mapping[str, Plan]:
    """Checked plans by phase. Kept, since the layers of a model ask for the same ones."""
    plans = {phase: method.plan(problem, phase, costs) for phase in PHASES}
    check_all(plans, problem)
    return MappingProxyType(plans)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile of a caller must take it: whole, since it can't trace plans.

    As long as nobody has imported torch._dynamo, nothing is traced; importing it takes a second.
    """
    untraced: Any = torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
    return untraced


class SequenceParallelAttention(torch.nn.Module):
    """Exact attention, softmax(q k^T / sqrt(D)) v masked by global position, over a sequence sharded across `group`.

    Example: SequenceParallelAttention("mesh", causal=True, tile=(2, 2)). Further keywords are the method's options;
    `tile="auto"` takes the tile that sends the fewest bytes.

    An option that decides which tokens a rank owns (`ulysses="auto"`) is chosen in the same way if `heads`, and
    `kv_heads` if they differ, are given: SequenceParallelAttention("usp", heads=32, kv_heads=8).

    A causal sequence is dealt striped by methods that can, since neither the cluster nor the length is known here.
    `python -m sp_bench method=ring gpus=8 cluster=...` simulates striped and zigzag and says which is faster, often
    zigzag: SequenceParallelAttention("ring", layout="zigzag").
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
        **method_options: object,
    ) -> None:
        """`mask` is "causal", "full", or a pack of documents (sp_bench.Documents); if empty, `causal` decides.

        Raises RequestError for an unknown method, mask, option or kernel, or one that doesn't fit the group.
        """
        super().__init__()
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
        return self.method.dealt_by(self._layout, self.n)

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, seqlen: int | None = None) -> Tensor:
        """Attention output of this rank's queries: q (B, S, H, D), k and v (B, S, kv_heads, D) -> (B, S, H, D).

        `seqlen` is the global length, by default S * n or that of the documents; pass it if n doesn't divide it.
        Differentiable in q, k and v.
        All ranks must call it, with shapes that differ in S only. Raises RequestError for shapes or dtypes that the
        method or kernel refuses.
        """
        return untraced(self._attend)(q, k, v, seqlen)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seqlen: int | None) -> Tensor:
        return attend(q, k, v, self.engine(q, k, v, seqlen=seqlen))

    def shard(self, x: Tensor) -> Tensor:
        """This rank's shard of a full tensor: (B, seqlen, H, D) -> (B, S, H, D), S = seqlen / n or nearly."""
        local, seqlen = sharding.shard(x, self.layout, self.rank, self.n), x.shape[1]
        self._uneven.pop(local.shape[1], None)
        self._uneven |= {local.shape[1]: seqlen} if seqlen % self.n else {}
        return local

    def unshard(self, x: Tensor) -> Tensor:
        """All-gather the full tensor on every rank: (B, S, H, D) -> (B, seqlen, H, D). Not differentiable."""
        return sharding.unshard(x, self.layout, self.group, self.n)

    def positions(self, seqlen: int) -> Tensor:
        """Global ids of the tokens that this rank owns in a sequence of `seqlen`: (S,) int64."""
        return sharding.positions(self.layout, self.rank, self.n, seqlen)

    @property
    def sent_bytes(self) -> Counter[tuple[str, str, str]]:
        """Bytes this rank has sent so far, by (lane, tensor, field)."""
        return self._engines.sent_bytes

    def under(self, mask: Mask) -> SequenceParallelAttention:
        """The same attention under another mask, of tokens that are dealt as here. Both share engines and memory."""
        other = copy(self)
        other.mask = mask
        return other

    def share(self, other: SequenceParallelAttention) -> None:
        """Keep engines together with another attention of the same group: few in all, and in the same memory."""
        self._engines = other._engines

    def engine(self, q: Tensor, k: Tensor, v: Tensor, *, seqlen: int | None = None) -> Engine:
        """Return the engine for these shapes and dtypes; it is built at first use. Those used last are kept.

        All ranks must call it. Of new shapes they tell each other, so that an error is raised on all ranks.
        """
        shapes = tuple((x.shape, x.dtype, x.device) for x in (q, k, v))
        key = (self.mask, self._layout, shapes, seqlen, self._uneven.get(q.shape[1]))
        return self._engines.get(key, lambda: self._new_engine(q, k, v, seqlen))

    def _new_engine(self, q: Tensor, k: Tensor, v: Tensor, seqlen: int | None) -> Engine:
        """Raises RequestError on all ranks if one refuses its tensors, or if ranks have different problems."""
        method, problem, refused = self.method, None, None
        try:
            problem = self._problem(q, k, v, seqlen)
            method = _fewest_bytes(self.method, problem)
            problem = method.dealt(problem)
            self._refuse_shard(q, problem)
        except RequestError as error:
            refused = error
        mine = refused or _in_words(problem)
        agree(mine, self.group, self.n, "all ranks must have the same sequence", "the same on all would work")
        assert problem is not None
        plans = _proven(method, problem, self.costs)
        group = (self.group or dist.group.WORLD) if self.n > 1 else None
        kernel = choose(self.kernel, q.device.type, problem.dtype, problem.head_dim)
        shares = share(kernel, plans, q.device)
        transport = transport_for(group, q.device, plans, shares.lane_ctas if shares else None)
        queues, arena = self._engines.queues(q.device), self._engines.arena(q.device)
        return Engine(
            plans,
            problem,
            kernel,
            q.device,
            rank=self.rank,
            transport=transport,
            queues=queues,
            shares=shares,
            arena=arena,
        )

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, seqlen: int | None) -> Problem:
        """The problem before a variant of the method is chosen. Raises RequestError for tensors that don't fit."""
        if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
            raise RequestError(
                f"q {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}",
                "must be of one dtype and on one device",
                f"{q.dtype} on {q.device} for all would work",
            )
        if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
            raise RequestError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
                "k and v must be alike, and like q but for the number of heads",
                "(B, S, heads, D), (B, S, kv_heads, D), (B, S, kv_heads, D) would work",
            )
        if self._heads[0] and (q.shape[2], k.shape[2]) != self._heads:
            rule = f"the method was chosen for heads={self._heads[0]} and kv_heads={self._heads[1]}"
            raise RequestError(f"q {tuple(q.shape)}, k {tuple(k.shape)}", rule, "as many of each would work")
        seqlen = seqlen or (self.mask.seqlen if isinstance(self.mask, Packed) else None)
        if seqlen is None and (uneven := self._uneven.get(q.shape[1])):
            rule = f"{self.n} ranks don't share {uneven} tokens evenly, so that the call must say seqlen"
            raise RequestError(f"q {tuple(q.shape)}", rule, f"seqlen={uneven} would work")
        return Problem(
            n=self.n,
            seqlen=seqlen or q.shape[1] * self.n,
            batch=q.shape[0],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            mask=self.mask,
            dtype=str(q.dtype).removeprefix("torch."),
            wire_dtype=self.wire_dtype,
            layout=self.layout,
        )

    def _refuse_shard(self, q: Tensor, problem: Problem) -> None:
        if q.shape[1] != problem.tokens(self.rank):
            raise RequestError(
                f"q {tuple(q.shape)}",
                f"rank {self.rank} of {self.n} owns {problem.tokens(self.rank)} tokens of {problem.seqlen}",
                "what `shard` returns would work",
            )


def _in_words(problem: Problem | None) -> str:
    """What all ranks must have alike, short even for thousands of documents."""
    assert problem is not None
    mask, documents = problem.mask, ""
    if isinstance(mask, Packed):
        sizes = hashlib.sha256(repr(mask.__reduce__()[1]).encode()).hexdigest()[:8]
        documents = f", {len(mask.lengths)} documents ({sizes})"
    names = ("seqlen", "batch", "heads", "kv_heads", "head_dim", "dtype")
    return ", ".join(f"{name}={getattr(problem, name)}" for name in names) + f", mask={mask.name}{documents}"
