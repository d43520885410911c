"""Execute transfers on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from sp_bench.lower import Lowering, StagingUse
from sp_bench.plan.demand import demand, untouched_partials
from sp_bench.plan.ops import AllGather, AllToAll, Chunk, Op, Pass, Plan, ReduceScatter, RowCollective, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.plan.transfers import rows_sent
from sp_bench.run.buffers import Buffers
from sp_bench.run.casting import Casting
from sp_bench.run.collectives import Collectives
from sp_bench.run.dealing import Dealing
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, as_shape, tokens_of
from sp_bench.run.streams import Streams
from sp_bench.run.transport import Key, Message, NextTransfer, Transport, Turn


class _Standing(NamedTuple):
    """The constants of one transfer, computed once: an execution may have thousands of transfers."""

    turn: Turn
    counted_as: list[Key]
    source: int
    target: int
    """Source and target rank of a Pass; this rank for an AllToAll."""
    rows: range
    """The rows of the chunk that it brings."""
    into: Tensors | None
    """Its receive buffers; None if its result is an output of the plan."""
    receives: bool
    sends: bool
    """Whether this rank receives, and sends, anything (plan.demand)."""


class Lanes:
    """The transfers of one plan, with receive and staging buffers that are reused from call to call."""

    def __init__(
        self,
        plan: Plan,
        lowering: Lowering,
        problem: Problem,
        rank: int,
        transport: Transport,
        buffers: Buffers,
        streams: Streams,
        device: torch.device,
    ) -> None:
        self._plan, self._lowering, self._problem, self._rank = plan, lowering, problem, rank
        self._transport, self._streams, self._device = transport, streams, device
        self._receiving, self._staging = buffers.of(lowering)
        self._ids = {lane: number for number, lane in enumerate(plan.lanes)}
        self._results: dict[int, Tensors] = {}
        """Output tensors of transfers, allocated before the transfer runs."""
        self.given_results: Mapping[Chunk, Tensors] = {}
        """Where the caller of this execution wants outputs of transfers."""
        self._dealing = Dealing(problem, rank, self._staging)
        self._collectives = Collectives(
            plan, lowering, problem, rank, transport, streams, self._receiving, self._staging
        )
        self._casting = Casting(
            plan, lowering, problem, rank, transport, streams, self._receiving, self._staging, device
        )
        self._demand, self._standing = demand(plan, problem), cache(self._find_standing)
        self._untouched = cache(self._find_untouched)
        self._followed_by = {
            before: index
            for index, before in lowering.pipelined.items()
            if rank not in (self._standing(before).target, self._standing(index).target)
            and all(self._standing(i).receives and self._standing(i).sends for i in (before, index))
        }

    def begin(self, holdings: Holdings, *, compute: bool) -> None:
        """Allocate, before an execution, what lanes must not allocate themselves: outputs, and neutral partials.

        Without `compute` all partials that are sent are neutral.
        """
        holdings.partials.expect_untouched(self._untouched(compute))
        if self._streams.queued:
            alone = ((i, op) for i, op in self._plan if isinstance(op, Pass | AllToAll))
            self._results = {i: self._new(op.recv) for i, op in alone if i not in self._lowering.receive_buffers}

    def close(self) -> None:
        """Let go of the buffers. No execution may follow."""
        self._standing.cache_clear()
        for tensors in (self._receiving, self._staging, self._results):
            tensors.clear()

    def prepost(self, index: int, op: Op, beside: bool) -> bool:
        """Post the receives of a transfer whose buffers are free, before its operands are ready.

        A receive is announced to its sender by a message, which would otherwise queue behind this rank's own sends.
        `beside`: the lane's previous transfer is still running. Returns whether the receives are posted
        (see Lowering.preposted).
        """
        posted = self._lowering.preposted.get(index)
        if posted is None or (beside and not posted.beside):
            return False
        assert isinstance(op, Pass | AllToAll)
        if isinstance(op, AllToAll) and (staged := self._dealing.staged(op, "recv")):
            receives = self._dealing.with_others(op, staged)
        else:
            into = self._into(index, op)
            if index not in self._lowering.receive_buffers:
                self._results[index] = into
            receives = self._receives(index, op, into)
        self._transport.prepost(self._standing(index).turn, receives)
        return True

    def transfer(self, index: int, op: Transfer, holdings: Holdings) -> None:
        """Execute a transfer and store the received chunk."""
        if isinstance(op, AllGather | ReduceScatter):
            self._collectives.transfer(index, op, holdings)
            return
        if isinstance(op, RowCollective):
            self._casting.transfer(index, op, holdings)
            return
        into = self._into(index, op)
        if isinstance(op, AllToAll):
            self._all_to_all(index, op, into, holdings)
        else:
            self._pass(index, op, into, holdings)
        if self._standing(index).receives:
            self._streams.keep(self._arrived(index, op, into, holdings))
        else:
            self._streams.keep(self._absent(op, holdings))

    def pretend(self, index: int, op: Transfer, holdings: Holdings) -> None:
        """Store the data of an earlier execution (or zeros) as if it had just been received; nothing is sent."""
        if isinstance(op, AllGather | ReduceScatter):
            self._collectives.pretend(index, op, holdings)
            return
        if isinstance(op, RowCollective):
            self._casting.pretend(index, op, holdings)
            return
        if not self._standing(index).receives:
            self._absent(op, holdings)
            return
        into = self._into(index, op)
        if index not in self._lowering.receive_buffers:
            for tensor in into:
                tensor.zero_()
        self._arrived(index, op, into, holdings)

    def _find_untouched(self, compute: bool) -> list[Chunk]:
        found = untouched_partials(self._plan, self._problem, compute=compute)
        return [chunk for chunk, ranks in found.items() if ranks[self._rank]]

    def _find_standing(self, index: int) -> _Standing:
        op, buffer = self._plan.ops[index], self._lowering.receive_buffers.get(index)
        assert isinstance(op, Pass | AllToAll)
        source, target = self._rank, self._rank
        rows = range(self._problem.field_tokens(op.recv.tensor.fields[0], self._rank))
        if isinstance(op, Pass):
            source, target = int(op.source(self._rank)), int(op.target(self._rank))
            rows = rows_sent(op, self._problem, source)
        into = self._first_rows(self._receiving[buffer], op.recv, len(rows)) if buffer else None
        landing = self._receiving[buffer] if buffer else self._landing(op)
        counted_as = [(op.lane, op.tensor.name, field.name) for field in op.tensor.fields]
        wanted = self._demand.get(index)
        moved = (True, True) if wanted is None else (bool(wanted[self._rank]), bool(wanted[target]))
        turn = Turn(self._ids[op.lane], index, op.group, landing if isinstance(op, Pass) else ())
        return _Standing(turn, counted_as, source, target, rows, into, *moved)

    def _landing(self, op: Pass | AllToAll) -> Tensors:
        """The buffers in which peers put a result of the plan; none if they don't write to this rank's memory."""
        return self._staging.get(StagingUse(op.lane, op.recv.tensor, "land"), ())

    def _into(self, index: int, op: Pass | AllToAll) -> Tensors:
        """Return the tensors that a transfer receives into, cut to the rows that it brings."""
        standing = self._standing(index)
        if standing.into is not None:
            return standing.into
        return self._first_rows(self._results.pop(index, None) or self._new(op.recv), op.recv, len(standing.rows))

    def _receives(self, index: int, op: Pass | AllToAll, into: Tensors) -> list[Message]:
        """Return the messages that a transfer receives. A rank receives nothing from itself."""
        if isinstance(op, AllToAll):
            return self._dealing.with_others(op, self._dealing.pieces(op, into, of_tokens=op.to_heads))
        here = self._standing(index)
        return [(here.source, into)] if here.receives and here.source != self._rank else []

    def _arrived(self, index: int, op: Pass | AllToAll, tensors: Tensors, holdings: Holdings) -> Tensors | None:
        """Store the received chunk. Returns the sent partial if it was dropped, else None."""
        holdings.put(op.recv, tensors, self._standing(index).rows.start)
        return None if op.send in self._plan.kept else holdings.partials.drop(op.send)

    def _absent(self, op: Pass | AllToAll, holdings: Holdings) -> Tensors | None:
        """Forget the chunk that a transfer doesn't bring. Returns the sent partial if it was dropped, else None."""
        holdings.drop(op.recv)
        return None if op.send in self._plan.kept else holdings.partials.drop(op.send)

    def _pass(self, index: int, op: Pass, into: Tensors, holdings: Holdings) -> None:
        here = self._standing(index)
        if not (here.receives or here.sends):
            return
        outgoing = self._outgoing(op, holdings) if here.sends else ()
        if here.target == self._rank:
            for buffer, tensor in zip(into, outgoing, strict=True):
                buffer.copy_(tensor)
            return
        landed = into
        if here.into is None and here.turn.landing:
            landed = self._first_rows(here.turn.landing, op.recv, len(here.rows))
        receive, send = (here.source, landed), (here.target, outgoing)
        if (after := self._followed_by.get(index)) is None:
            receives, sends = [receive] if here.receives else [], [send] if here.sends else []
            self._transport.exchange(here.turn, receives, sends, here.counted_as)
            for result, x in zip(into, landed, strict=True) if receives and landed is not into else ():
                result.copy_(x)
        else:
            next_transfer = self._next_transfer(after, op, into, holdings)
            self._transport.exchange_pipelined(here.turn, receive, send, here.counted_as, next_transfer)

    def _next_transfer(self, after: int, op: Pass, into: Tensors, holdings: Holdings) -> NextTransfer:
        """Return a function giving the messages of transfer `after`, which may start while `op` receives `into`."""
        then, there = self._plan.ops[after], self._standing(after)
        assert isinstance(then, Pass)

        def messages() -> tuple[Turn, Message, Message] | None:
            if not self._streams.ready(after):
                return None
            outgoing = into if then.send == op.recv else holdings.received(then.send)
            return there.turn, (there.source, self._into(after, then)), (there.target, outgoing)

        return messages

    def _all_to_all(self, index: int, op: AllToAll, into: Tensors, holdings: Holdings) -> None:
        dealt = self._dealing.begin(op, into, holdings.to_send(op.send)[: len(into)])
        here = self._standing(index)
        if op.by_messages:
            self._transport.exchange(here.turn, dealt.receives, dealt.sends, here.counted_as)
        else:
            self._collectives.all_to_all(here.turn, op, dealt, here.counted_as)
        self._dealing.end(op, into, dealt)

    def _outgoing(self, op: Pass, holdings: Holdings) -> Tensors:
        """Return the tensors to send: the chunk itself or, if rows are cut or it is cast, a staging copy."""
        chunk, rows = op.send, rows_sent(op, self._problem, self._rank)
        held = holdings.to_send(chunk)
        staged = self._staging.get(StagingUse(op.lane, chunk.tensor, "pass"))
        if staged is None:
            return held
        if len(rows) == held[0].shape[1] and not self._lowering.casts(chunk):
            return held
        staged = self._first_rows(staged, chunk, len(rows))
        for wire, tensor in zip(staged, held, strict=True):
            wire.copy_(tokens_of(tensor, holdings.among(chunk, rows)))
        return staged

    def _first_rows(self, buffers: Tensors, chunk: Chunk, tokens: int) -> Tensors:
        """Return contiguous views of `buffers` with room for `tokens` tokens of the chunk."""
        shapes = [self._problem.field_shape(field, tokens) for field in chunk.tensor.fields]
        return tuple(as_shape(x, shape) for x, shape in zip(buffers, shapes, strict=True))

    def _new(self, chunk: Chunk) -> Tensors:
        """Tensors for a chunk that outlives the plan: those that the caller gave, or new ones."""
        if chunk in self.given_results:
            return self.given_results[chunk]
        specs = self._lowering.held_specs(chunk)
        return tuple(torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) for shape, dtype in specs)
