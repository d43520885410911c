"""Run checks on pools of ranks, one pool for each number of ranks, and say what came of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

from sp_bench.conform.case import Case
from sp_bench.conform.catalogue import Check
from sp_bench.conform.subjects import REFUSALS, Subject
from sp_bench.errors import RequestError
from sp_bench.measure import pool as pools
from sp_bench.measure.pool import RankError, RankFailure, RankHang, RankPool

TIMEOUT_S = 60.0
"""How long ranks may be silent before they count as hung."""
PRELOADED = ("sp_bench.conform.checks", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
"""Modules that ranks would each import: every pool of ranks is started again after a failure."""


@dataclass(frozen=True)
class Verdict:
    """The result of one case."""

    status: str
    """holds, fails or refused."""
    why: str = ""
    slow: bool = False
    """Whether ranks died or hung, so that the same again takes long."""


class Worlds:
    """Pools of ranks by their number, started at their first use. Use it as a context manager."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        pools.PRELOADED.extend(name for name in PRELOADED if name not in pools.PRELOADED)
        self._pools: dict[int, RankPool] = {}
        self._judged: dict[tuple[Subject, str, Case], Verdict] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *exception: object) -> None:
        self.renew()

    def judge(self, subject: Subject, check: Check, case: Case) -> Verdict:
        """The verdict on one case; the same question is asked once."""
        key = (subject, check.function, case)
        if key not in self._judged:
            self._judged[key] = self.refusal(subject, case) or self._asked(subject, check, case)
        return self._judged[key]

    def refusal(self, subject: Subject, case: Case) -> Verdict | None:
        """The verdict on a case that the subject refuses; None for others."""
        try:
            subject.refuse(case)
        except RequestError as error:
            return Verdict("refused", str(error))
        return None

    def _asked(self, subject: Subject, check: Check, case: Case) -> Verdict:
        usual = replace(check, function="exact", loud=False)
        if check.loud and (judged := self.judge(subject, usual, case)).status != "holds":
            return judged
        n = check.worlds * case.n
        pool = self._pool(n)
        try:
            answers = pool.run(judge, subject, check.function, case)
        except RankFailure as error:
            hung = isinstance(error, RankHang)
            if isinstance(error, RankError) and not check.loud:
                states = pool.run(last_state)
                refusals = [text for state, text in states if state == "refused"]
                if len(refusals) == n:
                    return Verdict("refused", _first_line(refusals[0]))
            self._drop(n)
            if check.loud and not hung:
                return Verdict("holds")
            if isinstance(error, RankError):
                return Verdict("fails", f"rank {error.rank} raised {_first_line(error.why)}")
            return Verdict("fails", _first_line(str(error)), slow=True)
        if judged := next(filter(None, answers), ""):
            if check.function == "messages":  # some are left on the group
                self._drop(n)
            return Verdict("fails", judged)
        return Verdict("holds")

    def renew(self) -> None:
        """End all ranks: what failed on them may have left messages or state behind. The next case gets new ones."""
        for n in [*self._pools]:
            self._drop(n)

    def _pool(self, n: int) -> RankPool:
        if n not in self._pools or not self._pools[n].alive:
            self._pools[n] = RankPool(n, timeout_s=self.timeout_s)
        return self._pools[n]

    def _drop(self, n: int) -> None:
        self._pools.pop(n).close()


def _first_line(text: str) -> str:
    """The first line: others hold stacks."""
    return text.strip().splitlines()[0]


_last: tuple[str, str] = ("", "")


def judge(subject: Subject, function: str, case: Case) -> str:
    """In a rank: run a check's function; return what is wrong."""
    global _last
    from sp_bench.conform import checks

    if not _last[0]:
        gc.freeze()  # a collection goes through all modules otherwise, whose memory the ranks share until then
    _last = ("begun", "")
    name, _, argument = function.partition(":")
    check: Callable[..., str] = checks.CHECKS[name]
    try:
        wrong = check(*filter(None, [argument]), checks.Stage(subject, case))
    except REFUSALS as error:
        _last = ("refused", f"{type(error).__name__}: {error}".strip(": "))
        raise
    _last = ("done", wrong)
    return wrong


def last_state() -> tuple[str, str]:
    """In a rank: what came of the last case: begun, refused or done, and the text."""
    return _last
