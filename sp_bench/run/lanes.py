"""Execute transfers on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_bench.plan import (
    FIELDS,
    AllToAll,
    Bundle,
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
    begun_early,
    by_heads,
    part_sent,
    peers,
    previous_on_lane,
    unsummed_partials,
)
from sp_bench.run.buffers import Buffers
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, tokens_of
from sp_bench.run.streams import Streams
from sp_bench.run.transport import Message, Onward, Transport, Turn


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
        """Made before their transfer comes."""
        self._unsummed = unsummed_partials(plan, problem)
        self._before = previous_on_lane(plan)
        self._apart = self._find_apart()
        self._followed_by = {
            before: index
            for index, before in begun_early(plan).items()
            if self._all_leave(plan.ops[index], plan.ops[before])
        }

    def begin(self) -> None:
        """Before an execution: make what lanes may not make when they come to it."""
        if self._streams.behind:
            received = ((i, op) for i, op in self._plan if isinstance(op, Transfer) and i not in self._flow.slots)
            self._results = {index: self._new(op.recv) for index, op in received if op.recv}

    def prepare(self, index: int, op: Op, beside: bool) -> bool:
        """Post the receives of a transfer, where there is room for them, before there is anything to send.

        Their senders learn of them from messages that would else wait behind those that this rank sends them meanwhile.
        Returns whether it could: not for a Pass that brings a result, whose buffer is yet to be made, and `beside` the
        lane's transfer before it only if they are apart (_find_apart).
        """
        assert isinstance(op, Transfer)
        if beside and index not in self._apart:
            return False
        if isinstance(op, Pass) and index not in self._flow.slots:
            return False
        if isinstance(op, AllToAll) and (staged := self._received_in(op)):
            receives = self._with_others(op, staged)
        else:
            into, _ = self._into(index, op)
            if index not in self._flow.slots:
                self._results[index] = into
            receives = self._receives(op, into)
        self._transport.expect(self._turn(index, op), receives)
        return True

    def transfer(self, index: int, op: Transfer, holdings: Holdings) -> None:
        """Send and receive, and hold what came."""
        assert op.recv is not None
        into, part = self._into(index, op)
        if isinstance(op, AllToAll):
            self._all_to_all(index, op, into, holdings)
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

    def _receives(self, op: Transfer, into: Tensors) -> list[Message]:
        """From whom a transfer receives what into a chunk. What a rank has from itself isn't received."""
        if isinstance(op, AllToAll):
            return self._with_others(op, self._pieces(op, into, of_tokens=op.to_heads))
        source = int(op.source(self._rank))
        return [(source, into)] if source != self._rank else []

    def _arrived(self, op: Transfer, tensors: Tensors, part: Part, holdings: Holdings) -> Tensors | None:
        """Returns what was sent on, and is held no more."""
        assert op.send is not None
        assert op.recv is not None
        holdings.put(op.recv, tensors, part)
        return None if op.send in self._plan.kept else holdings.partials.drop(op.send)

    def _find_apart(self) -> set[int]:
        """Transfers that can be received beside the one before them on their lane, and from the same ranks.

        They receive into nothing that it receives into or sends from. Of two ranks that send at once each would have
        half of the way, and others would wait for what they send next.
        """
        uses, found = dict[int, set[object]](), set[int]()
        held: dict[Chunk, set[object]] = {}
        """By chunk, the buffers that it stands in."""
        for index, op in self._plan:
            if isinstance(op, Bundle):
                held[op.into] = set().union(*(held.get(part, set()) for part in op.parts))
            elif isinstance(op, Transfer):
                assert op.send is not None
                assert op.recv is not None
                into: set[object] = {self._flow.slots[index]} if index in self._flow.slots else set()
                received_in = into | ({Stage(op.lane, op.send.tensor, "recv")} & {*self._staging})
                uses[index] = received_in | held.get(op.send, set())
                before = self._before.get(index, -1)
                alike = before in uses and self._sources(index) == self._sources(before)
                if alike and not uses[before] & received_in:
                    found.add(index)
                held[op.recv] = into
        return found

    def _sources(self, index: int) -> set[int]:
        """The ranks that a transfer receives from."""
        op = self._plan.ops[index]
        assert isinstance(op, Transfer)
        return {int(group.member(self._rank, -shift)) for group, shift in peers(op)} - {self._rank}

    def _all_leave(self, *ops: Op) -> bool:
        """Whether what these passes send goes to another rank."""
        return all(isinstance(op, Pass) and int(op.target(self._rank)) != self._rank for op in ops)

    def _pass(self, index: int, op: Pass, into: Tensors, holdings: Holdings) -> None:
        source, target = int(op.source(self._rank)), int(op.target(self._rank))
        outgoing = self._outgoing(op, holdings)
        if target == self._rank:
            for buffer, tensor in zip(into, outgoing, strict=True):
                buffer.copy_(tensor)
            return
        turn, receive, send, keys = self._turn(index, op), (source, into), (target, outgoing), self._counted_as(op)
        if (after := self._followed_by.get(index)) is None:
            self._transport.exchange(turn, [receive], [send], keys)
        else:
            onward = self._onward(after, op, into, holdings)
            self._transport.exchange_and_go_on(turn, receive, send, keys, onward)

    def _onward(self, after: int, op: Pass, into: Tensors, holdings: Holdings) -> Onward:
        """What operation `after` receives and sends, to be begun with while `op` receives `into`."""
        then = self._plan.ops[after]
        assert isinstance(then, Pass)

        def messages() -> tuple[Turn, Message, Message] | None:
            if not self._streams.ready(after):
                return None
            assert then.send is not None
            outgoing = into if then.send == op.recv else holdings.received(then.send)
            receive = int(then.source(self._rank)), self._into(after, then)[0]
            return self._turn(after, then), receive, (int(then.target(self._rank)), outgoing)

        return messages

    def _all_to_all(self, index: int, op: AllToAll, into: Tensors, holdings: Holdings) -> None:
        """Exchange one piece with each member: its heads of this rank's tokens for this rank's heads of its tokens."""
        sent = self._staging.get(Stage(op.lane, op.send.tensor, "send"))
        own, held = int(op.group.position(self._rank)), self._held(op.send, holdings)[: len(into)]
        mine = self._pieces(op, held, of_tokens=not op.to_heads)
        places = self._pieces(op, into, of_tokens=op.to_heads)
        incoming = self._received_in(op) or places
        for staged, pieces in zip(sent, mine, strict=True) if sent else ():
            for member, piece in enumerate(pieces):
                if member != own:
                    staged[member].copy_(piece)
        receives, sends = self._with_others(op, incoming), self._with_others(op, sent or mine)
        self._transport.exchange(self._turn(index, op), receives, sends, self._counted_as(op))
        for field, tensor, ours, theirs, there in zip(by_heads(op), into, mine, incoming, places, strict=True):
            several = adds_up(op, self._problem, field)
            if several:
                tensor.zero_()
            for member, place in enumerate(there):
                # The rank's own piece doesn't travel, and is spared the rounding of the wire.
                piece = theirs[member] if member != own else ours[own]
                if piece is not place:
                    place.add_(piece) if several else place.copy_(piece)

    def _with_others(self, op: AllToAll, pieces: Sequence[Sequence[Tensor] | Tensor]) -> list[Message]:
        """Each other member's rank, and its pieces out of those of all members by field."""
        ranks = [int(op.group.member(self._rank, shift)) for shift in range(1, op.group.size)]
        return [(rank, [field[int(op.group.position(rank))] for field in pieces]) for rank in ranks]

    def _received_in(self, op: AllToAll) -> Tensors | None:
        """By field, where each member's piece arrives if that isn't where it stays."""
        return self._staging.get(Stage(op.lane, op.send.tensor, "recv"))

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
        if staged is None:
            return held
        casts = self._problem.needs_cast(chunk.tensor, summed=chunk not in self._unsummed)
        if part is holdings.part(chunk) and not casts:
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
            dtype = problem.field_dtype(field, wire=False, summed=chunk not in self._unsummed)
            found.append(torch.empty(problem.field_shape(field), dtype=getattr(torch, dtype), device=self._device))
        return tuple(found)

    def _turn(self, index: int, op: Transfer) -> Turn:
        return Turn(self._ids[op.lane], index)

    def _counted_as(self, op: Transfer) -> list[tuple[str, str, str]]:
        return [(op.lane, op.carries, field.name) for field in FIELDS[op.carries]]
