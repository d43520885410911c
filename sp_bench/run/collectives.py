"""The library's collectives of one plan on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sp_bench.kernels import fold_
from sp_bench.kernels.fold import in_dtype
from sp_bench.lower import Lowering, ReceiveBuffer, StagingUse
from sp_bench.lower.staging import adds_up_on_the_way
from sp_bench.plan.ops import AllGather, AllToAll, Chunk, Plan, ReduceScatter
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Kind
from sp_bench.run.dealing import Dealt
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, as_shape
from sp_bench.run.streams import Streams
from sp_bench.run.transport import Call, Key, Transport, Turn


class Collectives:
    """Gathers into receive buffers, and reduces through staging buffers; both have one slot for each member."""

    def __init__(
        self,
        plan: Plan,
        lowering: Lowering,
        problem: Problem,
        rank: int,
        transport: Transport,
        streams: Streams,
        receiving: Mapping[ReceiveBuffer, Tensors],
        staging: Mapping[StagingUse, Tensors],
    ) -> None:
        self._plan, self._lowering, self._problem, self._rank = plan, lowering, problem, rank
        self._transport, self._streams = transport, streams
        self._receiving, self._staging = receiving, staging
        self._ids = {lane: number for number, lane in enumerate(plan.lanes)}

    def transfer(self, index: int, op: AllGather | ReduceScatter, holdings: Holdings) -> None:
        """Execute a collective and store what it brings."""
        if isinstance(op, AllGather):
            self._gather(index, op, holdings)
        else:
            self._streams.keep(self._reduce(index, op, holdings))

    def pretend(self, index: int, op: AllGather | ReduceScatter, holdings: Holdings) -> None:
        """Take the data of an earlier execution for what a collective brings; nothing is sent."""
        if isinstance(op, AllGather):
            self._store(index, op, holdings)
        else:
            self._put(index, op, holdings)
            for chunk in op.reads:
                holdings.partials.drop(chunk)

    def all_to_all(self, turn: Turn, op: AllToAll, dealt: Dealt, counted_as: Sequence[Key]) -> None:
        """Exchange the pieces of an AllToAll; those of a field lie end to end."""
        if op.group.size == 1:
            return
        received, sent = ([_end_to_end(pieces) for pieces in fields] for fields in (dealt.incoming, dealt.sent))
        splits = [
            ([x.numel() for x in into], [x.numel() for x in out])
            for into, out in zip(dealt.incoming, dealt.sent, strict=True)
        ]
        for _, tensors in dealt.sends:
            self._transport.count(tensors, counted_as)
        self._transport.collective(turn, Call("all_to_all", op.group, received, sent, splits))

    def _gather(self, index: int, op: AllGather, holdings: Holdings) -> None:
        own, slot, sent = holdings.to_send(op.own), op.group.digit(self._rank), []
        buffers = self._receiving[self._lowering.receive_buffers[index]]
        for x, buffer in zip(own, buffers, strict=True):
            if x.shape != buffer[slot].shape:  # padded to the longest chunk, in its place among the others
                as_shape(buffer[slot], x.shape).copy_(x)
                x = buffer[slot]
            sent.append(x)
        self._do(index, op, Call("all_gather", op.group, buffers, sent))
        self._store(index, op, holdings)

    def _store(self, index: int, op: AllGather, holdings: Holdings) -> None:
        buffers = self._receiving[self._lowering.receive_buffers[index]]
        for chunk in op.writes:
            holdings.put(chunk, self._of_member(op, chunk, buffers))

    def _reduce(self, index: int, op: ReduceScatter, holdings: Holdings) -> list[Tensors | None]:
        """Returns the partials that were sent."""
        sent, slot = self._staging[StagingUse(op.lane, op.tensor, "send")], op.group.digit(self._rank)
        for chunk in op.reads:
            held = holdings.to_send(chunk)
            for x, place in zip(held, self._of_member(op, chunk, sent), strict=True):
                place.copy_(x)
        into = self._receiving[self._lowering.receive_buffers[index]]
        if adds_up_on_the_way(op, self._problem, self._transport.kind):
            for x in sent:
                x[slot].zero_()  # the rank's own is folded from its accumulator, which is not rounded
            self._do(index, op, Call("reduce_scatter", op.group, into, sent))
        else:
            received = self._staging[StagingUse(op.lane, op.tensor, "recv")]
            self._do(index, op, Call("all_to_all", op.group, received, sent))
            self._merge(op, received, into)
        self._put(index, op, holdings)
        return [holdings.partials.drop(chunk) for chunk in op.reads]

    def _merge(self, op: ReduceScatter, received: Tensors, into: Tensors) -> None:
        """Merge the members' partials of this rank's chunk, in the accumulators' dtype.

        Slots are as long as the longest chunk. This rank's rows lie as in its own, so that an output's fit its lse.
        """
        slots = [int(op.group.digit(op.group.member(self._rank, shift))) for shift in range(1, op.group.size)]
        shapes, wide = self._own_shapes(op), self._problem.accumulate_dtype
        parts = [tuple(as_shape(x[slot], shape) for x, shape in zip(received, shapes, strict=True)) for slot in slots]
        total = tuple(in_dtype(x, getattr(torch, wide)) for x in parts[0])
        if len(parts) > 1 and total[0] is parts[0][0]:
            total = tuple(x.clone() for x in total)
        for part in parts[1:]:
            if len(total) > 1 and op.tensor.fields[1].kind is Kind.STATISTIC:
                fold_(*total, *part)
            else:
                for x, y in zip(total, part, strict=True):
                    x.add_(y)
        for x, place, shape in zip(total, into, shapes, strict=True):
            as_shape(place, shape).copy_(x)

    def _put(self, index: int, op: ReduceScatter, holdings: Holdings) -> None:
        buffers, shapes = self._receiving[self._lowering.receive_buffers[index]], self._own_shapes(op)
        holdings.put(op.writes[0], tuple(as_shape(x, shape) for x, shape in zip(buffers, shapes, strict=True)))

    def _own_shapes(self, op: ReduceScatter) -> list[tuple[int, ...]]:
        """The shapes of the tensors of this rank's chunk, one for each field."""
        tokens = self._problem.field_tokens(op.tensor.fields[0], self._rank)
        return [self._problem.field_shape(field, tokens) for field in op.tensor.fields]

    def _of_member(self, op: AllGather | ReduceScatter, chunk: Chunk, buffers: Tensors) -> Tensors:
        """Views of the owner's slot, with its number of tokens."""
        owner = int(chunk.owner(self._rank))
        tokens, slot = self._problem.field_tokens(chunk.tensor.fields[0], owner), op.group.digit(owner)
        shapes = (self._problem.field_shape(field, tokens) for field in chunk.tensor.fields)
        return tuple(as_shape(x[slot], shape) for x, shape in zip(buffers, shapes, strict=True))

    def _do(self, index: int, op: AllGather | ReduceScatter, call: Call) -> None:
        counted_as = [(op.lane, op.tensor.name, field.name) for field in op.tensor.fields]
        for x, key in zip(call.sent, counted_as, strict=True):
            piece = x if call.kind == "all_gather" else x[0]
            self._transport.sent_bytes[key] += piece.nbytes * (op.group.size - 1)
        self._transport.collective(Turn(self._ids[op.lane], index, op.group), call)


def _end_to_end(pieces: Sequence[Tensor]) -> Tensor:
    """The flat memory of pieces that lie end to end, the first of which starts it."""
    return pieces[0].as_strided((sum(x.numel() for x in pieces),), (1,))
