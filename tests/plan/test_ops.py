"""Groups and chunks against the formulas of the Mesh paper's table 1."""

from __future__ import annotations

from itertools import product
from typing import get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.methods import build
from sp_bench.plan import (
    DOWN,
    UP,
    AllToAll,
    Attend,
    Bundle,
    Chunk,
    Exchange,
    Fold,
    Grid,
    Group,
    Line,
    Pass,
    Problem,
    Steps,
    outer,
    receive_next,
    reduce_next,
)
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.members import ahead
from sp_bench.plan.memo import KEPT, keep
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Collective, GroupCast, RowCollective, Transfer, TreeReduce
from sp_bench.plan.tensors import KV, O, Q
from sp_bench.plan.transfers import messages, peers, rows_sent
from tests.support.problems import all_methods, small_problem, splittable_problem

sides, ways = st.integers(1, 12), st.sampled_from([UP, DOWN])


@given(sides, sides)
def test_local_indices_are_table_1(a: int, b: int) -> None:
    n = a * b
    for i in range(n):
        for u in range(a):
            assert Chunk(Q, u, Group(1, a)).owner(i) == a * (i // a) + (i + u) % a
        for v in range(b):
            assert Chunk(KV, v, Group(a, b)).owner(i) == (i + a * v) % n
            assert Chunk(KV, v, Group(a, b, DOWN)).owner(i) == (i - a * v) % n


@given(sides, sides)
def test_each_rank_computes_a_tile_and_all_ranks_the_matrix(a: int, b: int) -> None:
    """The blocks (Q#u, KV#v) of all ranks are the assignment matrix, each block once."""
    ranks = np.arange(a * b)
    times = np.zeros((a * b, a * b), int)
    for u in range(a):
        for v in range(b):
            times[Chunk(Q, u, Group(1, a)).owner(ranks), Chunk(KV, v, Group(a, b)).owner(ranks)] += 1
    assert (times == 1).all()


@given(sides, sides, sides, st.integers(-30, 30), ways)
def test_groups_are_rings(stride: int, size: int, copies: int, shift: int, way: int) -> None:
    group, ranks = Group(stride, size, way), np.arange(stride * size * copies)
    there = group.member(ranks, shift)
    assert sorted(there) == list(ranks)
    np.testing.assert_array_equal(group.member(there, -shift), ranks)
    np.testing.assert_array_equal(there // group.span, ranks // group.span)
    np.testing.assert_array_equal(there % stride, ranks % stride)
    np.testing.assert_array_equal(group.position(there), (group.position(ranks) + shift) % size)
    assert [group.member(int(rank), shift) for rank in ranks] == there.tolist()
    np.testing.assert_array_equal(Group(stride, size).member(ranks, way * shift), there)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Exchange, np.ndarray]:
    """An exchange of two digits, and ranks that it tiles."""
    size, stride, between, copies = (draw(st.integers(1, most)) for most in (4, 3, 3, 3))
    low, high = draw(ways), draw(ways)
    exchange = Exchange(Group(stride, size, low), Group(stride * size * between, size, high))
    return exchange, np.arange(exchange.span * copies)


@given(sides, sides, sides, st.integers(-30, 30), ways)
def test_ranks_ahead_are_those_of_the_group(stride: int, size: int, copies: int, shift: int, way: int) -> None:
    """An array of some ranks, in any order, and one rank."""
    group, n = Group(stride, size, way), stride * size * copies
    some = np.arange(n)[::-2]
    np.testing.assert_array_equal(ahead(group, shift, some, n), group.member(some, shift))
    assert ahead(group, shift, n - 1, n) == group.member(n - 1, shift)


@given(exchanges(), st.integers(-5, 5))
def test_an_exchange_swaps_two_digits_and_is_its_own_inverse(case: tuple[Exchange, np.ndarray], shift: int) -> None:
    exchange, ranks = case
    there = exchange.member(ranks, shift)
    assert sorted(there) == list(ranks)
    np.testing.assert_array_equal(exchange.member(there, shift), ranks)
    np.testing.assert_array_equal(exchange.member(ranks, -shift), there)
    np.testing.assert_array_equal(there // exchange.span, ranks // exchange.span)
    assert [exchange.member(int(rank), shift) for rank in ranks] == there.tolist()
    low, high = exchange
    swapped = (high, low) if shift % 2 else (low, high)
    for digit, was in zip((low, high), swapped, strict=True):
        np.testing.assert_array_equal(digit.digit(there), was.digit(ranks))
    others, theirs = (r - low.digit(r) * low.stride - high.digit(r) * high.stride for r in (ranks, there))
    np.testing.assert_array_equal(others, theirs)


def grids(c: int, blocks: int) -> list[Grid]:
    """Two digits of c * c * blocks ranks, without and with an exchange as StarTrail has it."""
    digits = Group(1, c), Group(c * c, blocks)
    return [Grid(*digits), Grid(*digits, Exchange(Group(1, c), Group(c, c)))]


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_grid_s_chunks_are_those_around_a_rank_or_its_partner(c: int, blocks: int) -> None:
    plain, exchanged = grids(c, blocks)
    ranks = np.arange(c * c * blocks)
    partner = c * c * (ranks // c**2) + c * (ranks % c) + ranks // c % c
    for grid, start in ((plain, ranks), (exchanged, partner)):
        np.testing.assert_array_equal(grid.member(ranks, 0), start)
        owners = np.stack([grid.member(ranks, shift) for shift in range(grid.size)])
        assert all(sorted(row) == list(ranks) for row in owners), "each shift is a permutation"
        for rank in ranks:
            around = {c * (start[rank] // c) % c**2 + c * c * block + e for e in range(c) for block in range(blocks)}
            assert set(owners[:, rank]) == around
            assert [grid.member(int(rank), shift) for shift in range(grid.size)] == owners[:, rank].tolist()


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_lines_go_round_a_grid(c: int, blocks: int, exchange: bool) -> None:
    """After k hops, what a rank holds as line.at(k) is the chunk that it names, whoever's partner the rank is."""
    grid = grids(c, blocks)[exchange]
    chunk, ranks = Chunk(KV, 0, grid), np.arange(c * c * blocks)
    lines = [Line(chunk.at(e), grid.outer, c) for e in range(c)]
    assert lines[0] == outer(chunk)
    for line in lines:
        held = line.at(0).owner(ranks)
        for have in range(line.group.size - 1):
            hop = receive_next(line, have, "kv")
            held = held[hop.source(ranks)]
            np.testing.assert_array_equal(held, hop.writes[0].owner(ranks))


@given(sides, sides, st.integers(-3, 3), ways)
def test_a_pass_meets_its_peer(stride: int, size: int, shift: int, way: int) -> None:
    group = Group(stride, size, way)
    q = Chunk(Q, 0, group)
    hop = Pass("lane", send=q, recv=q.at(1), group=group, shift=shift)
    for rank in range(3 * group.span):
        assert hop.source(hop.target(rank)) == rank == hop.target(hop.source(rank))


@given(st.integers(1, 12))
def test_receive_next_goes_round_once(size: int) -> None:
    """After k hops, what a rank holds as #k is the chunk that #k names."""
    home = Group(1, size)
    chunk, ranks = Chunk(KV, 0, home), np.arange(size)
    held = ranks
    for have in range(size - 1):
        hop = receive_next(chunk, have, "kv")
        assert (hop.send, hop.recv) == (chunk.at(have), chunk.at(have + 1))
        held = held[hop.source(ranks)]
        np.testing.assert_array_equal(held, hop.writes[0].owner(ranks))


@given(st.integers(2, 12))
def test_reduce_next_brings_every_partial_home(size: int) -> None:
    """After size - 1 hops each rank's #0 is the sum over all ranks of their partials of its chunk."""
    partial, ranks = Chunk(O, 0, Group(1, size)), np.arange(size)
    rng = np.random.default_rng(size)
    values = rng.integers(1, 1000, (size, size))
    held = {u: values[ranks, partial.at(u).owner(ranks)] for u in range(size)}
    for sent in range(size - 1):
        hop, fold = reduce_next(partial, sent, "o")
        assert hop.recv == fold.part == fold.into.arriving()
        arrived = held.pop(hop.reads[0].index)[hop.source(ranks)]
        held[fold.into.index] = held[fold.into.index] + arrived
    assert list(held) == [0]
    np.testing.assert_array_equal(held[0], values.sum(axis=0))


def dense_rows(op: Pass, problem: Problem, rank: int) -> int:
    """How many tokens of a query chunk a rank sends: those that see any key of `against`; all where none does."""
    rows, keys = (np.concatenate(problem.layout.positions(r, problem.n, problem.seqlen)) for r in op.seen_by(rank))
    seeing = int((rows >= keys.min()).sum()) if problem.mask == CAUSAL else 0
    return seeing or problem.queries.most


def row_bytes(op: RowCollective, problem: Problem) -> int:
    return sum(problem.token_bytes(field, wire=True) for field in op.tensor.fields)


def dense_keys(problem: Problem, reader: int, owner: int) -> int:
    """How many keys of the owner's layout chunk some query of the reader's sees."""
    degree = problem.layout.head_parallel
    queries, keys = (
        np.concatenate(problem.layout.ranges(rank // degree, problem.n // degree, problem.seqlen))
        for rank in (reader, owner)
    )
    return int((keys <= queries.max()).sum()) if problem.mask == CAUSAL else keys.size


def received(op: Transfer, problem: Problem) -> np.ndarray:
    """Bytes that the ranks on the lines send to those on the columns, by what each receives: (n, n)."""
    sent = np.zeros((problem.n, problem.n), np.int64)
    for rank in range(problem.n):
        if isinstance(op, AllToAll):
            heads = (
                sum(problem.field_bytes(field, wire=True) for field in op.recv.tensor.by_heads.fields) // op.group.size
            )
            sent[[op.group.member(rank, shift) for shift in range(1, op.group.size)], rank] = heads
        elif isinstance(op, RowCollective):
            for u in op.members:
                cast = isinstance(op, GroupCast)
                other = int(op.group.member(rank, u if cast else -u))
                reader, owner = (rank, other) if cast else (other, rank)
                sent[other, rank] = dense_keys(problem, reader, owner) * row_bytes(op, problem)
        elif isinstance(op, TreeReduce):
            for level, of_each in zip(op.levels, (op.levels[1].size, 1), strict=True):
                for distance in (2**k for k in range((level.size - 1).bit_length())):
                    owners = sum(ahead + distance < level.size for ahead in range(distance))
                    size = owners * of_each * problem.chunk_bytes(op.tensor, wire=True)
                    sent[level.member(rank, -distance), rank] += size
        elif isinstance(op, Collective):
            others = [op.group.member(rank, shift) for shift in range(1, op.group.size)]
            sent[others, rank] = problem.chunk_bytes(op.tensor, wire=True)
        elif (source := op.source(rank)) != rank:
            size = problem.chunk_bytes(op.writes[0].tensor, wire=True)
            sent[source, rank] = size * dense_rows(op, problem, source) // problem.queries.most if op.against else size
    return sent


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", [1, 2, 6, 8, 9])
def test_messages_are_what_is_received(n: int, layout: str) -> None:
    """For each transfer of every method and variant: by pairs of ranks, by one rank or an array of them."""
    base, ranks = splittable_problem(n, layout), np.arange(n)
    for method, phase in product(all_methods(base), PHASES):
        problem, total = method.assigned(base), 0
        for op in method.plan(problem, phase, COMPUTE_BOUND).ops:
            if not isinstance(op, Transfer):
                continue
            sent = np.zeros((n, n), np.int64)
            for (group, shift), sizes in zip(peers(op), messages(op, problem, ranks), strict=True):
                sent[ranks, group.member(ranks, shift)] += sum(sizes.values())
            one_by_one = np.zeros((n, n), np.int64)
            for rank in range(n):
                for (group, shift), sizes in zip(peers(op), messages(op, problem, rank), strict=True):
                    one_by_one[rank, group.member(rank, shift)] += sum(sizes.values())
            np.testing.assert_array_equal(sent, one_by_one)
            np.testing.assert_array_equal(sent, received(op, problem), f"{method}: {op}")
            assert not sent.diagonal().any(), "nothing goes to the rank itself"
            total += sent.sum()
        assert total == method.bytes_sent(base, phase) * n


@pytest.mark.parametrize("phase", PHASES)
def test_rows_sent_are_what_messages_count(phase: str) -> None:
    problem = small_problem(6, "zigzag")
    parts = set()
    ops = build("tokenring", {}).plan(problem, phase, COMPUTE_BOUND).ops
    for op in (op for op in ops if isinstance(op, Pass)):
        for rank in range(6):
            part = rows_sent(op, problem, rank)
            rows = dense_rows(op, problem, rank) if op.against else 2
            assert len(part) == rows
            (sizes,) = messages(op, problem, rank)
            fields = op.tensor.fields
            assert sizes == {f.name: problem.field_bytes(f, wire=True) * rows // 2 for f in fields}
            parts.add(part)
    assert parts == {range(2), range(1, 2)}


def test_indices_wrap_and_names_read_like_the_paper() -> None:
    q = Chunk(Q, 2, Group(1, 3))
    assert q.at(3) == q.at(0) == Chunk(Q, 0, Group(1, 3))
    o = Chunk(O, 1, Group(1, 3))
    assert [str(x) for x in (q, o, o.arriving())] == ["q#2", "o#1", "o#1 arriving"]
    assert o.arriving() != o and o.arriving().at(1) == o
    assert str(receive_next(q, 0, "rings")) == "Pass[rings] q#0 -> -1, q#1 <- +1"
    kv = Chunk(KV, 0, Group(1, 3, DOWN))
    assert str(receive_next(kv, 0, "rings")) == "Pass[rings] kv#0 -> +1, kv#1 <- -1"
    assert str(Attend(q, Chunk(KV, 1, Group(3, 3)), o)) == "Attend q#2 x kv#1 into o#1"
    assert str(Fold(o.arriving(), o)) == "Fold o#1 arriving into o#1"
    assert str(Fold(o.arriving(2), o)) == "Fold o#1 arriving 2 into o#1"
    assert [str(x) for x in (q.slice(1), o.slice(2).arriving())] == ["q#2 heads/1", "o#1 heads/2 arriving"]
    assert q.slice(1).at(4) == q.at(1).slice(1) != q.at(1)
    q_h, kv = Chunk(Q.by_heads, 0, Group(3, 1)), Chunk(KV, 1, Group(3, 3))
    assert str(AllToAll("a2a", q.at(0), q_h, Group(1, 3))) == "AllToAll[a2a] q#0 -> q_h#0 of 3"
    assert str(Bundle((q_h, o), q_h)) == "Bundle q_h#0, o#1 as q_h#0"
    assert str(Pass("q", q, q.at(0), Group(1, 3), 1, kv)) == "Pass[q] q#2 seeing kv#1 -> +1, q#0 <- -1"
    swap = Exchange(Group(1, 3), Group(3, 3))
    assert str(Pass("kv", kv, kv.at(0), swap, 1)) == "Pass[kv] kv#1 -> partner, kv#0 <- partner"


def test_a_plan_starts_and_ends_with_what_is_kept() -> None:
    q, kv, o, q_h = (Chunk(tensor, 0, Group(1, 1)) for tensor in (Q, KV, O, Q.by_heads))
    forward = Steps().plan("forward", 1, (q, kv), (o,), kept=(q_h,))
    assert (forward.starts_with, forward.ends_with) == ((q, kv), (o, q_h))
    backward = Steps().plan("backward", 1, (q, kv), (o,), kept=(q_h,))
    assert (backward.starts_with, backward.ends_with) == ((q, kv, q_h), (o,))


def test_steps_number_their_operations() -> None:
    q, kv, o = (Chunk(tensor, 0, Group(1, 2)) for tensor in (Q, KV, O))
    steps = Steps()
    steps.next()
    steps.do(receive_next(kv, 0, "b"), Attend(q, kv, o))
    steps.next()
    steps.do(receive_next(q, 0, "a"), Attend(q, kv.at(1), o), receive_next(kv, 1, "b"))
    plan = steps.plan("forward", 2, (q, kv), (o,))
    assert plan.steps == (0, 0, 1, 1, 1)
    assert plan.lanes == ("b", "a")
    assert [index for index, _ in plan] == list(range(5))


def test_a_pass_has_both_ends() -> None:
    """A send without its receive, or the other way round, can't be written down."""
    types = get_type_hints(Pass)
    assert types["send"] is types["recv"] is Chunk
    with pytest.raises(TypeError, match="recv"):
        Pass("q", send=Chunk(Q, 0, Group(1, 3)), group=Group(1, 3), shift=1)  # pyright: ignore[reportCallIssue]


def test_of_a_plan_of_many_packs_the_latest_are_known() -> None:
    found: dict[int, int] = {}
    for pack in range(KEPT + 3):
        assert keep(found, pack, -pack) == -pack
    assert found == {pack: -pack for pack in range(3, KEPT + 3)}
