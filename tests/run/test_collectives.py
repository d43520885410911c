"""The library's collectives on real ranks: exact, and counted as the closed form, whether n divides or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from sp_bench import account
from sp_bench.plan.documents import Documents
from sp_bench.plan.method import PHASES
from tests.run import jobs
from tests.support.attention_cases import BOUNDS, Case, relative
from tests.support.ranks import Ranks

METHODS = (
    ("all_gather", "stride", 2), ("startrail", "team", 2), ("ulysses_all_gather", "ulysses", 2), ("usp", "ulysses", 2),
)  # fmt: skip


def cases() -> list[Case]:
    found = []
    for collectives in ("library", "messages"):
        for name, option, value in METHODS:
            options = ((option, value), ("collectives", collectives))
            case = Case(n=4, method=name, options=options, layout="zigzag", heads=8, kv_heads=4)
            found += [case, replace(case, more=3), replace(case, more=1, dtype="bfloat16", causal=False, batch=1)]
            pack = Documents((3, 25, 4, 20, 12), causal=True)
            found.append(replace(case, pack=pack, layout="whole_documents"))
    return found


@pytest.fixture(scope="module")
def answers(ranks: Ranks) -> list[tuple[dict, dict]]:
    """(errors, bytes sent) by case, of each rank."""
    wanted = cases()
    return list(zip(ranks.run(jobs.find_differences, wanted), ranks.run(jobs.find_sent, wanted), strict=True))[:4]


def test_they_are_exact(answers: list[tuple[dict, dict]]) -> None:
    for case in cases():
        errors = [relative(shares) for shares in zip(*(found[case] for found, _ in answers), strict=True)]
        assert max(errors) <= BOUNDS[case.dtype], case


def test_what_they_send_is_counted_and_is_the_closed_form(answers: list[tuple[dict, dict]]) -> None:
    """Padding to equal pieces is among it. Under a pack messages leave out what nobody needs."""
    for case in cases():
        volumes = [account.volume(case.built.plan(case.problem, p, case.costs), case.problem) for p in PHASES]
        total = 0
        for rank, (_, sent) in enumerate(answers):
            everything = Counter(sent[case][1])
            assert everything == sum((Counter(volume.of(rank)) for volume in volumes), Counter()), case
            total += sum(everything.values())
        if case.pack is None and not (case.more and case.method == "usp"):
            closed = sum(case.built.bytes_sent(case.problem, phase) for phase in PHASES)
            assert total == pytest.approx(4 * closed, rel=1e-12), case
