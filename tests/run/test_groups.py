"""Groups are made by real ranks that have other GPUs, and are refused, not waited for, where ranks ask for others."""

from __future__ import annotations

import pytest

from tests.run import group_jobs
from tests.support.ranks import WORLD, Ranks

N = 4


@pytest.mark.parametrize("kind", ["nccl", "registered buffers", "symmetric memory", "starts of phases"])
def test_ranks_with_other_gpus_form_every_group(ranks: Ranks, kind: str) -> None:
    """Their names come from what all members share: neither a rank's GPU nor what that GPU has is in them."""
    found = ranks.run(group_jobs.groups_of, kind, N)
    taking_part = WORLD if kind == "starts of phases" else N
    assert all(found[:taking_part]) and not any(found[taking_part:])
    for rank, groups in enumerate(found):
        for members, total in groups:
            assert rank in members and total == sum(members)
    if kind != "starts of phases":
        assert {members for groups in found for members, _ in groups} >= {(0, 1), (2, 3), (0, 1, 2, 3)}


def test_ranks_that_ask_for_different_groups_are_told(ranks: Ranks) -> None:
    """All of them, at once; the next group is made."""
    for error in ranks.run(group_jobs.another_purpose_on_one_rank, N)[:N]:
        assert "rank 0, 1, 2: sp_bench gloo test on GPU 0 of 0,1,2,3; rank 3: sp_bench gloo test on GPU 1" in error
        assert error.endswith("then 6")


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    assert "rank 1 didn't come to make a group in 0 s" in ranks.run(group_jobs.nobody_else_comes, N)[0]


def test_each_device_of_a_process_has_its_group(ranks: Ranks) -> None:
    assert ranks.run(group_jobs.for_two_devices, N) == [(2, True)] * WORLD
