"""Examine this machine or allocation: open its ranks, collect facts, and judge them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sp_bench.calibrating.setting import pairs_of
from sp_bench.diagnosing.findings import Finding, finding
from sp_bench.diagnosing.groups import judge_groups
from sp_bench.diagnosing.hosts import judge_allocation, judge_hosts
from sp_bench.diagnosing.judged import SIMULATED, judge_kernels, judge_links, judge_uses
from sp_bench.diagnosing.nccl_log import judge_nccl
from sp_bench.diagnosing.nvidia_smi import judge_gpus
from sp_bench.diagnosing.seen import HostFacts, RankFacts
from sp_bench.diagnosing.settings import judge_settings
from sp_bench.diagnosing.software import judge_software, measures
from sp_bench.launch import Launch
from sp_bench.machine import Devices, gpus_here
from sp_bench.measure.pool import RankFailure, RankPool
from sp_bench.measure.ranks import open_ranks
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.documents import Documents
from sp_bench.plan.mask import CAUSAL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.workload import Attention, Spec

MESSAGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
LOG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
PATIENCE_S = 120.0
"""Seconds ranks may be silent: the first calls of some kernels compile them."""
JOBS = "sp_bench.diagnosing.rank_jobs"
DOCUMENTS = (40, 3, 85)
"""The lengths of the documents on each rank that the gate computes."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The findings, and the facts they follow from."""

    findings: list[Finding]
    facts: Mapping[str, Any] = field(default_factory=dict)


def examine(ranks: int, launch: Launch | None, device: str, dtypes: Sequence[str], head_dim: int) -> Examination:
    """Examine the hosts of `launch`, or this one with so many ranks. `device` is cpu or cuda."""
    load, gpus = os.getloadavg()[0], gpus_here()
    findings = judge_software(gpus)
    if not measures(findings):
        return Examination(findings=[*findings, SIMULATED])
    with _Ward(ranks, launch, device) as ward:
        try:
            seen = ward.run("look")
        except RankFailure as failure:
            fix = "see what the rank says; python -m sp_bench gpus=2 cluster=local on one host shows whether any start"
            return Examination(findings=[*findings, finding("allocation", "ranks", str(failure), "fail", fix)])
        facts = [with_callers_log(rank, os.environ) for rank, _ in seen]
        hosts = [host for _, host in seen if host]
        left = _seconds_left(os.environ)
        findings += judge_allocation(launch, facts, os.environ, left) + judge_hosts(hosts, facts, load)
        findings += judge_settings(facts)
        known: dict[str, Any] = {"hosts": [asdict(host) for host in hosts], "ranks": [asdict(rank) for rank in facts]}
        if any("error" in rank.device for rank in facts):
            return Examination(findings=findings, facts=known)
        if ranks > 1 and device == "cuda":
            findings += judge_groups(ranks, ward.run)
        for dtype in dtypes:
            findings += _kernels(ward, dtype, head_dim)
        if ranks > 1:
            findings += ward.or_finding("links", lambda: _links(ward, facts, known))
        findings += ward.or_finding("GPUs", lambda: _gpus(ward, hosts, known))
    return Examination(findings=[*findings, *judge_uses(facts, launched=launch is not None)], facts=known)


class _Ward(AbstractContextManager):
    """The ranks under examination. After a failure the next job gets new ones."""

    def __init__(self, n: int, launch: Launch | None, device: str) -> None:
        self.n, self.launch, self.device = n, launch, device
        self._pool: RankPool | None = None
        # In the working folder, which the hosts of a launch share.
        self.logs = tempfile.mkdtemp(prefix=".sp_bench-doctor-", dir=Path.cwd()) if device == "cuda" else ""

    def run(self, job: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks to a job of rank_jobs. Raises RankFailure."""
        if self._pool is None:
            self._pool = open_ranks(self.n, PATIENCE_S, self.launch, devices=self._devices())
        try:
            return self._pool.run(f"{JOBS}:{job}", *arguments)
        except RankFailure:
            self._close()
            raise

    def or_finding(self, section: str, judge: Callable[[], list[Finding]]) -> list[Finding]:
        """The findings of a job or, if a rank fails in it, that."""
        try:
            return judge()
        except RankFailure as failure:
            fix = "NCCL_DEBUG=INFO shows what NCCL was doing" if self.device == "cuda" else "see the rank's message"
            return [finding(section, "job", str(failure), "fail", fix)]

    def __exit__(self, *exception: object) -> None:
        self._close()
        if self.logs:
            shutil.rmtree(self.logs, ignore_errors=True)

    def _devices(self) -> Devices:
        if self.device == "cpu":
            return Devices()
        log = {"DEBUG": "INFO", "DEBUG_SUBSYS": "INIT,NET,P2P,SHM", "DEBUG_FILE": f"{self.logs}/%h.%p"}
        return Devices(kind="cuda", nccl=log)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _kernels(ward: _Ward, dtype: str, head_dim: int) -> list[Finding]:
    """Each kernel that all ranks can use goes through the gate in plans of all ranks."""
    try:
        rows = ward.run("kernels_here", dtype, head_dim)
    except RankFailure as failure:
        return [finding("kernels", dtype, str(failure), "fail", "see the rank's message")]
    refused = {row.name for of_rank in rows for row in of_rank if row.refusal}
    wrong = {}
    for row in rows[0]:
        if row.name not in refused:
            try:
                asked = checked(ward.n, row.name, dtype, head_dim)
                wrong[row.name] = next((why for one in asked for why in ward.run("gate", one) if why), "")
            except RankFailure as failure:
                wrong[row.name] = str(failure)
    return judge_kernels(rows, wrong, dtype, head_dim)


def checked(n: int, kernel: str, dtype: str, head_dim: int) -> tuple[Spec, Spec]:
    """Blocks for the gate: with their diagonal and without it, and of several documents."""
    documents = Documents(DOCUMENTS * n)
    return spec(n, kernel, dtype, head_dim), spec(n, kernel, dtype, head_dim, documents, "contiguous")


def spec(n: int, kernel: str, dtype: str, head_dim: int, mask: Mask = CAUSAL, layout: str = "striped") -> Spec:
    """A small attention on n ranks, forward and backward, two query heads to a key head; its transfers overlap."""
    problem = Problem(
        n=n, seqlen=sum(DOCUMENTS) * n, heads=4, kv_heads=2, head_dim=head_dim, mask=mask, dtype=dtype,
        layout=mask.layout(layout, n),
    )  # fmt: skip
    method = build("ring", {"layout": layout}).candidates(problem)[0]
    problem = method.assigned(problem)
    plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    return Spec(workload=Attention(phases=PHASES), problem=problem, plans=plans, kernel=kernel)


def _links(ward: _Ward, facts: Sequence[RankFacts], known: dict[str, Any]) -> list[Finding]:
    plans = spec(ward.n, "auto", "float32", 16).plans
    by_rank = ward.run("pair_rates", plans, pairs_of(ward.n), MESSAGE_BYTES[ward.device])
    rates = [pair for of_rank in by_rank for pair in of_rank]
    known["links"] = [asdict(pair) for pair in rates]
    findings = judge_links(rates, facts)
    if ward.device == "cuda":
        logs = ward.run("nccl_log")
        findings += judge_nccl(logs, [rank.host for rank in facts])
    return findings


def with_callers_log(rank: RankFacts, environment: Mapping[str, str]) -> RankFacts:
    """The facts with the caller's own settings of NCCL's log in place of those that the ward made."""
    kept = {name: value for name, value in rank.environment.items() if name not in LOG}
    return replace(rank, environment=kept | {name: environment[name] for name in LOG if name in environment})


def _gpus(ward: _Ward, hosts: Sequence[HostFacts], known: dict[str, Any]) -> list[Finding]:
    if not any(host.gpus for host in hosts):
        return []
    busy = {}
    if ward.device == "cuda":
        busy = known["gpus_under_load"] = dict(filter(None, ward.run("under_load")))
    return [row for host in hosts for row in judge_gpus(host.host, host.gpus, busy.get(host.host, ()))]


def _seconds_left(environment: Mapping[str, str]) -> float | None:
    """Seconds until SLURM ends this job; None if not in one, or not known."""
    ends = environment.get("SLURM_JOB_END_TIME", "")
    return float(ends) - time.time() if ends.isdigit() else None
