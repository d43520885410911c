"""GroupCasts and GroupReduces of one plan on one rank: rows of chunks, in a message to each member."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from sp_bench.lower import StagingUse
from sp_bench.plan import cast_rows
from sp_bench.plan.ops import GroupCast, RowCollective
from sp_bench.run.collectives import GroupTransfers
from sp_bench.run.execution import Execution, Perform
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, token_dim
from sp_bench.run.transport import Message, byte_keys


class _Rows(NamedTuple):
    """The rows of its members' chunks that a rank owns or has, in the order of the members."""

    owned: torch.Tensor
    """The rows of its own chunk that others have, one member behind the other: (rows,)."""
    of_others: tuple[int, ...]
    """How many of them each member has."""
    held: tuple[int, ...]
    """How many rows the rank has of each member's chunk."""


class Casting(GroupTransfers):
    """Rows are gathered into a staging buffer and received into another one, one member behind the other."""

    def call(self, index: int, op: RowCollective) -> Perform:
        """The call of transfer `index`."""
        cast, turn = isinstance(op, GroupCast), self._turn(index, op)
        stage, staged = self._cast(op) if cast else self._reduced(op)
        sends = _messages(op, self._rank, staged, -1 if cast else 1)
        receives = _messages(op, self._rank, self._incoming(index, op), 1 if cast else -1)
        counted_as, store, keep = byte_keys(op), self._stored(index, op), self._streams.keeper(index)

        def transfer(run: Execution) -> None:
            stage(run.holdings)
            self._transport.exchange(turn, receives, sends, counted_as)
            keep(store(run.holdings))

        return transfer

    def pretended(self, index: int, op: RowCollective) -> Perform:
        """The call that takes what is in the buffers for what a transfer brings."""
        store = self._stored(index, op)

        def pretend(run: Execution) -> None:
            store(run.holdings)

        return pretend

    def _stored(self, index: int, op: RowCollective) -> Callable[[Holdings], list[Tensors | None]]:
        """A function that stores what a transfer brings, and returns the partials that were sent."""
        if isinstance(op, GroupCast):
            brought = list(zip(op.writes, self._incoming(index, op), strict=True))

            def put(holdings: Holdings) -> list[Tensors | None]:
                for chunk, tensors in brought:
                    holdings.put(chunk, tensors)
                return []

            return put
        parts = self._together(op, self._buffers(index), self._rows[op])

        def put_rows(holdings: Holdings) -> list[Tensors | None]:
            holdings.put_rows(op.writes[0], parts)
            return [holdings.partials.drop(chunk) for chunk in op.reads]

        return put_rows

    def _cast(self, op: RowCollective) -> tuple[Callable[[Holdings], None], list[Tensors]]:
        """A function that stages the rows of the rank's own chunk for each member, and where they lie."""
        of_op, staged = self._rows[op], self._staging[StagingUse(op.lane, op.tensor, "send")]
        places = self._together(op, staged, of_op)

        def stage(holdings: Holdings) -> None:
            own = holdings.to_send(op.own)
            for rows, into in places:
                for x, place in zip(own, into, strict=True):
                    torch.index_select(x, token_dim(x), rows, out=place)

        return stage, self._split(op, staged, of_op.of_others)

    def _reduced(self, op: RowCollective) -> tuple[Callable[[Holdings], None], list[Tensors]]:
        """A function that stages the partials of each member's rows, in the dtype that is sent, and where they lie."""
        here = self._rows[op]
        parts = self._split(op, self._staging[StagingUse(op.lane, op.tensor, "send")], here.held)

        def stage(holdings: Holdings) -> None:
            for chunk, into, rows in zip(op.reads, parts, here.held, strict=True):
                for x, place in zip(holdings.partials.get_rows(chunk) if rows else (), into, strict=False):
                    place.copy_(x)

        return stage, parts

    def _incoming(self, index: int, op: RowCollective) -> list[Tensors]:
        """The buffers that each member's rows arrive in."""
        rows = self._rows[op]
        return self._split(op, self._buffers(index), rows.held if isinstance(op, GroupCast) else rows.of_others)

    def _together(self, op: RowCollective, buffers: Tensors, rows: _Rows) -> list[tuple[torch.Tensor, Tensors]]:
        """(rows of the rank's own chunk, what others have of them): all at once, if one batch entry allows it.

        Statistics lie by head, and outputs are merged one after another where several members have the same row.
        """
        if self._problem.batch == 1 and not op.tensor.has_statistics:
            return [(rows.owned, self._split(op, buffers, [sum(rows.of_others)])[0])]
        parts = list(zip(rows.owned.split(rows.of_others), self._split(op, buffers, rows.of_others), strict=True))
        return [part for part in parts if part[0].numel()] or parts[:1]

    def _split(self, op: RowCollective, buffers: Tensors, counts: Sequence[int]) -> list[Tensors]:
        """The fields of so many rows of each member, one member behind the other: views."""
        by_field = []
        for field, x in zip(op.tensor.fields, buffers, strict=True):
            shapes = [self._problem.field_shape(field, rows) for rows in counts]
            ends = [0, *accumulate(map(prod, shapes))]
            by_field.append([x.view(-1)[a:b].view(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)])
        return list(zip(*by_field, strict=True))

    @cached_property
    def _rows(self) -> Mapping[RowCollective, _Rows]:
        """By operation; known when the plan is compiled, and not first to a lane's thread."""
        return {op: self._find_rows(op) for op in self._plan.ops if isinstance(op, RowCollective)}

    def _find_rows(self, op: RowCollective) -> _Rows:
        mine = [cast_rows.rows_to(op, self._problem, self._rank, u) for u in op.members]
        held = cast_rows.rows_from(op, self._problem, self._rank)
        index = torch.cat([torch.from_numpy(rows) for rows in mine]).to(self._device)
        return _Rows(index, tuple(map(len, mine)), tuple(held.tolist()))


def _messages(op: RowCollective, rank: int, parts: Sequence[Tensors], way: int) -> list[Message]:
    """(peer, tensors) for each member of which there are rows."""
    peers = (int(op.group.member(rank, way * op.shift(u))) for u in op.members)
    return [(peer, tensors) for peer, tensors in zip(peers, parts, strict=True) if tensors[0].numel()]
