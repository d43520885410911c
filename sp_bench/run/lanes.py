"""Execute transfers on one rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_bench.plan import (
    FIELDS,
    AllToAll,
    Chunk,
    Dataflow,
    Op,
    Part,
    Pass,
    Plan,
    Problem,
    Stage,
    Transfer,
    adds_up,
    by_heads,
    is_partial,
    part_sent,
    whole_partials,
)
from sp_bench.run.buffers import Buffers
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, tokens_of
from sp_bench.run.streams import Streams
from sp_bench.run.transport import Message, Onward, Transport


class Lanes:
    """The transfers of one plan, with receive and staging buffers that are reused from call to call."""

    def __init__(
        self,
        plan: Plan,
        flow: Dataflow,
        problem: Problem,
        rank: int,
        transport: Transport,
        buffers: Buffers,
        streams: Streams,
        device: torch.device,
    ) -> None:
        self._plan, self._flow, self._problem, self._rank = plan, flow, problem, rank
        self._transport, self._streams, self._device = transport, streams, device
        self._slots, self._staging = buffers.of(plan, flow)
        self._ids = {lane: number for number, lane in enumerate(plan.lanes)}
        self._results: dict[int, Tensors] = {}
        self._whole = whole_partials(plan, problem)
        self._followed_by = self._find_followed()

    def begin(self) -> None:
        """Before an execution: make what lanes may not make when they come to it."""
        if self._streams.behind:
            received = ((i, op) for i, op in self._plan if isinstance(op, Transfer) and i not in self._flow.slots)
            self._results = {index: self._new(op.recv) for index, op in received if op.recv}

    def prepare(self, index: int, op: Op) -> None:
        """Post a receive, in its buffer, before there is anything to send.

        Its sender learns of it from a message that would else wait behind those that this rank sends it meanwhile.
        """
        if isinstance(op, Pass) and index in self._flow.slots:
            into, _ = self._into(index, op)
            source = int(op.source(self._rank))
            if source != self._rank:
                self._transport.expect(self._ids[op.lane], [(source, into)])

    def transfer(self, index: int, op: Transfer, holdings: Holdings) -> None:
        """Send and receive, and hold what came."""
        assert op.recv is not None
        into, part = self._into(index, op)
        if isinstance(op, AllToAll):
            self._all_to_all(op, into, holdings)
        else:
            self._pass(index, op, into, holdings)
        self._streams.keep(self._arrived(op, into, part, holdings))

    def pretend(self, index: int, op: Transfer, holdings: Holdings) -> None:
        """Hold what was received last time, or nothing but zeros, as if it had come now. Nothing is sent."""
        into, part = self._into(index, op)
        if index not in self._flow.slots:
            for tensor in into:
                tensor.zero_()
        self._arrived(op, into, part, holdings)

    def _into(self, index: int, op: Transfer) -> tuple[Tensors, Part]:
        """Where a transfer receives, and which part of the chunk that will be."""
        assert op.recv is not None
        slot = self._flow.slots.get(index)
        buffers = self._slots[slot] if slot else self._results.pop(index, None) or self._new(op.recv)
        if isinstance(op, AllToAll):
            return buffers, Part.WHOLE
        part = part_sent(op, self._problem, int(op.source(self._rank)))
        return self._first_rows(buffers, op.recv, part), part

    def _arrived(self, op: Transfer, tensors: Tensors, part: Part, holdings: Holdings) -> Tensors | None:
        """Returns what was sent on, and is held no more."""
        assert op.send is not None
        assert op.recv is not None
        holdings.put(op.recv, tensors, part)
        return None if op.send in self._plan.kept else holdings.partials.drop(op.send)

    def _find_followed(self) -> dict[int, int]:
        """Transfers, each with its lane's next one, if both send chunks that no block computes, as hops of a ring do.

        One that receives a result has no buffer before its turn.
        """
        found, last = {}, dict[str, tuple[int, Transfer]]()
        for index, op in self._plan:
            if isinstance(op, Transfer):
                before, last[op.lane] = last.get(op.lane), (index, op)
                if before and self._sends_as_is(before[1]) and self._sends_as_is(op) and index in self._flow.slots:
                    found[before[0]] = index
        return found

    def _sends_as_is(self, op: Transfer) -> bool:
        """Whether it sends a whole chunk to another rank, as it came or was there from the start."""
        if not isinstance(op, Pass) or op.against or int(op.target(self._rank)) == self._rank:
            return False
        return not is_partial(op.carries)

    def _pass(self, index: int, op: Pass, into: Tensors, holdings: Holdings) -> None:
        source, target = int(op.source(self._rank)), int(op.target(self._rank))
        outgoing = self._outgoing(op, holdings)
        if target == self._rank:
            for buffer, tensor in zip(into, outgoing, strict=True):
                buffer.copy_(tensor)
            return
        lane, receive, send, keys = self._ids[op.lane], (source, into), (target, outgoing), self._counted_as(op)
        if (after := self._followed_by.get(index)) is None:
            self._transport.exchange(lane, [receive], [send], keys)
        else:
            onward = self._onward(after, op, into, holdings)
            self._transport.exchange_and_go_on(lane, receive, send, keys, onward)

    def _onward(self, after: int, op: Pass, into: Tensors, holdings: Holdings) -> Onward:
        """What operation `after` receives and sends, to be begun with while `op` receives `into`."""
        then = self._plan.ops[after]
        assert isinstance(then, Pass)

        def messages() -> tuple[Message, Message] | None:
            if not self._streams.ready(after):
                return None
            assert then.send is not None
            outgoing = into if then.send == op.recv else holdings.received(then.send)
            receive = int(then.source(self._rank)), self._into(after, then)[0]
            return receive, (int(then.target(self._rank)), outgoing)

        return messages

    def _all_to_all(self, op: AllToAll, into: Tensors, holdings: Holdings) -> None:
        """Exchange one piece with each member: its heads of this rank's tokens for this rank's heads of its tokens."""
        sent, received = (self._staging.get(Stage(op.lane, op.send.tensor, use)) for use in ("send", "recv"))
        own, held = int(op.group.position(self._rank)), self._held(op.send, holdings)[: len(into)]
        mine = self._pieces(op, held, of_tokens=not op.to_heads)
        places = self._pieces(op, into, of_tokens=op.to_heads)
        for staged, pieces in zip(sent, mine, strict=True) if sent else ():
            for member, piece in enumerate(pieces):
                if member != own:
                    staged[member].copy_(piece)
        outgoing, incoming = sent or mine, received or places
        ranks = [int(op.group.member(self._rank, shift)) for shift in range(1, op.group.size)]
        others = [(rank, int(op.group.position(rank))) for rank in ranks]
        receives = [(rank, [pieces[member] for pieces in incoming]) for rank, member in others]
        sends = [(rank, [pieces[member] for pieces in outgoing]) for rank, member in others]
        self._transport.exchange(self._ids[op.lane], receives, sends, self._counted_as(op))
        for field, tensor, ours, theirs, there in zip(by_heads(op), into, mine, incoming, places, strict=True):
            several = adds_up(op, self._problem, field)
            if several:
                tensor.zero_()
            for member, place in enumerate(there):
                # The rank's own piece doesn't travel, and is spared the rounding of the wire.
                piece = theirs[member] if member != own else ours[own]
                if piece is not place:
                    place.add_(piece) if several else place.copy_(piece)

    def _pieces(self, op: AllToAll, tensors: Tensors, *, of_tokens: bool) -> list[list[Tensor]]:
        """By field, each member's tokens of a chunk by heads, or each member's heads of a chunk by tokens."""
        tokens, members = self._problem.local_seqlen, range(op.group.size)
        if of_tokens:
            return [[x[:, member * tokens : (member + 1) * tokens] for member in members] for x in tensors]
        found = []
        for field, x in zip(by_heads(op), tensors, strict=True):
            heads = self._problem.field_heads(field)
            firsts = [member * x.shape[2] // op.group.size for member in members]
            found.append([x[:, :, first : first + heads] for first in firsts])
        return found

    def _outgoing(self, op: Pass, holdings: Holdings) -> Tensors:
        """What a rank sends, in its wire form: the chunk itself, or rows of it or a cast of it, in a staging buffer."""
        assert op.send is not None
        chunk, part = op.send, part_sent(op, self._problem, self._rank)
        held, rows = self._held(chunk, holdings), holdings.among(chunk, part.slice(self._problem.block_tokens))
        staged = self._staging.get(Stage(op.lane, chunk.tensor, "pass"))
        casts = self._problem.needs_cast(chunk.tensor, whole=chunk in self._whole)
        if staged is None or (part is holdings.part(chunk) and not casts):
            return held
        staged = self._first_rows(staged, chunk, part)
        for wire, tensor in zip(staged, held, strict=True):
            wire.copy_(tokens_of(tensor, rows))
        return staged

    def _held(self, chunk: Chunk, holdings: Holdings) -> Tensors:
        """A chunk that is sent, contiguous. Of a partial that no block has touched, the neutral one has to be made."""
        if holdings.is_packed(chunk):
            return holdings.packed(chunk)
        with self._streams.making():
            return holdings.packed(chunk)

    def _first_rows(self, buffers: Tensors, chunk: Chunk, part: Part) -> Tensors:
        """As much of a chunk's buffers as a part of it takes, contiguous."""
        if part is Part.WHOLE:
            return buffers
        shapes = [self._problem.field_shape(field, part) for field in FIELDS[chunk.tensor]]
        return tuple(x.view(-1)[: math.prod(s)].view(s) for x, s in zip(buffers, shapes, strict=True))

    def _new(self, chunk: Chunk) -> Tensors:
        """Tensors for a chunk that outlives the plan."""
        problem, found = self._problem, []
        for field in FIELDS[chunk.tensor]:
            dtype = problem.field_dtype(field, wire=False, whole=chunk in self._whole)
            found.append(torch.empty(problem.field_shape(field), dtype=getattr(torch, dtype), device=self._device))
        return tuple(found)

    def _counted_as(self, op: Transfer) -> list[tuple[str, str, str]]:
        return [(op.lane, op.carries, field.name) for field in FIELDS[op.carries]]
