"""Plans of one problem, checked and ready to run on a rank."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel, choose, choose_for_caches
from sp_bench.kernels.contract import harmless
from sp_bench.kernels.fold import fold_notes, in_dtype
from sp_bench.lower import lower
from sp_bench.plan.caches import Caches
from sp_bench.plan.ops import Chunk, Plan
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DO, DQ, KV, ODOQ, OUT, Field, Kind, O, Q
from sp_bench.plan.tensors import Tensor as ChunkTensor
from sp_bench.run.blocks import of_sinks
from sp_bench.run.buffers import Arena, Borrowed, Buffers
from sp_bench.run.devices import Cuda, Device
from sp_bench.run.execution import Sinks
from sp_bench.run.executor import Action, Executor, Spent
from sp_bench.run.gloo import GlooTransport
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.latents import Latents
from sp_bench.run.padding import padded, padded_by_head, true, true_by_head
from sp_bench.run.partials import Tensors, tokens_of
from sp_bench.run.slices import one_slice, together
from sp_bench.run.sms import SmShares
from sp_bench.run.transport import Transport

SINKS = "sinks"
"""The key of the scores that a forward had besides those of keys, among what it saves."""
Saved = dict[Any, Tensors]
"""The tensors that a forward leaves for its backward. An Engine: fields of its plans' tensors (KV, ODOQ, ...)."""


def kernel_for(problem: Problem, name: str, device: str) -> BlockKernel:
    """The kernel of that name, or the one that `auto` takes, for a problem's blocks on a device, cpu or cuda.

    Raises RequestError if it refuses the device, dtype or widths.
    """
    mask = problem.mask
    if isinstance(mask, Caches):
        return choose_for_caches(name, device, problem.dtype, problem.head_dim, problem.value_dim, mask.page)
    return choose(name, device, problem.dtype, problem.head_dim)


class _Ends(NamedTuple):
    """The inputs and the results of a plan on this rank."""

    plan: Plan
    views: Container[Chunk]
    """Chunks that may be views of tensors with all heads."""
    read: tuple[ChunkTensor, ...]
    """The tensors of its inputs."""
    written: tuple[ChunkTensor, ...]
    """Those of its outputs."""
    whole: Mapping[ChunkTensor, Sequence[tuple[tuple[int, ...], torch.dtype]]]
    """The shapes and dtypes of results of which slices are written in place."""
    written_in_place: Sequence[Chunk]
    gathered: Mapping[ChunkTensor, Sequence[Chunk]]
    """The chunks of each other result, by their slices of heads."""


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
        words: str = "",
        timed: bool = False,
        latents: Latents | None = None,
    ) -> None:
        """Execute `plans` (by phase) as `rank` of problem.n ranks; a single rank needs no `transport`.

        `queues` is the stream interface of an asynchronous device; default: Cuda on a GPU, none on a CPU. With `arena`,
        memory for its buffers where the transport doesn't make them, it is the arena's. `shares` says what kernel and
        transport were told to take of the GPU. `words` say what it computes. `timed` has a GPU mark the times of
        kernels, folds and waits, by events; on a CPU they are always known. `latents` make keys of a problem that has
        some; a backward adds to their gradients.
        Raises RequestError if the kernel refuses the device or dtype.
        """
        self.plans, self.problem, self.shares, self.words, self._timed = plans, problem, shares, words, timed
        self.latents = latents
        """The matrices that make keys of latents, and their gradients; None if no latents travel."""
        self.kernel = kernel if isinstance(kernel, BlockKernel) else kernel_for(problem, kernel, device.type)
        self.transport = transport or GlooTransport(None)
        self._rank, self._device = rank, device
        lent = arena is not None and not self.transport.makes_memory
        self.buffers = Borrowed(arena, self.transport, self) if arena and lent else Buffers(device, self.transport)
        self.queues = arena.queues if arena else queues or (Cuda(device) if device.type == "cuda" else None)
        """The asynchronous device; None on a CPU."""
        self._ends: dict[str, _Ends] = {}
        self._executors: dict[str, Executor] = {}
        self._read: dict[str, Callable[[], Spent]] = {}
        """Time breakdowns of executors that are closed."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        action: Action = Action.EVERYTHING,
        live: LiveBytes | None = None,
        sinks: Tensor | None = None,
        held: Tensors = (),
    ) -> tuple[Tensor, Saved]:
        """Return out_BSHD of this rank's queries in the compute dtype, and the tensors saved for the backward.

        `q` has this rank's queries, or those of all ranks where all of them have them (Problem.queries_everywhere).

        `sinks`, (H,) in the dtype of statistics, are scores that each row's softmax has besides those of keys.
        `held` are keys and values that all ranks hold beside those that are assigned, (B, T, kv_heads, D) each, of as
        many tokens as the mask says (plan.mask.Joint). There is no backward with them.
        """
        assert (held[0].shape[1] if held else 0) == self.problem.mask.held, "as many as the plans were made for"
        sunk = self._sinks(sinks)
        results = self._run("forward", {Q: (q,), KV: (k, v)}, action, live, sunk, held)
        out, *lse = results.pop(O, None) or results.pop(OUT)
        if "backward" in self.plans:
            lse = [harmless(x) for x in lse]
            results = {tensor: _with_harmless_lse(tensor, fields) for tensor, fields in results.items()}
            needs = {chunk.tensor for chunk in self.plans["backward"].inputs}
            results |= {KV: (k, v)} if KV in needs else {}
            results |= {Q: (q,)} if Q in needs else {}
            results |= {ODOQ: (q, out, *lse)} if ODOQ in needs else {}
            results |= {SINKS: (sinks,)} if sinks is not None else {}
        return out, results

    def backward(
        self, dout: Tensor, saved: Saved, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, ...]:
        """Return (dq, dk, dv) of this rank's tokens in the compute dtype.

        After a forward with sinks also their gradient, (H,), by what this rank has: its queries, or its heads.
        """
        inputs = {**saved, DO: (dout,)}
        (sinks,) = inputs.pop(SINKS, (None,))
        if ODOQ in saved:
            q, out, lse = saved[ODOQ]
            inputs[ODOQ] = (q, out, dout, lse)
        sunk = self._sinks(sinks)
        results = self._run("backward", inputs, action, live, sunk)
        gradients = (*results[DQ], *results[DKV])
        if sunk is None or sinks is None:
            return gradients
        if ODOQ not in inputs:  # it is made by heads, and the gradient of sinks with it
            return *gradients, true_by_head(sunk.gradient, self.problem)
        _, out, _, lse = inputs[ODOQ]
        return *gradients, of_sinks(sinks, out, dout, lse)

    @property
    def kernel_name(self) -> str:
        """Name of the block kernel in use."""
        return self.kernel.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on its kernels for a reader of its times."""
        of_shares = (self.shares.note,) if self.shares and self.shares.note else ()
        narrow, wide = self.problem.value_dim, self.problem.head_dim
        pads = self.kernel.pads(wide, narrow)
        of_values = (f"{self.kernel.name} computes values of {narrow} as values of {wide}",) if pads else ()
        return (*self.kernel.notes, *of_values, *of_shares, *fold_notes(self._device))

    def spent(self, phase: str) -> Spent:
        """Time breakdown of the phase's last execution. On a GPU, synchronize first."""
        return self.reading(phase)()

    def reading(self, phase: str) -> Callable[[], Spent]:
        """A function that tells the time breakdown of the phase's last execution, even after the next one."""
        return self._executors[phase].reading() if phase in self._executors else self._read[phase]

    def close(self) -> None:
        """End the executors' streams and let go of their buffers; a later execution makes them again."""
        while self._executors:
            phase, executor = self._executors.popitem()
            self._read[phase] = executor.reading()
            executor.close()

    def _sinks(self, scores: Tensor | None) -> Sinks | None:
        """The sinks of an execution; heads of zeros have one that weighs nothing beside their outputs of zero."""
        return None if scores is None else Sinks.of(padded_by_head(scores, self.problem))

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
                timed=self._timed,
                latents=self.latents,
            )
        return self._executors[phase]

    def _run(
        self,
        phase: str,
        inputs: Saved,
        action: Action,
        live: LiveBytes | None,
        sinks: Sinks | None = None,
        held: Tensors = (),
    ) -> Saved:
        """Run a phase on its input tensors by chunk type; return its results likewise, in the compute dtype.

        Both have the true heads, but for what the forward keeps by heads.
        """
        ends, all_heads = self._ends.get(phase) or self._ends.setdefault(phase, self._find_ends(phase)), inputs
        if self.problem.padded is not None:
            all_heads = {**inputs} | {t: tuple(padded(x, self.problem, t) for x in inputs[t]) for t in ends.read}
            held = tuple(padded(x, self.problem, KV) for x in held)
        given = {chunk: self._given(chunk, all_heads, ends) for chunk in ends.plan.starts_with}
        if live:
            live.always = [x for tensors in (*inputs.values(), held) for x in tensors]
            live.always += self.latents.tensors if self.latents else ()
        whole = {
            tensor: tuple([torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs])
            for tensor, specs in ends.whole.items()
        }
        views = {chunk: self._slices(chunk, whole[chunk.tensor]) for chunk in ends.written_in_place}
        results_of = self._executor(phase)(given, action, live, views, sinks, held)
        for tensor, chunks in ends.gathered.items():
            whole[tensor] = self._whole(tensor, results_of, chunks, ends.plan)
        results = {**whole}
        if self.problem.padded is not None:
            results |= {t: tuple(true(x, self.problem, t) for x in whole[t]) for t in ends.written}
        if live:
            known = [*given.values(), *results_of.values(), *whole.values(), *results.values()]
            live.see([*self.buffers.tensors(), *(x for tensors in known for x in tensors)])
        return results

    def _find_ends(self, phase: str) -> _Ends:
        plan = self.plans[phase]
        views = lower(plan, self.problem, self.transport.kind).views
        written = dict.fromkeys(chunk.tensor for chunk in plan.outputs)
        in_views = {chunk.tensor for chunk in plan.outputs if chunk in views}
        dtype, problem = getattr(torch, self.problem.dtype), self.problem.in_one_slice
        whole = {
            tensor: [
                (problem.field_shape(field, self.problem.shards_of(tensor).tokens(self._rank)), dtype)
                for field in tensor.fields
            ]
            for tensor in written
            if tensor in in_views
        }
        others = dict.fromkeys(chunk.tensor for chunk in plan.ends_with if chunk.tensor not in whole)
        return _Ends(
            plan,
            views,
            tuple(dict.fromkeys(chunk.tensor for chunk in plan.inputs)),
            tuple(written),
            whole,
            [chunk for chunk in plan.outputs if chunk.tensor in whole],
            {t: sorted((c for c in plan.ends_with if c.tensor == t), key=lambda c: c.heads) for t in others},
        )

    def _given(self, chunk: Chunk, inputs: Mapping[ChunkTensor, Tensors], ends: _Ends) -> Tensors:
        """The tensors that a chunk starts with: a slice of an input, or what the forward kept of it."""
        kept = ends.plan.kept
        if chunk in kept:
            width, alike = len(chunk.tensor.fields), [c for c in kept if c.tensor == chunk.tensor]
            first = width * alike.index(chunk)
            return inputs[chunk.tensor][first : first + width]
        whole = inputs[chunk.tensor]
        if chunk.tensor is Q and self.problem.queries_everywhere:
            rows = self.problem.queries.positions(int(chunk.owner(self._rank)))
            whole = tuple(tokens_of(x, rows[0] if rows else range(0)) for x in whole)
        slices = self._slices(chunk, whole)
        return slices if chunk in ends.views else tuple([x.contiguous() for x in slices])

    def _slices(self, chunk: Chunk, whole: Tensors) -> Tensors:
        if self.problem.head_slices == 1:
            return whole
        return tuple(one_slice(x, self.problem, chunk.tensor, chunk.heads) for x in whole)

    def _whole(
        self, tensor: ChunkTensor, found: Mapping[Chunk, Tensors], chunks: Sequence[Chunk], plan: Plan
    ) -> Tensors:
        """All head slices of a result together; of what is kept, one after another. Sums are cast to compute dtype."""
        fields = [[self._cast(field, found[chunk][i]) for chunk in chunks] for i, field in enumerate(tensor.fields)]
        if chunks[0] in plan.kept:
            return tuple(x for tensors in zip(*fields, strict=True) for x in tensors)
        return tuple([together(slices, self.problem, tensor) for slices in fields])

    def _cast(self, field: Field, x: Tensor) -> Tensor:
        return x if field.kind is Kind.STATISTIC else in_dtype(x, getattr(torch, self.problem.dtype))


def _with_harmless_lse(tensor: ChunkTensor, fields: Tensors) -> Tensors:
    """The fields of a tensor, or of several chunks of it one behind the other, as kernels' gradients take them."""
    names = [field.name for field in tensor.fields]
    return tuple([harmless(x) if name == "lse" else x for x, name in zip(fields, cycle(names))])
