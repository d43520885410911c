"""The library's collectives on real ranks: exact, and counted as the closed form, whether n divides or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from sp_bench import account
from sp_bench.methods import REGISTRY
from sp_bench.plan.documents import Documents
from sp_bench.plan.method import PHASES
from tests.run import jobs
from tests.support.attention_cases import Case, errors_of, wrong_in
from tests.support.marks import exhaustive
from tests.support.problems import divisors
from tests.support.ranks import Ranks


@cache
def cases(n: int) -> list[Case]:
    """Every method of collectives, by the library and by messages; n divides the tokens of some."""
    found, u = [], next(d for d in divisors(n) if d > 1)
    methods = [
        ("all_gather", "stride", u),
        ("ulysses", "", 0),
        ("usp", "ulysses", u),
        ("ulysses_all_gather", "ulysses", u),
    ]
    methods += [("startrail", "team", c) for c in divisors(n) if c > 1 and n % c**2 == 0]
    for collectives in ("library", "messages"):
        for name, option, value in methods:
            options = (*(((option, value),) if option else ()), ("collectives", collectives))
            layout = "zigzag" if "zigzag" in REGISTRY[name].layouts else "contiguous"
            case = Case(n=n, method=name, options=options, layout=layout, heads=2 * n, kv_heads=n)
            found += [case, replace(case, more=n - 1)]
            if collectives == "library":
                found.append(replace(case, more=1, dtype="bfloat16", causal=False, batch=1))
            if n == 4 and layout == "zigzag":
                pack = Documents((3, 25, 4, 20, 12), causal=True)
                found.append(replace(case, pack=pack, layout="whole_documents"))
    return found


@pytest.mark.parametrize("n", [4, *map(exhaustive, (2, 3, 6, 8, 9))])
def test_they_are_exact_and_send_what_is_counted(n: int, ranks: Ranks) -> None:
    """And what the closed form says, padding to equal pieces among it. Under a pack messages leave out what nobody
    needs.
    """
    answers = (ranks.run(job, cases(n)) for job in (jobs.find_differences, jobs.find_sent))
    by_rank = list(zip(*answers, strict=True))[:n]
    for case in cases(n):
        assert not wrong_in(case, errors_of(found[case] for found, _ in by_rank)), case
        volumes = [account.volume(case.built.plan(case.problem, p, case.costs), case.problem) for p in PHASES]
        total = 0
        for rank, (_, sent) in enumerate(by_rank):
            everything = Counter(sent[case][1])
            assert everything == sum((Counter(volume.of(rank)) for volume in volumes), Counter()), case
            total += sum(everything.values())
        if case.pack is None and not (case.more and case.method == "usp"):
            closed = sum(case.built.bytes_sent(case.problem, phase) for phase in PHASES)
            assert total == pytest.approx(n * closed, rel=1e-12), case
