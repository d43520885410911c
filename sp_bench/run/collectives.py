"""The calls of the library's gathers and reductions of one plan on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from sp_bench.kernels.fold import fold_each_, merge_
from sp_bench.lower import Lowering, ReceiveBuffer, StagingUse
from sp_bench.lower.staging import adds_up_on_the_way
from sp_bench.plan.ops import AllGather, Chunk, Plan, ReduceScatter, Round, Transfer, TreeReduce
from sp_bench.plan.problem import Problem
from sp_bench.run.execution import Execution, Perform
from sp_bench.run.partials import Tensors, as_shape, copy
from sp_bench.run.streams import Streams
from sp_bench.run.transport import Call, Transport, Turn, byte_keys


class GroupTransfers:
    """The state that transfers among the members of a group share: one plan on one rank, with its buffers."""

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
        device: torch.device,
    ) -> None:
        self._plan, self._lowering, self._problem, self._rank = plan, lowering, problem, rank
        self._transport, self._streams, self._device = transport, streams, device
        self._receiving, self._staging = receiving, staging
        self._ids = {lane: number for number, lane in enumerate(plan.lanes)}

    def _turn(self, index: int, op: Transfer) -> Turn:
        return Turn(self._ids[op.lane], index, op.group)

    def _buffers(self, index: int) -> Tensors:
        """The buffers that transfer `index` receives into."""
        return self._receiving[self._lowering.receive_buffers[index]]


class Collectives(GroupTransfers):
    """Gathers into receive buffers, and reduces through staging buffers; both have one slot for each member."""

    def call(self, index: int, op: AllGather | ReduceScatter) -> Perform:
        """The call of a collective, which stores what it brings."""
        if isinstance(op, TreeReduce):
            return self._tree(index, op)
        return self._gather(index, op) if isinstance(op, AllGather) else self._reduce(index, op)

    def pretended(self, index: int, op: AllGather | ReduceScatter) -> Perform:
        """The call that takes the data of an earlier execution for what a collective brings; it sends nothing."""
        brought = self._brought(index, op)

        def pretend(run: Execution) -> None:
            for chunk, tensors in brought:
                run.holdings.put(chunk, tensors)
            for chunk in op.reads if isinstance(op, ReduceScatter) else ():
                run.holdings.partials.drop(chunk)

        return pretend

    def _gather(self, index: int, op: AllGather) -> Perform:
        buffers, brought = self._buffers(index), self._brought(index, op)
        slot = int(op.group.digit(self._rank))
        slots, collective = [x[slot] for x in buffers], self._collective(index, op)

        def gather(run: Execution) -> None:
            sent = []
            for x, mine in zip(run.holdings.to_send(op.own), slots, strict=True):
                if x.shape != mine.shape:  # padded to the longest chunk, in its place among the others
                    as_shape(mine, tuple(x.shape)).copy_(x)
                    x = mine
                sent.append(x)
            collective(Call("all_gather", op.group, buffers, sent))
            for chunk, tensors in brought:
                run.holdings.put(chunk, tensors)

        return gather

    def _reduce(self, index: int, op: ReduceScatter) -> Perform:
        sent, slot = self._staging[StagingUse(op.lane, op.tensor, "send")], int(op.group.digit(self._rank))
        places = [x for chunk in op.reads for x in self._of_member(op, chunk, sent)]
        into, brought, keep = self._buffers(index), self._brought(index, op), self._streams.keeper(index)
        adds, collective = adds_up_on_the_way(op, self._problem, self._transport.kind), self._collective(index, op)
        received = () if adds else self._staging[StagingUse(op.lane, op.tensor, "recv")]

        def reduce(run: Execution) -> None:
            copy(places, [x for chunk in op.reads for x in run.holdings.to_send(chunk)])
            if adds:
                for x in sent:
                    x[slot].zero_()  # the rank's own is folded from its accumulator, which is not rounded
                collective(Call("reduce_scatter", op.group, into, sent))
            else:
                collective(Call("all_to_all", op.group, received, sent))
                self._merge(op, received, into)
            for chunk, tensors in brought:
                run.holdings.put(chunk, tensors)
            keep([run.holdings.partials.drop(chunk) for chunk in op.reads])

        return reduce

    def _tree(self, index: int, op: TreeReduce) -> Perform:
        """The call of a reduction in rounds, over sums of all places in the accumulators' dtype."""
        assert op.tensor.is_output, "gradients are added by the library"
        sums = self._staging[StagingUse(op.lane, op.tensor, "sum")]
        places = (int(op.place(self._rank, chunk.owner(self._rank))) for chunk in op.reads)
        held = [x for place in places for x in self._at(op, place, sums)]
        out, lse = own = self._at(op, 0, sums)
        brought, keep = self._brought(index, op), self._streams.keeper(index)
        rounds = [self._round(index, op, each) for each in op.rounds]

        def reduce(run: Execution) -> None:
            copy(held, [x for chunk in op.reads for x in run.holdings.to_send(chunk)])
            out.zero_()  # the rank's own is folded from its accumulator, which is not rounded
            lse.fill_(-math.inf)
            for once in rounds:
                once()
            for chunk, tensors in brought:
                copy(tensors, own)
                run.holdings.put(chunk, tensors)
            keep([run.holdings.partials.drop(chunk) for chunk in op.reads])

        return reduce

    def _round(self, index: int, op: TreeReduce, each: Round) -> Callable[[], None]:
        """One round: sums are cast into the buffer that is sent, and what comes is merged with others."""
        sums, sent, received = (self._staging[StagingUse(op.lane, op.tensor, use)] for use in ("sum", "send", "recv"))
        target, source = (int(each.group.member(self._rank, way * each.shift)) for way in (1, -1))
        into, out = ([x[: each.owners] for x in buffers] for buffers in (received, sent))
        exchange = self._transport.bind(self._turn(index, op), [(source, into)], [(target, out)], byte_keys(op))
        slots = range(each.owners)
        staged = [x for slot in slots for x in self._at(op, each.first + slot, sent, slot)]
        summed = [x for slot in slots for x in self._at(op, each.first + slot, sums)]
        pairs = [(self._at(op, place, sums), self._at(op, place, received)) for place in slots]
        totals, parts = zip(*[pair for pair in pairs if pair[0][0].numel()] or [((), ())], strict=True)

        def once() -> None:
            copy(staged, summed)
            exchange()
            if totals[0]:
                fold_each_(totals, parts)

        return once

    def _at(self, op: TreeReduce, place: int, buffers: Tensors, slot: int | None = None) -> Tensors:
        """Views of the slot of a place (or of another), with the number of tokens of the owner that the place has."""
        tokens = self._problem.field_tokens(op.tensor.fields[0], int(op.owner(self._rank, place)))
        shapes = [self._problem.field_shape(field, tokens) for field in op.tensor.fields]
        at = place if slot is None else slot
        return tuple([as_shape(x[at], shape) for x, shape in zip(buffers, shapes, strict=True)])

    def _brought(self, index: int, op: AllGather | ReduceScatter) -> list[tuple[Chunk, Tensors]]:
        """The chunks that a collective brings, and where they are."""
        buffers = self._buffers(index)
        if isinstance(op, AllGather):
            return [(chunk, self._of_member(op, chunk, buffers)) for chunk in op.writes]
        own = tuple(as_shape(x, shape) for x, shape in zip(buffers, self._own_shapes(op), strict=True))
        return [(op.writes[0], own)]

    def _collective(self, index: int, op: AllGather | ReduceScatter) -> Callable[[Call], None]:
        """Return the function that performs a collective's call and counts its bytes."""
        turn, counted_as, transport = self._turn(index, op), byte_keys(op), self._transport

        def collective(call: Call) -> None:
            for x, key in zip(call.sent, counted_as, strict=True):
                piece = x if call.kind == "all_gather" else x[0]
                transport.sent_bytes[key] += piece.nbytes * (op.group.size - 1)
            transport.collective(turn, call)

        return collective

    def _merge(self, op: ReduceScatter, received: Tensors, into: Tensors) -> None:
        """Merge the members' partials of this rank's chunk.

        Slots are as long as the longest chunk. This rank's rows lie as in its own, so that an output's fit its lse.
        """
        shapes, own = self._own_shapes(op), int(op.group.digit(self._rank))
        parts = [_rows(x, shape) for x, shape in zip(received, shapes, strict=True)]
        places = [as_shape(x, shape) for x, shape in zip(into, shapes, strict=True)]
        if op.tensor.is_output:
            (out, lse), (outs, lses) = places, parts
            merge_((out, lse), (outs, lses), own)
            return
        for x, place in zip(parts, places, strict=True):
            x[own].zero_()
            torch.sum(x, 0, out=place)  # in the accumulators' dtype, and rounded once

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


def _rows(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The first rows of each member's slot: (N, *shape)."""
    return x.view(len(x), -1)[:, : math.prod(shape)].view(len(x), *shape)
