"""Check a subject: every check on its cases, and the smallest failing case of each that fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sp_bench.conform.case import AXES, Case
from sp_bench.conform.cases import SIZES
from sp_bench.conform.catalogue import CHECKS, Check
from sp_bench.conform.ranks import Verdict, Worlds
from sp_bench.conform.subjects import Subject

SHRINK_S = 20.0
"""Seconds spent on shrinking one failure, and as many on trying it in other layouts."""


@dataclass(frozen=True)
class Row:
    """The result of one check."""

    check: Check
    status: str
    """holds, fails, refused (all cases), not claimed, or not run (no case has so many ranks)."""
    ran: tuple[Case, ...] = ()
    """The cases that were run and not refused."""
    failed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Refusals, by reason."""
    smallest: Case | None = None
    """The smallest failing case."""
    why: str = ""
    layout: str = ""
    """The layout that failing cases were assigned in, if another one could be claimed."""
    other_layouts: tuple[str, ...] = ()
    """Layouts in which all failing cases hold."""

    @property
    def cases(self) -> int:
        """How many cases were run."""
        return len(self.ran)


def rows_of(
    subject: Subject,
    worlds: Worlds,
    *,
    long: bool = False,
    sizes: Iterable[int] = SIZES,
    checks: Iterable[Check] = CHECKS,
    shrink_s: float = SHRINK_S,
    done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """The rows of a subject's table, in the order of the checks; `done` gets each as it is known."""
    rows: list[Row] = []
    for check in checks:
        row = _row(subject, worlds, check, long=long, sizes=set(sizes), shrink_s=shrink_s)
        done(row)
        rows.append(row)
    return rows


def _row(subject: Subject, worlds: Worlds, check: Check, *, long: bool, sizes: set[int], shrink_s: float) -> Row:
    claims = subject.claims
    if not check.claimed(claims):
        return Row(check, "not claimed")
    cases = [*dict.fromkeys(check.cases(claims, sorted(sizes), long))]
    if check.function == "volume":  # only where a volume is claimed
        cases = [c for c in cases if not worlds.refusal(subject, c) and subject.sent_bytes(c, "forward") is not None]
        if not cases:
            return Row(check, "not claimed")
    cases = [case for case in cases if case.n in sizes and check.worlds * case.n <= max(SIZES)]
    if not cases:
        return Row(check, "not run")
    verdicts = {case: worlds.judge(subject, check, case) for case in cases}
    failing = {case: verdict for case, verdict in verdicts.items() if verdict.status == "fails"}
    refused = Counter(verdict.why for verdict in verdicts.values() if verdict.status == "refused")
    ran = tuple(case for case, verdict in verdicts.items() if verdict.status != "refused")
    if not failing:
        return Row(check, "holds" if ran else "refused", ran, 0, dict(refused))
    case = _smallest(subject, worlds, check, failing, shrink_s)
    why = worlds.judge(subject, check, case).why
    layout, others = _layouts(subject, worlds, check, failing, shrink_s)
    worlds.renew()
    return Row(check, "fails", ran, len(failing), dict(refused), case, why, layout, others)


def _layouts(
    subject: Subject, worlds: Worlds, check: Check, failing: dict[Case, Verdict], limit_s: float
) -> tuple[str, tuple[str, ...]]:
    """(the layout of the failing cases, the others in which all of them hold); none where no other could help.

    Only those are named that all cases were tried in within the time, and nothing is tried after ranks died or hung.
    """
    tried = {case: subject.in_other_layouts(case) for case in failing}
    if any(verdict.slow for verdict in failing.values()) or not all(tried.values()):
        return "", ()
    deadline, holding = time.monotonic() + limit_s, []
    for name in sorted(set.intersection(*(set(others) for others in tried.values()))):
        for case, others in tried.items():
            verdict = worlds.judge(others[name], check, case) if time.monotonic() < deadline else Verdict("not run")
            deadline = 0.0 if verdict.slow else deadline
            if verdict.status != "holds":
                break
        else:
            holding.append(name)
    return " and ".join(sorted({subject.layout(case).name for case in failing})), tuple(holding)


def _smallest(subject: Subject, worlds: Worlds, check: Check, failing: dict[Case, Verdict], limit_s: float) -> Case:
    """A failure that ends ranks isn't shrunk: each try takes a new pool, or a timeout."""
    quick = [case for case, verdict in failing.items() if not verdict.slow]
    if not quick or limit_s <= 0:
        return min(quick or failing)

    def fails(case: Case) -> bool:
        verdict = worlds.judge(subject, check, case)
        return verdict.status == "fails" and not verdict.slow

    return smallest(min(quick), fails, limit_s)


def smallest(case: Case, fails: Callable[[Case], bool], limit_s: float) -> Case:
    """The case with the simplest value of each axis with which it still fails, tried for `limit_s`.

    After each step all axes are tried again, since values that didn't fit together may do so now.
    """
    deadline, known = time.monotonic() + limit_s, {case}

    def still_fails(candidate: Case) -> bool:
        new = candidate not in known and candidate.valid and time.monotonic() < deadline
        known.add(candidate)
        return new and fails(candidate)

    while simpler := next(filter(still_fails, _simpler(case)), None):
        case = simpler
    return case


def _simpler(case: Case) -> list[Case]:
    """The case with one value that is simpler, the simplest first."""
    cases = []
    for name, values in AXES.items():
        own: Any = getattr(case, name)
        below = values[: values.index(own)] if own in values else [x for x in values if x < own]  # pyright: ignore
        cases += [case.simpler(**{name: value}) for value in below]
    return cases
