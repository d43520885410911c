"""Ranks that call an attention with different shapes, in one step."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from sp_bench import SequenceParallelAttention, documents
from sp_bench.errors import RequestError
from sp_bench.measure.pool import RankPool
from sp_bench.plan.costs import CostProfile
from sp_bench.run.calls import COMPARED, LOOK_S, calls_of

SECONDS = 20 * LOOK_S
"""Until all ranks have an error, on busy cores. The timeout of a group is minutes."""


def said_of(call) -> tuple[str, float]:
    """(the error of a call or "computed", the seconds it took)."""
    begun = time.monotonic()
    try:
        call()
    except RequestError as error:
        return str(error), time.monotonic() - begun
    return "computed", time.monotonic() - begun


def x(tokens: int) -> torch.Tensor:
    return torch.zeros(1, tokens, 4, 8)


def another_length(method: str, known: tuple[int, ...]) -> list[tuple[str, float]]:
    """The last rank calls with 12 tokens, the others with 8, after calls with `known`; then all call again."""
    attention, last = SequenceParallelAttention(method), dist.get_rank() == dist.get_world_size() - 1
    for tokens in known:
        attention(*[x(tokens)] * 3)
    return [said_of(lambda: attention(*[x(12 if last else 8)] * 3)), said_of(lambda: attention(*[x(8)] * 3))]


@pytest.mark.parametrize(("method", "n"), [("ring", 2), ("ring", 3), ("ulysses", 2), ("all_gather", 2)])
def test_a_shape_that_is_new_to_one_rank_is_refused_on_all(method: str, n: int) -> None:
    assert_refused(method, n, (8,), f"seqlen={8 * n}", f"seqlen={12 * n}")


@pytest.mark.parametrize(("method", "n"), [("ring", 2), ("ring", 3)])
def test_shapes_that_all_ranks_have_are_refused_if_they_differ(method: str, n: int) -> None:
    assert_refused(method, n, (8, 12), f"seqlen={8 * n}", f"seqlen={12 * n}")


def assert_refused(method: str, n: int, known: tuple[int, ...], *named: str) -> None:
    with RankPool(n, timeout_s=60) as pool:
        for (error, seconds), (again, _) in pool.run(another_length, method, known):
            assert all(each in error for each in named), error
            assert "all ranks must make the same calls" in error
            assert seconds < SECONDS
            assert again == error


def another_pack() -> tuple[str, float]:
    """Ranks call with packs of one length that all have, in which messages have the same sizes."""
    packs = [SequenceParallelAttention("ring", mask=documents(sizes)) for sizes in ((4, 12), (12, 4))]
    packs[1].share(packs[0])
    for attention in packs:
        attention(*[x(8)] * 3)
    return said_of(lambda: packs[dist.get_rank()](*[x(8)] * 3))


def test_documents_that_differ_between_ranks_are_refused() -> None:
    with RankPool(2, timeout_s=60) as pool:
        for error, seconds in pool.run(another_pack):
            assert error.count("2 documents") == 2
            assert seconds < SECONDS


ATTENTIONS = {
    "layout": (("ring", {"layout": "striped"}), ("ring", {"layout": "zigzag"})),
    "method": (("ring", {}), ("pass_q", {})),
    "tile": (("mesh", {"tile": (1, 2)}), ("mesh", {"tile": (2, 1)})),
    "wire_dtype": (("ring", {"wire_dtype": "float64"}), ("ring", {"wire_dtype": "float32"})),
    "scale": (("ring", {"scale": 1.0}), ("ring", {"scale": 2.0})),
    "costs": (("ring", {}), ("ring", {"costs": CostProfile(forward_block_s=1.0, backward_block_s=1.0)})),
}
"""Differences between the attentions of two ranks, by which their plans or their scores are others."""


def another_attention(differs: str) -> tuple[str, float]:
    method, options = ATTENTIONS[differs][dist.get_rank()]
    return said_of(lambda: SequenceParallelAttention(method, **options)(*[x(8)] * 3))


@pytest.mark.parametrize("differs", ATTENTIONS)
def test_attentions_that_differ_between_ranks_are_refused(differs: str) -> None:
    with RankPool(2, timeout_s=60) as pool:
        for error, seconds in pool.run(another_attention, differs):
            assert "all ranks must make the same calls" in error
            assert seconds < SECONDS


def late() -> list[str]:
    """Rank 1 comes late to a call with a new shape, and to one with a shape that both have."""
    attention, found = SequenceParallelAttention("ring"), []
    for tokens in (8, 12, 8):
        time.sleep(3 * LOOK_S if dist.get_rank() == 1 else 0)
        found.append(said_of(lambda tokens=tokens: attention(*[x(tokens)] * 3))[0])
    return found


@pytest.mark.long
def test_a_late_rank_is_waited_for() -> None:
    with RankPool(2, timeout_s=60) as pool:
        assert pool.run(late) == [["computed"] * 3] * 2


def another_call_before() -> list[str]:
    """One of several calls that nobody waits in differs; then ranks have time to compare, and call again."""
    calls, attention = calls_of(dist.group.WORLD), SequenceParallelAttention("ring")  # pyright: ignore[reportArgumentType]
    found = []
    for differs in (False, True):
        for i in range(COMPARED):
            calls.begin("one" if i or not differs or dist.get_rank() else "another")
        time.sleep(3 * LOOK_S)
        found.append(said_of(lambda: attention(*[x(8)] * 3))[0])
    return found


def test_calls_that_differed_are_found_behind_them() -> None:
    with RankPool(2, timeout_s=60) as pool:
        for alike, differed in pool.run(another_call_before):
            assert alike == "computed"
            assert "all ranks must make the same calls" in differed
