"""Execute transfers on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sp_bench.lower import Lowering, StagingUse
from sp_bench.plan.demand import demand
from sp_bench.plan.ops import AllToAll, Chunk, Op, Pass, Plan, Transfer
from sp_bench.plan.problem import FIELDS, Problem
from sp_bench.plan.transfers import adds_up, by_heads, rows_sent
from sp_bench.run.buffers import Buffers
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, tokens_of
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
        self._demand, self._standing = demand(plan, problem), cache(self._find_standing)
        self._followed_by = {
            before: index
            for index, before in lowering.pipelined.items()
            if rank not in (self._standing(before).target, self._standing(index).target)
            and all(self._standing(i).receives and self._standing(i).sends for i in (before, index))
        }

    def begin(self) -> None:
        """Allocate, before an execution on a GPU, the outputs that lanes must not allocate themselves."""
        if self._streams.queued:
            received = (
                (i, op) for i, op in self._plan if isinstance(op, Transfer) and i not in self._lowering.receive_buffers
            )
            self._results = {index: self._new(op.recv) for index, op in received if op.recv}

    def prepost(self, index: int, op: Op, beside: bool) -> bool:
        """Post the receives of a transfer whose buffers are free, before its operands are ready.

        A receive is announced to its sender by a message, which would otherwise queue behind this rank's own sends.
        `beside`: the lane's previous transfer is still running. Returns whether the receives are posted
        (see Lowering.preposted).
        """
        assert isinstance(op, Transfer)
        posted = self._lowering.preposted.get(index)
        if posted is None or (beside and not posted.beside):
            return False
        if isinstance(op, AllToAll) and (staged := self._staged(op, "recv")):
            receives = self._with_others(op, staged)
        else:
            into = self._into(index, op)
            if index not in self._lowering.receive_buffers:
                self._results[index] = into
            receives = self._receives(index, op, into)
        self._transport.prepost(self._standing(index).turn, receives)
        return True

    def transfer(self, index: int, op: Transfer, holdings: Holdings) -> None:
        """Execute a transfer and store the received chunk."""
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
        if not self._standing(index).receives:
            self._absent(op, holdings)
            return
        into = self._into(index, op)
        if index not in self._lowering.receive_buffers:
            for tensor in into:
                tensor.zero_()
        self._arrived(index, op, into, holdings)

    def _find_standing(self, index: int) -> _Standing:
        op, buffer = self._plan.ops[index], self._lowering.receive_buffers.get(index)
        assert isinstance(op, Transfer)
        assert op.recv is not None
        source, target = self._rank, self._rank
        rows = range(self._problem.field_tokens(FIELDS[op.recv.tensor][0], self._rank))
        if isinstance(op, Pass):
            source, target = int(op.source(self._rank)), int(op.target(self._rank))
            rows = rows_sent(op, self._problem, source)
        into = self._first_rows(self._receiving[buffer], op.recv, len(rows)) if buffer else None
        counted_as = [(op.lane, op.carries, field.name) for field in FIELDS[op.carries]]
        wanted = self._demand.get(index)
        moved = (True, True) if wanted is None else (bool(wanted[self._rank]), bool(wanted[target]))
        return _Standing(Turn(self._ids[op.lane], index), counted_as, source, target, rows, into, *moved)

    def _into(self, index: int, op: Transfer) -> Tensors:
        """Return the tensors that a transfer receives into, cut to the rows that it brings."""
        standing = self._standing(index)
        if standing.into is not None:
            return standing.into
        assert op.recv is not None
        return self._first_rows(self._results.pop(index, None) or self._new(op.recv), op.recv, len(standing.rows))

    def _receives(self, index: int, op: Transfer, into: Tensors) -> list[Message]:
        """Return the messages that a transfer receives. A rank receives nothing from itself."""
        if isinstance(op, AllToAll):
            return self._with_others(op, self._pieces(op, into, of_tokens=op.to_heads))
        here = self._standing(index)
        return [(here.source, into)] if here.receives and here.source != self._rank else []

    def _arrived(self, index: int, op: Transfer, tensors: Tensors, holdings: Holdings) -> Tensors | None:
        """Store the received chunk. Returns the sent partial if it was dropped, else None."""
        assert op.send is not None
        assert op.recv is not None
        holdings.put(op.recv, tensors, self._standing(index).rows.start)
        return None if op.send in self._plan.kept else holdings.partials.drop(op.send)

    def _absent(self, op: Transfer, holdings: Holdings) -> Tensors | None:
        """Forget the chunk that a transfer doesn't bring. Returns the sent partial if it was dropped, else None."""
        assert op.send is not None
        assert op.recv is not None
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
        receive, send = (here.source, into), (here.target, outgoing)
        if (after := self._followed_by.get(index)) is None:
            receives, sends = [receive] if here.receives else [], [send] if here.sends else []
            self._transport.exchange(here.turn, receives, sends, here.counted_as)
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
            assert then.send is not None
            outgoing = into if then.send == op.recv else holdings.received(then.send)
            return there.turn, (there.source, self._into(after, then)), (there.target, outgoing)

        return messages

    def _all_to_all(self, index: int, op: AllToAll, into: Tensors, holdings: Holdings) -> None:
        """Exchange pieces with each group member: send its heads of my tokens, receive my heads of its tokens."""
        sent = self._staged(op, "send")
        own, held = int(op.group.position(self._rank)), self._held(op.send, holdings)[: len(into)]
        mine = self._pieces(op, held, of_tokens=not op.to_heads)
        places = self._pieces(op, into, of_tokens=op.to_heads)
        incoming = self._staged(op, "recv") or places
        for staged, pieces in zip(sent, mine, strict=True) if sent else ():
            for member, piece in enumerate(pieces):
                if member != own:
                    staged[member].copy_(piece)
        receives, sends = self._with_others(op, incoming), self._with_others(op, sent or mine)
        here = self._standing(index)
        self._transport.exchange(here.turn, receives, sends, here.counted_as)
        for field, tensor, ours, theirs, there in zip(by_heads(op), into, mine, incoming, places, strict=True):
            several = adds_up(op, self._problem, field)
            if several:
                tensor.zero_()
            for member, place in enumerate(there):
                # The rank's own piece is not sent, so it isn't rounded to the wire dtype.
                piece = theirs[member] if member != own else ours[own]
                if piece is not place:
                    place.add_(piece) if several else place.copy_(piece)

    def _with_others(self, op: AllToAll, pieces: Sequence[Sequence[Tensor] | Tensor]) -> list[Message]:
        """Return (rank, its tensors) for every other member; `pieces` is by field, then by member."""
        ranks = [int(op.group.member(self._rank, shift)) for shift in range(1, op.group.size)]
        found = [(rank, [field[int(op.group.position(rank))] for field in pieces]) for rank in ranks]
        return [(rank, tensors) for rank, tensors in found if tensors[0].numel()]

    def _staged(self, op: AllToAll, use: Literal["send", "recv"]) -> list[list[Tensor]] | None:
        """Return the staging tensors by field and member for `use`; None if the transfer needs no staging."""
        buffers = self._staging.get(StagingUse(op.lane, op.send.tensor, use))
        if buffers is None:
            return None
        own = self._problem.tokens(self._rank)
        of_members = op.to_heads == (use == "recv")
        tokens = [len(run) if of_members else own for run in self._runs(op)]
        return [
            [_as_shape(x[i], self._problem.field_shape(field, count)) for i, count in enumerate(tokens)]
            for field, x in zip(by_heads(op), buffers, strict=True)
        ]

    def _runs(self, op: AllToAll) -> list[range]:
        """Return each member's token range in the group's common chunk."""
        problem, first = self._problem, self._rank - int(op.group.position(self._rank))
        return [problem.layout.run(first + i, problem.n, problem.seqlen) for i in range(op.group.size)]

    def _pieces(self, op: AllToAll, tensors: Tensors, *, of_tokens: bool) -> list[list[Tensor]]:
        """Split each field by member: along tokens (`of_tokens`) or along heads."""
        if of_tokens:
            runs = self._runs(op)
            return [[x[:, run.start : run.stop] for run in runs] for x in tensors]
        found, members = [], range(op.group.size)
        for field, x in zip(by_heads(op), tensors, strict=True):
            heads = self._problem.field_heads(field)
            firsts = [member * x.shape[2] // op.group.size for member in members]
            found.append([x[:, :, first : first + heads] for first in firsts])
        return found

    def _outgoing(self, op: Pass, holdings: Holdings) -> Tensors:
        """Return the tensors to send: the chunk itself or, if rows are cut or it is cast, a staging copy."""
        assert op.send is not None
        chunk, rows = op.send, rows_sent(op, self._problem, self._rank)
        held = self._held(chunk, holdings)
        staged = self._staging.get(StagingUse(op.lane, chunk.tensor, "pass"))
        if staged is None:
            return held
        if len(rows) == held[0].shape[1] and not self._lowering.casts(chunk):
            return held
        staged = self._first_rows(staged, chunk, len(rows))
        for wire, tensor in zip(staged, held, strict=True):
            wire.copy_(tokens_of(tensor, holdings.among(chunk, rows)))
        return staged

    def _held(self, chunk: Chunk, holdings: Holdings) -> Tensors:
        """Return a chunk to send, contiguous. A partial that no block has written is created as the neutral element."""
        if holdings.is_packed(chunk):
            return holdings.packed(chunk)
        with self._streams.making():
            return holdings.packed(chunk)

    def _first_rows(self, buffers: Tensors, chunk: Chunk, tokens: int) -> Tensors:
        """Return contiguous views of `buffers` with room for `tokens` tokens of the chunk."""
        shapes = [self._problem.field_shape(field, tokens) for field in FIELDS[chunk.tensor]]
        return tuple(_as_shape(x, shape) for x, shape in zip(buffers, shapes, strict=True))

    def _new(self, chunk: Chunk) -> Tensors:
        """Allocate tensors for a chunk that outlives the plan."""
        problem, found = self._problem, []
        for field in FIELDS[chunk.tensor]:
            dtype = problem.field_dtype(field, wire=False, summed=chunk not in self._lowering.unsummed)
            found.append(torch.empty(problem.field_shape(field), dtype=getattr(torch, dtype), device=self._device))
        return tuple(found)


def _as_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View the first elements of a contiguous buffer as a tensor of `shape`, which must fit."""
    return x if x.shape == shape else x.view(-1)[: math.prod(shape)].view(shape)
