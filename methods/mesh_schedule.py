"""The schedules of the Mesh-Attention paper: algorithm 2 forward, algorithm 3 backward (methods/mesh.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, wraps

from sp_bench.plan import DKV, DQ, KV, ODOQ, O, Q, Tensor

Block = tuple[int, int]
"""(u, v): row u, of Q#u, and column v, of KV#v."""


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
    unfinished_rows: int = field(init=False)
    """A bit set of the rows that have blocks to compute."""
    unfinished_columns: int = field(init=False)
    """A bit set of the columns that have."""

    def __post_init__(self) -> None:
        self.unfinished_rows, self.unfinished_columns = first_bits(self.a), first_bits(self.b)
        self.rows = [self.unfinished_columns] * self.a
        self.columns = [self.unfinished_rows] * self.b

    @property
    def received_all(self) -> bool:
        return self.q_received == self.a - 1 and self.kv_received == self.b - 1

    def unlocked_by_q(self) -> int:
        """The paper's n_Q: blocks that the next Recv Q makes ready."""
        return self.kv_received + 1 if self.q_received < self.a - 1 else 0

    def unlocked_by_kv(self) -> int:
        """The paper's n_KV: blocks that the next Recv KV makes ready."""
        return self.q_received + 1 if self.kv_received < self.b - 1 else 0

    def next_in_rows(self) -> Block | None:
        """The first ready block in row-first order, (u, v); None if none is ready."""
        ready = first_bits(self.kv_received + 1)
        for u in own_last(self.unfinished_rows & first_bits(self.q_received + 1)):
            if self.rows[u] & ready:
                return u, first_bit(self.rows[u] & ready)
        return None

    def next_in_columns(self) -> Block | None:
        """The first ready block in column-first order, (u, v); None if none is ready."""
        ready = first_bits(self.q_received + 1)
        for v in own_last(self.unfinished_columns & first_bits(self.kv_received + 1)):
            if self.columns[v] & ready:
                return first_bit(self.columns[v] & ready), v
        return None

    def compute(self, block: Block) -> Block:
        u, v = block
        self.rows[u] &= ~(1 << v)
        self.columns[v] &= ~(1 << u)
        if not self.rows[u]:
            self.unfinished_rows &= ~(1 << u)
        if not self.columns[v]:
            self.unfinished_columns &= ~(1 << v)
        return block

    def compute_blocks(self, x: int, choose: Callable[[], Block | None]) -> tuple[Block, ...]:
        """The paper's ComputeBlocks: at most x ready blocks, each the one that `choose` names."""
        blocks = []
        while len(blocks) < x and (block := choose()):
            blocks.append(self.compute(block))
        return tuple(blocks)


def own_last(lines: int) -> Iterator[int]:
    """Rows or columns of a bit set, by priority. #0, the rank's own chunk, is last, as no transfer waits for it."""
    others = lines & ~1
    while others:
        yield first_bit(others)
        others &= others - 1
    if lines & 1:
        yield 0


def first_bits(count: int) -> int:
    """The bit set of the first `count` lines."""
    return (1 << count) - 1


def first_bit(bits: int) -> int:
    """The number of the lowest set bit, -1 of an empty set."""
    return (bits & -bits).bit_length() - 1


@dataclass(frozen=True)
class Step:
    """One step: at most one transfer, and the blocks that overlap it."""

    transfer: Tensor | None
    """The tensor that moves one hop (Q, KV, O, ODOQ, DQ, DKV); None for no transfer."""
    blocks: tuple[Block, ...]


Schedule = Callable[..., list[Step]]


def remembered(schedule: Schedule) -> Schedule:
    """The same steps for the same tile and costs: variants that differ in other things share them."""
    known = lru_cache(maxsize=64)(lambda a, b, c, kind: tuple(schedule(a, b, dict(c), kind)))

    @wraps(schedule)
    def found(a: int, b: int, c: Mapping[Tensor, int], kind: type[Tile] = Tile) -> list[Step]:
        return [*known(a, b, tuple(c.items()), kind)]

    return found


@remembered
def forward_schedule(a: int, b: int, c: Mapping[Tensor, int], kind: type[Tile] = Tile) -> list[Step]:
    """The steps of algorithm 2. `c` has c_Q, c_KV and c_O, by tensor: how many blocks hide one hop of it."""
    tile, steps, sent_o = kind(a, b), [], 0

    def compute_blocks(x: int) -> tuple[Block, ...]:
        return tile.compute_blocks(x, tile.next_in_rows)

    while not tile.received_all:
        blocks = compute_blocks(c[chosen := _receive(tile, Q, c)])
        steps.append(Step(chosen, blocks))
        _received(tile, chosen)
    while sent_o < a - 1:
        while tile.rows[sent_o + 1]:
            steps.append(Step(None, compute_blocks(1)))
        steps.append(Step(O, compute_blocks(c[O])))
        sent_o += 1
    while tile.unfinished_rows:
        steps.append(Step(None, compute_blocks(1)))
    return steps


@remembered
def backward_schedule(a: int, b: int, c: Mapping[Tensor, int], kind: type[Tile] = Tile) -> list[Step]:
    """The steps of algorithm 3. `c` has c_OdOQ, c_KV, c_dQ and c_dKV, by tensor: how many blocks hide one hop of it.

    The paper's loop ends with the last send. Block (0, 0), which no send waits for, may be left then: it is added.
    """
    tile, steps, sent = kind(a, b), [], {DQ: 0, DKV: 0}

    def choose_next_block() -> Block | None:
        row, column = next(own_last(tile.unfinished_rows), 0), next(own_last(tile.unfinished_columns), 0)
        # c_dQ / n_dQ < c_dKV / n_dKV. Row and column 0 have no profit, as finishing them allows no send.
        dq_profit = c[DQ] * tile.columns[column].bit_count() if row else 0
        dkv_profit = c[DKV] * tile.rows[row].bit_count() if column else 0
        return tile.next_in_columns() if dq_profit < dkv_profit else tile.next_in_rows()

    def compute_blocks(x: int) -> tuple[Block, ...]:
        return tile.compute_blocks(x, choose_next_block)

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
    while tile.unfinished_rows:
        steps.append(Step(None, compute_blocks(1)))
    return steps


SCHEDULES = {"forward": forward_schedule, "backward": backward_schedule}


def _receive(tile: Tile, q: Tensor, c: Mapping[Tensor, int]) -> Tensor:
    """The tensor to receive next: `q` if n_Q / c_Q > n_KV / c_KV, else KV."""
    return q if tile.unlocked_by_q() * c[KV] > tile.unlocked_by_kv() * c[q] else KV


def _received(tile: Tile, tensor: Tensor) -> None:
    if tensor is KV:
        tile.kv_received += 1
    else:
        tile.q_received += 1
