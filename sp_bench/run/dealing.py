"""The pieces of an AllToAll: what a rank packs for each member of the group, and where it puts what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

from sp_bench.lower import StagingUse
from sp_bench.plan.ops import AllToAll
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Field
from sp_bench.plan.transfers import adds_up, by_heads
from sp_bench.run.partials import Tensors
from sp_bench.run.transport import Message

Pieces = list[list[Tensor]]
"""By field, then by member in the order of ranks. The pieces that travel lie end to end in one buffer."""


class Dealt(NamedTuple):
    """The pieces of one all-to-all."""

    mine: Pieces
    """Views of the chunk that is dealt."""
    sent: Pieces
    incoming: Pieces
    places: Pieces
    """Views of the chunk that is put together."""
    receives: list[Message]
    sends: list[Message]


class Dealing:
    """The all-to-alls of one plan on one rank."""

    def __init__(self, problem: Problem, rank: int, staging: Mapping[StagingUse, Tensors]) -> None:
        self._problem, self._rank, self._staging = problem, rank, staging

    def begin(self, op: AllToAll, into: Tensors, held: Tensors) -> Dealt:
        """Pack what `held` has for the others: each member's heads of my tokens, or my heads of its tokens."""
        sent, own = self.staged(op, "send"), op.group.digit(self._rank)
        mine = self.pieces(op, held, of_tokens=not op.to_heads)
        places = self.pieces(op, into, of_tokens=op.to_heads)
        incoming = self.staged(op, "recv") or places
        for field, x, staged, pieces in zip(by_heads(op), held, sent, mine, strict=True) if sent else ():
            whole = self._side_by_side(op, field, x, of_tokens=not op.to_heads)
            if whole is not None:
                _end_to_end(staged).copy_(whole)
                continue
            for member, piece in enumerate(pieces):
                if member != own:
                    staged[member].copy_(piece)
        sent = sent or mine
        return Dealt(mine, sent, incoming, places, self.with_others(op, incoming), self.with_others(op, sent))

    def end(self, op: AllToAll, into: Tensors, dealt: Dealt) -> None:
        """Put together what has arrived, and the rank's own piece, which is never rounded to the wire dtype."""
        own, (ours, incoming, places) = op.group.digit(self._rank), (dealt.mine, dealt.incoming, dealt.places)
        for field, tensor, mine, theirs, there in zip(by_heads(op), into, ours, incoming, places, strict=True):
            several = adds_up(op, self._problem, field)
            whole = self._side_by_side(op, field, tensor, of_tokens=op.to_heads)
            if whole is not None and not several and theirs[0] is not there[0]:
                whole.copy_(_end_to_end(theirs))  # what lies in the rank's own place is overwritten
                there[own].copy_(mine[own])
                continue
            if several:
                tensor.zero_()
            for member, place in enumerate(there):
                piece = theirs[member] if member != own else mine[own]
                if piece is not place:
                    place.add_(piece) if several else place.copy_(piece)

    def with_others(self, op: AllToAll, pieces: Sequence[Sequence[Tensor]]) -> list[Message]:
        """(rank, its tensors) for every other member."""
        ranks = [int(op.group.member(self._rank, shift)) for shift in range(1, op.group.size)]
        found = [(rank, [field[int(op.group.digit(rank))] for field in pieces]) for rank in ranks]
        return [(rank, tensors) for rank, tensors in found if tensors[0].numel()]

    def staged(self, op: AllToAll, use: Literal["send", "recv"]) -> Pieces | None:
        """The staging tensors for `use`; None if the transfer needs no staging."""
        buffers = self._staging.get(StagingUse(op.lane, op.send.tensor, use))
        if buffers is None:
            return None
        own = self._problem.tokens(self._rank)
        of_members = op.to_heads == (use == "recv")
        tokens = [len(run) if of_members else own for run in self._runs(op)]
        found = []
        for field, x in zip(by_heads(op), buffers, strict=True):
            shapes = [self._problem.field_shape(field, count) for count in tokens]
            ends = [0, *accumulate(map(prod, shapes))]
            found.append([x.view(-1)[ends[i] : ends[i + 1]].view(shape) for i, shape in enumerate(shapes)])
        return found

    def pieces(self, op: AllToAll, tensors: Tensors, *, of_tokens: bool) -> Pieces:
        """Views of each field by member: along tokens (`of_tokens`) or along heads."""
        if of_tokens:
            runs = self._runs(op)
            return [[x[:, run.start : run.stop] for run in runs] for x in tensors]
        found, members = [], range(op.group.size)
        for field, x in zip(by_heads(op), tensors, strict=True):
            heads = self._problem.field_heads(field)
            firsts = [member * x.shape[2] // op.group.size for member in members]
            found.append([x[:, :, first : first + heads] for first in firsts])
        return found

    def _side_by_side(self, op: AllToAll, field: Field, x: Tensor, *, of_tokens: bool) -> Tensor | None:
        """A view of a field with the members first, if their pieces are alike: (members, B, S, H, D).

        Copied whole, it takes one kernel instead of one for each member.
        """
        members, dim = op.group.size, 1 if of_tokens else 2
        heads = x.shape[2] if of_tokens else self._problem.field_heads(field) * members
        if x.shape[2] != heads or x.shape[dim] % members or not self._problem.is_even:
            return None
        return x.unflatten(dim, (members, -1)).movedim(dim, 0)

    def _runs(self, op: AllToAll) -> list[range]:
        """Each member's token range in the group's common chunk, end to end."""
        problem, first = self._problem, self._rank - int(op.group.digit(self._rank))
        return [problem.layout.run(first + i, problem.n, problem.seqlen) for i in range(op.group.size)]


def _end_to_end(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces of one shape that lie end to end, as one tensor: (members, B, S, H, D)."""
    first = pieces[0]
    return first.as_strided((len(pieces), *first.shape), (first.numel(), *first.stride()))
