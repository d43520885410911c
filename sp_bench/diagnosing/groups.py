"""The groups of ranks in which the methods move data: each is made, and carries a message each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sp_bench.diagnosing.findings import Finding, finding
from sp_bench.errors import RequestError
from sp_bench.lower.early import by_messages
from sp_bench.measure.pool import RankFailure
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.groups import UP, Exchange, Group
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem


class Used(NamedTuple):
    """Groups of ranks that a lane uses: every rank's own."""

    lane: int
    group: Group | Exchange
    collective: bool

    def __str__(self) -> str:
        if isinstance(self.group, Exchange):
            return f"lane {self.lane}, pairs of ranks"
        way = "collectives" if self.collective else "messages"
        inner = f", {self.group.inner} in a row" if self.group.inner else ""
        return f"lane {self.lane}, {way} of {self.group.size} ranks, each {self.group.stride} from the next{inner}"


def used_groups(n: int) -> list[Used]:
    """The groups of all methods' plans on n ranks."""
    groups = dict[Used, str]()
    for plan in _plans(n):
        for _, op in plan.transfers:
            if isinstance(op.group, Exchange) or op.group.size > 1:
                group = op.group if isinstance(op.group, Exchange) else op.group._replace(way=UP)
                one = Used(plan.lanes.index(op.lane), group, not by_messages(op))
                groups.setdefault(one, str(one))
    return list({words: one for one, words in reversed(groups.items())}.values())[::-1]


def _plans(n: int) -> Iterator[Plan]:
    layout = LAYOUTS["striped"]
    problem = Problem(n=n, seqlen=4 * n, heads=2 * n, kv_heads=n, head_dim=8, layout=layout)
    for name in REGISTRY:
        try:
            for method in build(name, {}).candidates(problem):
                yield from (method.plan(method.assigned(problem), phase, COMPUTE_BOUND) for phase in PHASES)
        except RequestError:
            continue  # not for so many ranks


def judge_groups(n: int, run: Callable[..., list[Any]]) -> list[Finding]:
    """A row for each group that fails, or one for all. `run` has all ranks do a job of rank_jobs."""
    used, failed = used_groups(n), []
    for one in used:
        try:
            wrong = next(filter(None, run("message_each_way", one)), "")
        except RankFailure as failure:
            wrong = str(failure)
        if wrong:
            fix = "NCCL_DEBUG=INFO shows what NCCL was doing; methods without this group can be measured"
            failed.append(finding("groups", str(one), wrong, "fail", fix))
    return failed or [finding("groups", "all methods", f"{len(used)} kinds of groups carry a message each way")]
