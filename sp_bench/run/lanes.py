"""The calls of transfers on one rank: peers, groups, buffers and rows, worked out once for a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from sp_bench.lower import Lowering, StagingUse
from sp_bench.plan.demand import demand, untouched_partials
from sp_bench.plan.ops import AllGather, AllToAll, Chunk, Op, Pass, Plan, ReduceScatter, RowCollective, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Kind
from sp_bench.plan.transfers import rows_sent
from sp_bench.run.all_to_all import AllToAllPieces
from sp_bench.run.buffers import Buffers
from sp_bench.run.casting import Casting
from sp_bench.run.collectives import Collectives
from sp_bench.run.execution import Execution, Perform
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, as_shape, copy
from sp_bench.run.standing import Standing, rows_of, run_of
from sp_bench.run.streams import Streams
from sp_bench.run.transport import Message, NextTransfer, Transport, Turn, byte_keys


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
        """The tensors in which the caller of this execution wants outputs of transfers."""
        self._pieces: Callable[[AllToAll], AllToAllPieces] = cache(
            lambda op: AllToAllPieces(op, problem, rank, self._staging)
        )
        given = plan, lowering, problem, rank, transport, streams, self._receiving, self._staging, device
        self._collectives, self._casting = Collectives(*given), Casting(*given)
        self._demand, self._standing = demand(plan, problem), cache(self._find_standing)
        self.call: Callable[[int], Perform] = cache(self._find_call)
        """The call of transfer `index`."""
        self._held = self._find_held()
        self._untouched = cache(self._find_untouched)
        alone = [(index, op) for index, op in plan if isinstance(op, Pass | AllToAll)]
        self._new_specs = cache(lambda chunk: [(s.shape, getattr(torch, s.dtype)) for s in lowering.held_specs(chunk)])
        self._ends = [(index, op) for index, op in alone if index not in lowering.receive_buffers]
        """Transfers that bring results of the plan."""
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
            self._results = {index: self._new(op.recv) for index, op in self._ends}

    def close(self) -> None:
        """Let go of the buffers. No execution may follow."""
        for kept in (self._standing, self._pieces, self.call):
            kept.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
        for tensors in (self._receiving, self._staging, self._results, self._held):
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
        if isinstance(op, AllToAll) and self._pieces(op).receives_staged:
            receives = self._pieces(op).receives(())
        else:
            into = self._into(index, op)
            if index not in self._lowering.receive_buffers:
                self._results[index] = into
            receives = self._receives(index, op, into)
        self._transport.prepost(self._standing(index).turn, receives)
        return True

    def pretended(self, index: int, op: Transfer) -> Perform:
        """The call that takes the data of an earlier execution (or zeros) for what a transfer brings; it sends none."""
        if isinstance(op, AllGather | ReduceScatter):
            return self._collectives.pretended(index, op)
        if isinstance(op, RowCollective):
            return self._casting.pretended(index, op)
        standing, dropped = self._standing(index), self._dropped(op)

        def pretend(run: Execution) -> None:
            if standing.receives:
                into = self._into(index, op)
                if index not in self._lowering.receive_buffers:
                    for tensor in into:
                        tensor.zero_()
                run.holdings.put(op.recv, standing.brought(into), standing.rows.start)
            else:
                run.holdings.drop(op.recv)
            if dropped is not None:
                run.holdings.partials.drop(dropped)

        return pretend

    def _find_call(self, index: int) -> Perform:
        op = self._plan.ops[index]
        if isinstance(op, AllGather | ReduceScatter):
            return self._collectives.call(index, op)
        if isinstance(op, RowCollective):
            return self._casting.call(index, op)
        assert isinstance(op, Pass | AllToAll)
        standing, bound = self._standing(index), self._bound(index, op)
        always, recv, first, dropped = standing.into, op.recv, standing.rows.start, self._dropped(op)
        brings_all = standing.statistics is None
        if bound and standing.receives and always and not dropped:
            brought = standing.brought(always)

            def exchange(run: Execution) -> None:
                bound()
                run.holdings.put(recv, brought, first)

            return exchange
        keep = self._streams.keeper(index)
        move = (lambda into, holdings: bound()) if bound else self._move(index, op)

        def transfer(run: Execution) -> None:
            held = run.holdings
            into = always or self._into(index, op)
            move(into, held)
            if standing.receives:
                held.put(recv, into if brings_all else standing.brought(into), first)
            else:
                held.drop(recv)
            if dropped is not None and (sent := held.partials.drop(dropped)) is not None:
                keep(sent)

        return transfer

    def _bound(self, index: int, op: Pass | AllToAll) -> Callable[[], None] | None:
        """The messages of a transfer that are the same tensors in every execution, with nothing to do beside them; None
        of any other.
        """
        standing = self._standing(index)
        if not isinstance(op, Pass) or standing.target == self._rank or not (standing.receives or standing.sends):
            return None
        if index in self._followed_by or (standing.receives and standing.into is None):
            return None
        sent = self._held.get(index)
        if standing.sends and (sent is None or self._sent(index, op) is not sent):
            return None
        return self._transport.bind(
            standing.turn, *standing.messages(standing.into or (), sent or ()), standing.counted_as
        )

    def _move(self, index: int, op: Pass | AllToAll) -> Callable[[Tensors, Holdings], None]:
        """Return the call that moves the tensors of a transfer, given those that it receives into."""
        standing = self._standing(index)
        if isinstance(op, AllToAll):
            return self._all_to_all(index, op)
        if not (standing.receives or standing.sends):
            return lambda into, holdings: None
        outgoing = self._outgoing(index, op) if standing.sends else lambda holdings: ()
        if standing.target == self._rank:
            return lambda into, holdings: copy(into, outgoing(holdings))
        if (after := self._followed_by.get(index)) is not None:
            return self._pipelined(index, op, after, outgoing)
        return self._exchange(index, op, outgoing)

    def _exchange(
        self, index: int, op: Pass, outgoing: Callable[[Holdings], Tensors]
    ) -> Callable[[Tensors, Holdings], None]:
        """Messages to and from other ranks: bound to their tensors, if these are the same in every execution."""
        standing, transport, sent = self._standing(index), self._transport, self._sent(index, op)
        landed = standing.into
        if landed is None and standing.turn.landing:
            landed = self._first_rows(standing.turn.landing, op.recv, len(standing.rows), standing.statistics)

        def exchange(into: Tensors, holdings: Holdings) -> None:
            messages = standing.messages(landed or into, outgoing(holdings))
            transport.exchange(standing.turn, *messages, standing.counted_as)
            if standing.receives and landed is not None and landed is not into:
                copy(into, landed)

        if standing.receives and standing.into is None:
            return exchange
        receives, sends = standing.messages(standing.into or (), sent or ())
        if standing.sends and sent is None:
            send = transport.bind_send(standing.turn, receives, standing.target, standing.counted_as)
            return lambda into, holdings: send(run_of(outgoing(holdings), standing.gone))
        bound = transport.bind(standing.turn, receives, sends, standing.counted_as)

        def stage_and_exchange(into: Tensors, holdings: Holdings) -> None:
            outgoing(holdings)
            bound()

        return stage_and_exchange

    def _pipelined(
        self, index: int, op: Pass, after: int, outgoing: Callable[[Holdings], Tensors]
    ) -> Callable[[Tensors, Holdings], None]:
        """An exchange during which transfer `after` may begin, tensor by tensor."""
        standing, transport = self._standing(index), self._transport

        def exchange(into: Tensors, holdings: Holdings) -> None:
            (receive,), (send,) = standing.messages(into, outgoing(holdings))
            next_transfer = self._next_transfer(after, op, into, holdings)
            transport.exchange_pipelined(standing.turn, receive, send, standing.counted_as, next_transfer)

        return exchange

    def _find_untouched(self, compute: bool) -> list[Chunk]:
        ranks_by_chunk = untouched_partials(self._plan, self._problem, compute=compute)
        return [chunk for chunk, ranks in ranks_by_chunk.items() if ranks[self._rank]]

    def _find_standing(self, index: int) -> Standing:
        op, buffer = self._plan.ops[index], self._lowering.receive_buffers.get(index)
        assert isinstance(op, Pass | AllToAll)
        source, target, wanted = self._rank, self._rank, self._demand.get(index)
        rows = sent = range(self._problem.field_tokens(op.recv.tensor.fields[0], self._rank))
        came = gone = statistics = statistics_sent = None
        if isinstance(op, Pass):
            source, target = int(op.source(self._rank)), int(op.target(self._rank))
            rows, sent = (rows_sent(op, self._problem, rank) for rank in (source, self._rank))
            if wanted and wanted.rows:
                came, gone = wanted.rows.of(self._rank), wanted.rows.of(target)
        if came is not None and gone is not None and op.tensor.is_partial:  # folded where it lies
            statistics, statistics_sent = len(rows), len(sent)
            rows, sent, came, gone = came, gone, None, None
        into = self._first_rows(self._receiving[buffer], op.recv, len(rows), statistics) if buffer else None
        landing = self._receiving[buffer] if buffer else self._landing(op)
        moved = (True, True) if wanted is None else (bool(wanted.there[self._rank]), bool(wanted.there[target]))
        to_row = gone.start if gone else 0
        turn = Turn(self._ids[op.lane], index, op.group, landing if isinstance(op, Pass) else (), to_row)
        of_statistics = statistics, statistics_sent
        return Standing(turn, byte_keys(op), source, target, rows, sent, *of_statistics, into, *moved, came, gone)

    def _landing(self, op: Pass | AllToAll) -> Tensors:
        """The buffers in which peers put a result of the plan; none if they don't write to this rank's memory."""
        return self._staging.get(StagingUse(op.lane, op.recv.tensor, "land"), ())

    def _into(self, index: int, op: Pass | AllToAll) -> Tensors:
        """Return the tensors that a transfer receives into, cut to the rows that it brings."""
        standing = self._standing(index)
        if standing.into is not None:
            return standing.into
        tensors = self._results.pop(index, None) or self._new(op.recv)
        return self._first_rows(tensors, op.recv, len(standing.rows), standing.statistics)

    def _receives(self, index: int, op: Pass | AllToAll, into: Tensors) -> list[Message]:
        """Return the messages that a transfer receives. A rank receives nothing from itself."""
        if isinstance(op, AllToAll):
            return self._pieces(op).receives(into)
        standing = self._standing(index)
        return [] if standing.source == self._rank else standing.messages(into, ())[0]

    def _dropped(self, op: Pass | AllToAll) -> Chunk | None:
        """The partial that is held no longer once a transfer has sent it."""
        return op.send if op.send.tensor.is_partial and op.send not in self._plan.kept else None

    def _next_transfer(self, after: int, op: Pass, into: Tensors, holdings: Holdings) -> NextTransfer:
        """Return a function giving the messages of transfer `after`, which may start while `op` receives `into`."""
        then, standing = self._plan.ops[after], self._standing(after)
        assert isinstance(then, Pass)

        def messages() -> tuple[Turn, Message, Message] | None:
            if not self._streams.ready(after):
                return None
            outgoing = into if then.send == op.recv else holdings.chunks[then.send]
            (receive,), (send,) = standing.messages(self._into(after, then), outgoing)
            return standing.turn, receive, send

        return messages

    def _all_to_all(self, index: int, op: AllToAll) -> Callable[[Tensors, Holdings], None]:
        standing, transport, pieces = self._standing(index), self._transport, self._pieces(op)

        def all_to_all(into: Tensors, holdings: Holdings) -> None:
            held = holdings.to_send(op.send)[: len(into)]
            pieces.pack(held)
            if op.by_messages:
                transport.exchange(standing.turn, pieces.receives(into), pieces.sends(held), standing.counted_as)
            elif op.group.size > 1:
                for key, nbytes in zip(standing.counted_as, pieces.sent_bytes(held), strict=True):
                    transport.sent_bytes[key] += nbytes
                transport.collective(standing.turn, pieces.collective(held, into))
            pieces.unpack(held, into)

        return all_to_all

    def _sent(self, index: int, op: Pass) -> Tensors | None:
        """The tensors that a Pass sends, if they are the same in every execution: staged, or received in a buffer."""
        if not self._standing(index).sends:
            return None
        if self._lowering.casts(op.send):
            return self._staged(index, op)
        return None if StagingUse(op.lane, op.send.tensor, "pass") in self._staging else self._held.get(index)

    def _outgoing(self, index: int, op: Pass) -> Callable[[Holdings], Tensors]:
        """Return the call for the tensors to send: the chunk or, if rows are cut or it is cast, a staging copy."""
        chunk, standing, casts = op.send, self._standing(index), self._lowering.casts(op.send)
        rows, cut = standing.sent, rows_of if standing.statistics_sent is None else run_of
        if StagingUse(op.lane, chunk.tensor, "pass") not in self._staging:
            if standing.statistics_sent is not None:
                return lambda holdings: run_of(holdings.to_send(chunk), rows)
            return lambda holdings: holdings.to_send(chunk)
        staged = self._staged(index, op)

        def stage(holdings: Holdings) -> Tensors:
            held = holdings.to_send(chunk)
            if len(rows) == held[0].shape[1] and not casts:
                return held
            if len(rows) != held[0].shape[1]:
                held = cut(held, holdings.among(chunk, rows))
            copy(staged, held)
            return staged

        return stage

    def _staged(self, index: int, op: Pass) -> Tensors:
        """The staging tensors of the rows that a Pass sends."""
        staging, standing = self._staging[StagingUse(op.lane, op.send.tensor, "pass")], self._standing(index)
        return self._first_rows(staging, op.send, len(standing.sent), standing.statistics_sent)

    def _find_held(self) -> dict[int, Tensors]:
        """The buffer that holds what a Pass sends on, by transfer; none for inputs, partials and results."""
        at: dict[Chunk, Tensors] = {}
        buffers: dict[int, Tensors] = {}
        for index, op in self._plan:
            if isinstance(op, Pass) and op.send in at:
                buffers[index] = at[op.send]
            for chunk in op.writes:
                at.pop(chunk, None)
            standing = self._standing(index) if isinstance(op, Pass | AllToAll) else None
            if standing and standing.receives and standing.into is not None:
                at[op.writes[0]] = standing.into
        return buffers

    def _first_rows(self, buffers: Tensors, chunk: Chunk, tokens: int, statistics: int | None = None) -> Tensors:
        """Return contiguous views of `buffers` with room for `tokens` tokens of the chunk, or for so many `statistics`
        of each head.
        """
        of_statistics = tokens if statistics is None else statistics
        shapes = [
            self._problem.field_shape(field, of_statistics if field.kind is Kind.STATISTIC else tokens)
            for field in chunk.tensor.fields
        ]
        return tuple(as_shape(x, shape) for x, shape in zip(buffers, shapes, strict=True))

    def _new(self, chunk: Chunk) -> Tensors:
        """Tensors for a chunk that outlives the plan: those that the caller gave, or new ones."""
        if chunk in self.given_results:
            return self.given_results[chunk]
        return tuple([torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._new_specs(chunk)])
