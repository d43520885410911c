"""The constants of a transfer on one rank: peers, buffers, and the rows that come and go."""

from __future__ import annotations

from typing import NamedTuple

from sp_bench.run.partials import Rows, Tensors, tokens_of
from sp_bench.run.transport import Key, Message, Turn


class Standing(NamedTuple):
    """The constants of one transfer."""

    turn: Turn
    counted_as: list[Key]
    source: int
    target: int
    """Source and target rank of a Pass; this rank for an AllToAll."""
    rows: range
    """The rows of the chunk that it brings, of which alone there is room where it is a partial."""
    sent: range
    """The rows of the chunk that this rank sends."""
    statistics: int | None
    statistics_sent: int | None
    """How many rows of statistics it brings, and this rank sends, where these are more (plan.row_runs)."""
    into: Tensors | None
    """Its receive buffers; None if its result is an output of the plan."""
    receives: bool
    sends: bool
    """Whether this rank receives, and sends, anything (plan.demand)."""
    came: range | None
    gone: range | None
    """The rows that it receives, and sends, of a chunk for which there is room; None for all (plan.row_runs)."""

    def messages(self, into: Tensors, out: Tensors) -> tuple[list[Message], list[Message]]:
        """The messages (received, sent) of a Pass that receives into these tensors, and sends out of those."""
        received: list[Message] = [(self.source, run_of(into, self.came))] if self.receives else []
        return received, [(self.target, run_of(out, self.gone))] if self.sends else []

    def brought(self, into: Tensors) -> Tensors:
        """The rows that it has brought: of statistics more may have come."""
        if self.statistics is None:
            return into
        return tuple([x if x.ndim == 4 else tokens_of(x, self.rows) for x in into])


def run_of(tensors: Tensors, rows: Rows | None) -> Tensors:
    """Views of some neighbouring rows of a chunk, but of all its statistics, x_BHS; None: of all."""
    if rows is None:
        return tensors
    return tuple([tokens_of(x, rows) if x.ndim == 4 else x for x in tensors])


def rows_of(tensors: Tensors, rows: Rows) -> Tensors:
    """Some rows of a chunk, of its statistics too."""
    return tuple([tokens_of(x, rows) for x in tensors])
