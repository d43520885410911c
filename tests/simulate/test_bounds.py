"""Lower bounds on simulated phases, under masks by which ranks send and compute unlike things, or nothing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan import Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.point.variant_bounds import sent_s
from sp_bench.simulate import exactly, graph, least_s, relaxed_s, simulate
from tests.labs.shaped.test_bursts import on_hosts
from tests.support.clusters import NETWORKS, on_network
from tests.support.packs import packs

ALL = [(name, layout) for name, method in REGISTRY.items() for layout in method.all_layouts()]
WHERE = [on_network(name) for name in sorted(NETWORKS)] + [on_hosts(1e4), replace(on_hosts(1e4), cores=2)]
ROUNDING = 1 + 1e-9


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """A mask, and how many queries and keys there are."""
    if draw(st.booleans()):
        pack = draw(packs(cached=True))
        return pack, pack.seqlen, pack.seqlen + pack.cached_tokens
    seqlen = draw(st.integers(16, 4096))
    return draw(st.sampled_from([CAUSAL, FULL])), seqlen, seqlen


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Problem]:
    """A phase of any method in any variant."""
    (name, layout), (mask, seqlen, kv_seqlen) = draw(st.sampled_from(ALL)), draw(masks())
    n, method = draw(st.sampled_from([1, 4, 8])), build(name, {"layout": layout})
    try:
        whole = Problem(
            n=n,
            seqlen=seqlen,
            kv_seqlen=kv_seqlen,
            heads=2 * n,
            kv_heads=draw(st.sampled_from([n, 2 * n])),
            head_dim=64,
            mask=mask,
            layout=method.layout_of(mask, n),
        )
        variants = [(variant, variant.assigned(whole)) for variant in method.candidates(whole)]
    except RequestError:
        reject()
    variant, problem = draw(st.sampled_from(variants))
    return variant.plan(problem, draw(st.sampled_from(PHASES)), COMPUTE_BOUND), problem


@given(plans(), st.sampled_from(WHERE))
def test_nothing_is_faster_than_its_bounds(planned: tuple[Plan, Problem], where: Cluster) -> None:
    """By links, latencies and blocks; by tasks that share one link; and by one rank of each kind."""
    plan, problem = planned
    with suppress(RequestError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "SOME_TASKS", 0)
        nearly = simulate(plan, problem, where, nearly_alike=True)
        run = exactly(nearly, problem, where)
        for step_s in (nearly.makespan_s, run.makespan_s):
            assert sent_s(plan, problem, where) <= step_s * ROUNDING
            assert where.least_compute_s(run.work_s) <= run.makespan_s * ROUNDING
            assert relaxed_s(plan, problem, where) <= step_s * ROUNDING
            assert least_s(plan, problem, where) <= step_s * ROUNDING
