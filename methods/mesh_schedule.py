"""The schedules of the Mesh-Attention paper: algorithm 2 forward, algorithm 3 backward (methods/mesh.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sp_bench.plan import DKV, DQ, KV, ODOQ, O, Q, Tensor


@dataclass
class Tile:
    """State of one rank's tile: the blocks still to compute, and how many chunks were received."""

    a: int
    b: int
    q_received: int = 0
    kv_received: int = 0
    rows: list[int] = field(init=False)
    """For each row u, a bit set of the columns v whose block is not computed yet."""
    columns: list[int] = field(init=False)
    """For each column v, a bit set of the rows u whose block is not computed yet."""

    def __post_init__(self) -> None:
        self.rows = [(1 << self.b) - 1] * self.a
        self.columns = [(1 << self.a) - 1] * self.b

    @property
    def received_all(self) -> bool:
        return self.q_received == self.a - 1 and self.kv_received == self.b - 1

    def unlocked_by_q(self) -> int:
        """The paper's n_Q: blocks that the next Recv Q makes ready."""
        return self.kv_received + 1 if self.q_received < self.a - 1 else 0

    def unlocked_by_kv(self) -> int:
        """The paper's n_KV: blocks that the next Recv KV makes ready."""
        return self.q_received + 1 if self.kv_received < self.b - 1 else 0

    def next_in_rows(self) -> tuple[int, int] | None:
        """The first ready block in row-first order, (u, v); None if none is ready."""
        ready = (1 << (self.kv_received + 1)) - 1
        for u in _own_last(self.q_received + 1):
            if self.rows[u] & ready:
                return u, _first_bit(self.rows[u] & ready)
        return None

    def next_in_columns(self) -> tuple[int, int] | None:
        """The first ready block in column-first order, (u, v); None if none is ready."""
        ready = (1 << (self.q_received + 1)) - 1
        for v in _own_last(self.kv_received + 1):
            if self.columns[v] & ready:
                return _first_bit(self.columns[v] & ready), v
        return None

    def next_run(self, most: int, *, columns: bool = False) -> list[tuple[int, int]]:
        """At most `most` ready blocks of one row (or column), (u, v), whose chunks were received one after the other.

        They are of the first row, in order of priority, that has as many, or of the one that has the most.
        """
        lines, here, across = self.rows, self.q_received, self.kv_received
        if columns:
            lines, here, across = self.columns, across, here
        best: tuple[int, list[int]] = (0, [])
        for line in _own_last(here + 1):
            run = _first_run(lines[line] & ((1 << (across + 1)) - 1), most)
            best = max(best, (line, run), key=lambda found: len(found[1]))
            if len(run) == most:
                break
        line, run = best
        return [(other, line) if columns else (line, other) for other in run]

    def compute(self, block: tuple[int, int]) -> tuple[int, int]:
        u, v = block
        self.rows[u] &= ~(1 << v)
        self.columns[v] &= ~(1 << u)
        return block


def _own_last(count: int) -> list[int]:
    """Rows or columns in order of priority. #0, the rank's own chunk, is last, as no transfer waits for it."""
    return [*range(1, count), 0]


def _first_run(bits: int, most: int) -> list[int]:
    """The longest run of neighbouring bits above the lowest, which is one by itself; at most its first `most`."""
    best = [0] if bits & 1 else []
    bits &= ~1
    while bits:
        first = _first_bit(bits)
        length = _first_bit(~(bits >> first))
        if min(length, most) > len(best):
            best = list(range(first, first + min(length, most)))
        bits &= ~(((1 << length) - 1) << first)
    return best


def _first_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@dataclass(frozen=True)
class Step:
    """One step: at most one transfer, and the blocks that overlap it."""

    transfer: Tensor | None
    """The tensor that moves one hop (Q, KV, O, ODOQ, DQ, DKV); None for no transfer."""
    blocks: tuple[tuple[int, int], ...]


def forward_schedule(a: int, b: int, c: Mapping[Tensor, int], *, runs: bool = False) -> list[Step]:
    """The steps of algorithm 2. `c` has c_Q, c_KV and c_O, by tensor: how many blocks hide one hop of it.

    With `runs`, which is ours, a step's blocks are of one row where there are enough, so that they can be fused.
    """
    tile, steps, sent_o = Tile(a, b), [], 0

    def compute_blocks(x: int) -> tuple[tuple[int, int], ...]:
        blocks = []
        while runs and len(blocks) < x and (run := tile.next_run(x - len(blocks))):
            blocks += map(tile.compute, run)
        while len(blocks) < x and (block := tile.next_in_rows()):
            blocks.append(tile.compute(block))
        return tuple(blocks)

    while not tile.received_all:
        blocks = compute_blocks(c[chosen := _receive(tile, Q, c)])
        steps.append(Step(chosen, blocks))
        _received(tile, chosen)
    while sent_o < a - 1:
        while tile.rows[sent_o + 1]:
            steps.append(Step(None, compute_blocks(1)))
        steps.append(Step(O, compute_blocks(c[O])))
        sent_o += 1
    while any(tile.rows):
        steps.append(Step(None, compute_blocks(1)))
    return steps


def backward_schedule(a: int, b: int, c: Mapping[Tensor, int], *, runs: bool = False) -> list[Step]:
    """The steps of algorithm 3. `c` has c_OdOQ, c_KV, c_dQ and c_dKV, by tensor: how many blocks hide one hop of it.

    The paper's loop ends with the last send. Block (0, 0), which no send waits for, may be left then: it is added.
    `runs` is as in `forward_schedule`, by columns.
    """
    tile, steps, sent = Tile(a, b), [], {DQ: 0, DKV: 0}

    def choose_next_block() -> tuple[int, int] | None:
        row, column = _first_unfinished(tile.rows), _first_unfinished(tile.columns)
        # c_dQ / n_dQ < c_dKV / n_dKV. Row and column 0 have no profit, as finishing them allows no send.
        dq_profit = c[DQ] * tile.columns[column].bit_count() if row else 0
        dkv_profit = c[DKV] * tile.rows[row].bit_count() if column else 0
        return tile.next_in_columns() if dq_profit < dkv_profit else tile.next_in_rows()

    def compute_blocks(x: int) -> tuple[tuple[int, int], ...]:
        blocks = []
        by_columns = runs and not tile.received_all
        while by_columns and len(blocks) < x and (run := tile.next_run(x - len(blocks), columns=True)):
            blocks += map(tile.compute, run)
        while len(blocks) < x and (block := choose_next_block()):
            blocks.append(tile.compute(block))
        return tuple(blocks)

    def valid(tensor: Tensor) -> bool:
        lines = tile.rows if tensor is DQ else tile.columns
        return sent[tensor] + 1 < len(lines) and not lines[sent[tensor] + 1]

    while not tile.received_all:
        blocks = compute_blocks(c[chosen := _receive(tile, ODOQ, c)])
        steps.append(Step(chosen, blocks))
        _received(tile, chosen)
    while sent[DQ] < a - 1 or sent[DKV] < b - 1:
        while not (valid(DQ) or valid(DKV)):
            steps.append(Step(None, compute_blocks(1)))
        for tensor in (DQ, DKV):
            if valid(tensor):
                steps.append(Step(tensor, compute_blocks(c[tensor])))
                sent[tensor] += 1
    while any(tile.rows):
        steps.append(Step(None, compute_blocks(1)))
    return steps


def _receive(tile: Tile, q: Tensor, c: Mapping[Tensor, int]) -> Tensor:
    """The tensor to receive next: `q` if n_Q / c_Q > n_KV / c_KV, else KV."""
    return q if tile.unlocked_by_q() * c[KV] > tile.unlocked_by_kv() * c[q] else KV


def _received(tile: Tile, tensor: Tensor) -> None:
    if tensor is KV:
        tile.kv_received += 1
    else:
        tile.q_received += 1


def _first_unfinished(lines: Sequence[int]) -> int:
    return next((i for i in _own_last(len(lines)) if lines[i]), 0)
