"""The pieces of an AllToAll: what a rank packs for each member of the group, and where it puts what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Literal

from torch import Tensor

from sp_bench.lower import StagingUse
from sp_bench.plan.ops import AllToAll
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Field
from sp_bench.plan.transfers import adds_up, by_heads
from sp_bench.run.partials import Tensors
from sp_bench.run.transport import Call, Message

Pieces = list[list[Tensor]]
"""By field, then by member in the order of ranks. The pieces that travel lie end to end in one buffer."""
Views = tuple[Tensor, ...]
"""The parts of one piece in a chunk, along tokens: one of each of its stretches."""


class AllToAllPieces:
    """One all-to-all of a plan on one rank. Its staging buffers are cut once; a chunk, only where it must be."""

    def __init__(self, op: AllToAll, problem: Problem, rank: int, staging: Mapping[StagingUse, Tensors]) -> None:
        self._op, self._problem, self._rank = op, problem, rank
        self._own = int(op.group.digit(rank))
        first = rank - self._own
        self._shards = problem.shards_of(op.recv.tensor)
        self._runs = [self._shards.runs(first + i) for i in range(op.group.size)]
        """Each member's runs of tokens in the group's common chunk; those of a stretch are end to end."""
        self._others = [int(op.group.member(rank, shift)) for shift in range(1, op.group.size)]
        self._sent, self._received = (self._staged(staging, use) for use in ("send", "recv"))
        self._flat_sent = [_flat(pieces) for pieces in self._sent or ()]
        self._flat_received = [_flat(pieces) for pieces in self._received or ()]
        sizes = [(self._elements(field, "recv"), self._elements(field, "send")) for field in by_heads(op)]
        self._splits = () if all(len({*each}) == 1 for pair in sizes for each in pair) else sizes
        self._elements_sent = [sum(sent) - sent[self._own] for _, sent in sizes]
        """Elements that go to others, by field."""

    def collective(self, held: Tensors, into: Tensors) -> Call:
        """The library's all-to-all of what is packed."""
        sent = self._flat_sent or [x.view(-1) for x in held]
        received = self._flat_received or [x.view(-1) for x in into]
        return Call("all_to_all", self._op.group, received, sent, self._splits)

    def sent_bytes(self, held: Tensors) -> list[int]:
        """How many bytes go to others, by field."""
        tensors = self._flat_sent or held
        return [count * x.element_size() for count, x in zip(self._elements_sent, tensors, strict=True)]

    def sends(self, held: Tensors) -> list[Message]:
        """(rank, its tensors) for every other member to which anything goes."""
        return self._with_others(self._sent or self._pieces(held, of_tokens=not self._op.to_heads))

    def receives(self, into: Tensors) -> list[Message]:
        """(rank, its tensors) for every other member from which anything comes."""
        return self._with_others(self._received or self._pieces(into, of_tokens=self._op.to_heads))

    @property
    def receives_staged(self) -> bool:
        """Whether arrivals go to a staging buffer, whatever the chunk's own tensors are."""
        return self._received is not None

    def pack(self, held: Tensors) -> None:
        """Pack what `held` has for the others: each member's heads of my tokens, or my heads of its tokens."""
        of_tokens = not self._op.to_heads
        for field, x, staged in zip(by_heads(self._op), held, self._sent, strict=True) if self._sent else ():
            whole = self._side_by_side(field, x, of_tokens=of_tokens)
            if whole is not None:
                _end_to_end(staged).copy_(whole)
                continue
            for member, piece in enumerate(self._of_field(field, x, of_tokens=of_tokens)):
                if member != self._own:
                    _move((staged[member],), piece)

    def unpack(self, held: Tensors, into: Tensors) -> None:
        """Put together what has arrived, and the rank's own piece, which is never rounded to the wire dtype."""
        op, own = self._op, self._own
        for i, (field, tensor, x) in enumerate(zip(by_heads(op), into, held, strict=True)):
            several, theirs = adds_up(op, self._problem, field), self._received[i] if self._received else None
            mine = self._of_field(field, x, of_tokens=not op.to_heads, members=(own,))[0]
            whole = self._side_by_side(field, tensor, of_tokens=op.to_heads)
            if theirs is None or (whole is not None and not several):
                if theirs is not None and whole is not None:
                    whole.copy_(_end_to_end(theirs))  # what lies in the rank's own place is overwritten
                _move(self._of_field(field, tensor, of_tokens=op.to_heads, members=(own,))[0], mine)
                continue
            if several:
                tensor.zero_()
            for member, place in enumerate(self._of_field(field, tensor, of_tokens=op.to_heads)):
                _move(place, (theirs[member],) if member != own else mine, add=several)

    def _with_others(self, pieces: Sequence[Sequence[Tensor]]) -> list[Message]:
        messages = [(rank, [field[int(self._op.group.digit(rank))] for field in pieces]) for rank in self._others]
        return [(rank, tensors) for rank, tensors in messages if tensors[0].numel()]

    def _staged(self, staging: Mapping[StagingUse, Tensors], use: Literal["send", "recv"]) -> Pieces | None:
        """The staging tensors for `use`; None if the transfer needs no staging."""
        buffers = staging.get(StagingUse(self._op.lane, self._op.send.tensor, use))
        if buffers is None:
            return None
        pieces = []
        for field, x in zip(by_heads(self._op), buffers, strict=True):
            shapes = self._shapes(field, use)
            ends = [0, *accumulate(map(prod, shapes))]
            pieces.append([x.view(-1)[ends[i] : ends[i + 1]].view(shape) for i, shape in enumerate(shapes)])
        return pieces

    def _shapes(self, field: Field, use: Literal["send", "recv"]) -> list[tuple[int, ...]]:
        """The shape of each member's piece of a field."""
        own, of_members = self._shards.tokens(self._rank), self._op.to_heads == (use == "recv")
        return [self._problem.field_shape(field, sum(map(len, runs)) if of_members else own) for runs in self._runs]

    def _elements(self, field: Field, use: Literal["send", "recv"]) -> list[int]:
        return [prod(shape) for shape in self._shapes(field, use)]

    def _pieces(self, tensors: Tensors, *, of_tokens: bool) -> Pieces:
        """Pieces of a chunk that need no staging, and so are in one part each."""
        fields = zip(by_heads(self._op), tensors, strict=True)
        return [[piece for (piece,) in self._of_field(field, x, of_tokens=of_tokens)] for field, x in fields]

    def _of_field(
        self, field: Field, x: Tensor, *, of_tokens: bool, members: Sequence[int] | None = None
    ) -> list[Views]:
        """Views of a field by member: along tokens (`of_tokens`) or along heads."""
        members = range(self._op.group.size) if members is None else members
        if of_tokens:
            return [tuple(x[:, run.start : run.stop] for run in self._runs[i]) for i in members]
        heads = self._problem.field_heads(field)
        firsts = [i * x.shape[2] // self._op.group.size for i in members]
        return [(x[:, :, first : first + heads],) for first in firsts]

    def _side_by_side(self, field: Field, x: Tensor, *, of_tokens: bool) -> Tensor | None:
        """A view of a field with the members first, if their pieces are alike: (members, B, S, H, D).

        Copied whole, it takes one kernel instead of one for each member.
        """
        members, dim = self._op.group.size, 1 if of_tokens else 2
        heads = x.shape[2] if of_tokens else self._problem.field_heads(field) * members
        if x.shape[2] != heads or x.shape[dim] % members or not self._problem.is_even:
            return None
        if of_tokens and not self._shards.in_runs:
            return None
        return x.unflatten(dim, (members, -1)).movedim(dim, 0)


def _move(to: Views, piece: Views, *, add: bool = False) -> None:
    """Copy a piece, or add it. If one side is in several parts and the other is not, this one is cut like it."""
    tokens = [x.shape[1] for x in (to if len(to) > len(piece) else piece)]
    both = ((views if len(views) == len(tokens) else views[0].split(tokens, 1)) for views in (to, piece))
    for into, part in zip(*both, strict=True):
        into.add_(part) if add else into.copy_(part)


def _end_to_end(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces of one shape that lie end to end, as one tensor: (members, B, S, H, D)."""
    first = pieces[0]
    return first.as_strided((len(pieces), *first.shape), (first.numel(), *first.stride()))


def _flat(pieces: Sequence[Tensor]) -> Tensor:
    """The flat memory of pieces that lie end to end, the first of which starts it."""
    return pieces[0].as_strided((sum(x.numel() for x in pieces),), (1,))
