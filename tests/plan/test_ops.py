"""Groups and chunks against the formulas of the Mesh paper's table 1."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.plan import Attend, Chunk, Fold, Group, Pass, Steps, receive_next, reduce_next

sides = st.integers(1, 12)


@given(sides, sides)
def test_local_indices_are_table_1(a: int, b: int) -> None:
    n = a * b
    for i in range(n):
        for u in range(a):
            assert Chunk("q", u, Group(1, a)).owner(i) == a * (i // a) + (i + u) % a
        for v in range(b):
            assert Chunk("kv", v, Group(a, b)).owner(i) == (i + a * v) % n


@given(sides, sides)
def test_each_rank_computes_a_tile_and_all_ranks_the_matrix(a: int, b: int) -> None:
    """The blocks (Q#u, KV#v) of all ranks are the assignment matrix, each block once."""
    ranks = np.arange(a * b)
    times = np.zeros((a * b, a * b), int)
    for u in range(a):
        for v in range(b):
            times[Chunk("q", u, Group(1, a)).owner(ranks), Chunk("kv", v, Group(a, b)).owner(ranks)] += 1
    assert (times == 1).all()


@given(sides, sides, sides, st.integers(-30, 30))
def test_groups_are_rings(stride: int, size: int, copies: int, shift: int) -> None:
    group, ranks = Group(stride, size), np.arange(stride * size * copies)
    there = group.member(ranks, shift)
    assert sorted(there) == list(ranks)
    np.testing.assert_array_equal(group.member(there, -shift), ranks)
    np.testing.assert_array_equal(there // group.span, ranks // group.span)
    np.testing.assert_array_equal(there % stride, ranks % stride)
    np.testing.assert_array_equal(group.position(there), (group.position(ranks) + shift) % size)
    assert [group.member(int(rank), shift) for rank in ranks] == there.tolist()


@given(sides, sides, st.integers(-3, 3))
def test_a_pass_meets_its_peer(stride: int, size: int, shift: int) -> None:
    group = Group(stride, size)
    q = Chunk("q", 0, group)
    hop = Pass("lane", send=q, recv=q.at(1), group=group, shift=shift)
    for rank in range(3 * group.span):
        assert hop.source(hop.target(rank)) == rank == hop.target(hop.source(rank))


@given(st.integers(1, 12))
def test_receive_next_goes_round_once(size: int) -> None:
    """After k hops, what a rank holds as #k is the chunk that #k names."""
    home = Group(1, size)
    chunk, ranks = Chunk("kv", 0, home), np.arange(size)
    held = ranks
    for have in range(size - 1):
        hop = receive_next(chunk, have, "kv")
        assert (hop.send, hop.recv) == (chunk.at(have), chunk.at(have + 1))
        held = held[hop.source(ranks)]
        np.testing.assert_array_equal(held, hop.writes[0].owner(ranks))


@given(st.integers(2, 12))
def test_reduce_next_brings_every_partial_home(size: int) -> None:
    """After size - 1 hops each rank's #0 is the sum over all ranks of their partials of its chunk."""
    partial, ranks = Chunk("o", 0, Group(1, size)), np.arange(size)
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


def test_indices_wrap_and_names_read_like_the_paper() -> None:
    q = Chunk("q", 2, Group(1, 3))
    assert q.at(3) == q.at(0) == Chunk("q", 0, Group(1, 3))
    o = Chunk("o", 1, Group(1, 3))
    assert [str(x) for x in (q, o, o.arriving())] == ["q#2", "o#1", "o#1 arriving"]
    assert o.arriving() != o and o.arriving().at(1) == o
    assert str(receive_next(q, 0, "rings")) == "Pass[rings] q#0 -> -1, q#1 <- +1"
    assert str(Attend(q, Chunk("kv", 1, Group(3, 3)), o)) == "Attend q#2 x kv#1 into o#1"
    assert str(Fold(o.arriving(), o)) == "Fold o#1 arriving into o#1"


def test_steps_number_their_operations() -> None:
    q, kv, o = (Chunk(tensor, 0, Group(1, 2)) for tensor in ("q", "kv", "o"))
    steps = Steps()
    steps.next()
    steps.do(receive_next(kv, 0, "b"), Attend(q, kv, o))
    steps.next()
    steps.do(receive_next(q, 0, "a"), Attend(q, kv.at(1), o), receive_next(kv, 1, "b"))
    plan = steps.plan("forward", 2, (q, kv), (o,))
    assert plan.steps == (0, 0, 1, 1, 1)
    assert plan.lanes == ("b", "a")
    assert [index for index, _ in plan] == list(range(5))
