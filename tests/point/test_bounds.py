"""Lower bounds by which methods and variants are ruled out: proven, and what they save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Attend, AttendBackward, Block, Plan
from sp_bench.plan.problem import Problem
from sp_bench.point import choose as choosing
from sp_bench.point import variant_bounds
from sp_bench.point.block_bounds import blocks_s
from sp_bench.point.choose import TooSlowError, choose, simulated
from sp_bench.point.lazy_plans import LazyPlans
from sp_bench.point.request import Request
from sp_bench.point.variant_bounds import least_computed_s
from sp_bench.point.variants import Choice, unplanned, variants
from sp_bench.simulate import graph, relaxed_s, simulate
from sp_bench.simulate.operations import work_s
from tests.support.points import point

BY_BLOCKS = sorted(name for name, method in REGISTRY.items() if method.by_blocks)
ASKED = ("gpus=8", "seqlen=16k", "mode=simulate")


@pytest.mark.parametrize("keys", [("kv_heads=8",), ("mask=full",), ("seqlen=1M", "kv_heads=1"), ("heads=64",)], ids=str)
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_every_pair_of_chunks_is_a_block_of_its_own(name: str, keys: tuple[str, ...]) -> None:
    """Ranks compute at least what these blocks and their folds take, in every variant of a method that says so."""
    request = point(f"method={name}", *ASKED, *keys)
    for variant in variants(request, [request.ours]):
        for phase, plan in variant.plans.items():
            blocks = [op for op in plan.ops if isinstance(op, Block)]
            assert blocks and all(isinstance(op, Attend | AttendBackward) for op in blocks)
            bound_s = blocks_s(variant.method, variant.problem, phase, request.cluster)
            run = simulate(plan, variant.problem, request.cluster)
            assert 0 < bound_s <= request.cluster.least_compute_s(run.work_s) * (1 + 1e-9)


TILES = [(f"method={name}",) for name in BY_BLOCKS]
TILES += [("method=mesh", "method.ulysses=auto"), ("method=mesh", "method.placement=[2,2]", "method.tile=[4,4]")]
TILES += [("method=tokenring", "method.nodes=4"), ("method=tokenring", "method.nodes=4", "method.trim=false")]
TILES += [("method=mesh", "method.schedule=searched", "method.slices=auto", "gpus=8")]  # to search takes a while


@pytest.mark.parametrize("method", TILES, ids=" ".join)
def test_ranks_compute_every_pair_of_their_homes(method: tuple[str, ...]) -> None:
    """In each slice of the heads once: the plans' blocks are those of the closed form."""
    request = point("gpus=16", *method, "seqlen=64k", "mode=simulate")
    ranks = np.arange(request.problem.n)
    for variant in variants(request, [request.ours]):
        for phase, plan in variant.plans.items():
            q, kv = (
                home.member(ranks[:, None], np.arange(home.size))
                for home in variant.method.homes(variant.problem, phase)
            )
            pairs = Counter((rank, int(a), int(b)) for rank in ranks.tolist() for a in q[rank] for b in kv[rank])
            blocks = [op for op in plan.ops if isinstance(op, Attend | AttendBackward)]
            computed = Counter(
                (rank, int(op.q.owner(rank)), int(op.kv.owner(rank))) for op in blocks for rank in ranks.tolist()
            )
            assert computed == Counter(dict.fromkeys(pairs, variant.problem.head_slices))


@pytest.mark.parametrize(
    "mask",
    [("mask=causal",), ("mask=full", "kv_heads=8"), ("mask=window", "window=[3000,0]"), ("mask=chunked", "chunk=8k")],
    ids=str,
)
@pytest.mark.parametrize("method", TILES, ids=" ".join)
def test_the_busiest_rank_computes_what_the_closed_form_says(method: tuple[str, ...], mask: tuple[str, ...]) -> None:
    """The bound is never above what the busiest rank computes, and near it where all chunks see all others."""
    request = point("gpus=16", *method, "seqlen=64k", "mode=simulate", *mask)
    cluster, ranks = request.cluster.even, np.arange(request.problem.n)
    for variant in variants(request, [request.ours]):
        for phase, plan in variant.plans.items():
            busiest_s = work_s(plan, variant.problem, cluster, ranks).max()
            bound_s = blocks_s(variant.method, variant.problem, phase, cluster)
            assert bound_s <= busiest_s * (1 + 1e-9)
            assert mask[0] in ("mask=window", "mask=chunked") or bound_s >= 0.8 * busiest_s


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_tile_by_gathers_has_no_such_bound(mask: str) -> None:
    """Its chunks are one block, which takes less time than a block for each pair of them."""
    asked = ("method=mesh", "gpus=64", "seqlen=64k", "mode=simulate", f"mask={mask}")
    request = point(*asked, "method.form=auto")
    by_gathers = [one for one in variants(request, [request.ours]) if "by gathers" in one.variant]
    assert by_gathers
    assert not any(blocks_s(one.method, one.problem, "forward", request.cluster) for one in by_gathers)
    fastest = choose(point(*asked, "method.form=auto", "every_variant=true"))
    assert choose(request).total_s == fastest.total_s


def test_methods_whose_blocks_depend_on_their_plans_have_no_such_bound() -> None:
    assert not {"group_cast", "hybrid_cp"} & {*BY_BLOCKS}
    request = point("method=mesh", "method.fuse=true", *ASKED)
    assert isinstance(request.method, Method)
    (first, *_) = variants(request, [request.method])
    assert blocks_s(first.method, first.problem, "forward", request.cluster) == 0.0
    assert blocks_s(replace(first.method, fuse=False), first.problem, "forward", request.cluster) > 0.0


@pytest.mark.parametrize("keys", [("kv_heads=8",), ("mask=full",), ("stragglers.jitter=0.1",)])
def test_bounds_are_below_the_step(keys: tuple[str, ...]) -> None:
    for name in ("zigzag", "usp", "tasp", "all_gather", "group_cast"):
        request = point(f"method={name}", *ASKED, *keys)
        step_s = choose(request).total_s
        assert least_computed_s(request) <= step_s * (1 + 1e-9)


PACK = ("mask=document", "data=magi_attention", "seqlen=128k")


@pytest.mark.parametrize("keys", [("seqlen=64k",), PACK, (*PACK, "kv_heads=1")], ids=str)
def test_variants_that_send_the_same_have_one_bound_by_what_they_send(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that stands for several of them is true of each, and is found once for each phase."""
    request = point("method=group_cast", "gpus=16", "baseline=null", *keys)
    planned, found = variants(request, [request.ours]), dict[tuple[Method, Problem, str], float]()
    for variant in planned:
        for phase, plan in variant.plans.items():
            seconds = variant_bounds.sent_s(plan, variant.problem, request.cluster)
            sender = variant.method.sends_as, variant.problem, phase
            assert found.setdefault(sender, seconds) == pytest.approx(seconds, rel=1e-12)
    assert len(found) < 2 * len(planned)
    sent = Counter[tuple[Problem, str]]()

    def counted(plan: Plan, problem: Problem, *others: object) -> float:
        sent[problem, plan.phase] += 1
        return sent_s(plan, problem, *others)  # pyright: ignore[reportArgumentType]

    sent_s = variant_bounds.sent_s
    monkeypatch.setattr(variant_bounds, "sent_s", counted)
    choose(request)
    assert 0 < sent.total() <= len(found)


def test_what_blocks_take_is_known_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*_: object) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(Method, "plan", planned)
    assert least_computed_s(point("method=tasp", "gpus=512", "seqlen=1M", "mode=simulate")) > 0


def test_variants_whose_blocks_take_too_long_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of many ranks have small blocks: those of few ranks that share heads are faster in both."""
    request, planned = point("method=usp", "gpus=64", "seqlen=64k", "mode=simulate"), set[int]()
    assert isinstance(request.method, Method)
    degrees = {method.head_parallel(64) for method, _ in unplanned(request, [request.method])}
    made = Method.plan

    def noted(method: Method, problem: Problem, phase: str, costs: CostProfile) -> Plan:
        planned.add(method.head_parallel(64))
        return made(method, problem, phase, costs)

    monkeypatch.setattr(Method, "plan", noted)
    choice = choose(request)
    assert choice.method.head_parallel(64) in planned and planned < degrees
    (bound_s, *_) = (row["bound_ms"] for row in choice.candidates or [] if row["variant"].startswith("ulysses 1 "))
    assert bound_s >= 1e3 * choice.total_s


def test_a_variant_whose_first_phase_shows_that_it_is_slower_is_not_simulated_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ("method=double_ring", "gpus=64", "seqlen=64k", "mask=full")
    request, simulated = point(*asked), list[str]()

    def noted(plan: Plan, *args: object, **keys: object) -> object:
        simulated.append(plan.phase)
        return simulate(plan, *args, **keys)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(choosing, "simulate", noted)
    choice = choose(request)
    assert choice.candidates and simulated.count("forward") > simulated.count("backward") > 0
    (begun,) = (row for row in choice.candidates if row["step_ms"] is None and row["peak_mem_bytes"])
    assert begun["bound_ms"] > 1e3 * choice.nearly_s
    whole = choose(point(*asked, "every_variant=true"))
    same = ("variant", "layout")
    (row,) = (row for row in whole.candidates or [] if all(row[key] == begun[key] for key in same))
    assert row["step_ms"] >= begun["bound_ms"]


def test_a_variant_that_is_slower_than_it_was_ranked_by_is_chosen_only_if_no_other_is_faster() -> None:
    """TokenRing's ranks fall out of step on stripes, where they were ranked by steps in time with each other."""
    request = point("method=tokenring", "gpus=256", "seqlen=512k", "kv_heads=8")
    exact_s = {
        one.problem.layout.name: simulated(one, request.cluster).total_s for one in variants(request, [request.ours])
    }
    choice = choose(request)
    assert choice.candidates and choice.problem.layout.name == min(exact_s, key=exact_s.__getitem__)
    assert {row["layout"]: row["step_ms"] for row in choice.candidates} == pytest.approx(
        {layout: 1e3 * seconds for layout, seconds in exact_s.items()}
    )


def test_nothing_is_simulated_that_takes_longer_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    request = point("method=mesh", *ASKED)
    step_s = choose(request).total_s
    assert choose(request, 1.01 * step_s).total_s == step_s

    def simulated(*_: object, **__: object) -> None:
        raise AssertionError("a variant was simulated")

    monkeypatch.setattr(choosing, "simulate", simulated)
    with pytest.raises(TooSlowError) as raised:
        choose(request, 0.2 * step_s)
    assert 0.2 * step_s < raised.value.least_s <= step_s


@pytest.mark.parametrize("name", ["mesh", "zigzag", "usp", "all_gather", "group_cast"])
def test_a_limit_changes_nothing_of_what_is_below_it(name: str) -> None:
    """A choice that takes longer ends early, with a bound above the limit and below its step."""
    request = point(f"method={name}", *ASKED)
    whole = choose(request)
    for share in (0.5, 0.9, 0.97, 0.999, 1.0, 1.1):
        limited, least_s = chosen_below(request, share * whole.total_s)
        if limited:
            assert (limited.total_s, limited.candidates) == (whole.total_s, whole.candidates)
        else:
            assert share < 1 and share * whole.total_s <= least_s <= whole.total_s


def chosen_below(request: Request, most_s: float) -> tuple[Choice | None, float]:
    """The choice below a limit, and its time; None with a bound where it takes longer."""
    try:
        chosen = choose(request, most_s)
    except TooSlowError as error:
        return None, error.least_s
    return chosen, chosen.total_s


def test_a_limit_hides_no_refusal() -> None:
    with pytest.raises(RequestError):
        choose(point("method=ring", *ASKED, "cluster.device.memory_bytes=1e7"), 1e9)


@pytest.mark.parametrize("keys", [(), ("mask=full",), ("stragglers.jitter=0.1",), ("cluster=cpu_local", "head_dim=64")])
def test_nothing_is_faster_than_with_one_shared_link(keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is that of the same tasks, and where no flows meet it is the time itself."""
    monkeypatch.setattr(graph, "SOME_TASKS", 0)
    reached = 0
    for name in ("zigzag", "startrail", "all_gather"):
        request = point(f"method={name}", *ASKED, *keys)
        assert isinstance(request.method, Method)
        for variant in variants(request, [request.method]):
            for plan in variant.plans.values():
                run = simulate(plan, variant.problem, request.cluster, nearly_alike=True)
                bound_s = relaxed_s(plan, variant.problem, request.cluster)
                assert 0 < bound_s <= run.makespan_s * (1 + 1e-9)
                reached += bound_s >= run.makespan_s * (1 - 1e-9)
    assert reached or keys


def test_flows_that_meet_take_a_link_as_long_as_all_of_them_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks send to all others as soon as they have computed: the bound has both, and what is merged after it."""
    monkeypatch.setattr(graph, "SOME_TASKS", 0)
    request = point("method=all_gather", "method.layout=zigzag", "gpus=64", "seqlen=128k", "mode=simulate")
    for variant in variants(request, [request.ours]):
        plan = variant.plans["backward"]
        step_s = simulate(plan, variant.problem, request.cluster).makespan_s
        assert 0.75 * step_s < relaxed_s(plan, variant.problem, request.cluster) <= step_s * (1 + 1e-9)


def test_a_plan_that_is_bounded_has_its_rows_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound and the simulation have the same rows, which nothing keeps afterwards."""
    monkeypatch.setattr(graph, "SOME_TASKS", 0)
    request = point("method=startrail", "method.team=2", *ASKED)
    assert isinstance(request.method, Method)
    (variant, *_), made = variants(request, [request.method]), list[object]()
    make = graph._Builder.__init__
    monkeypatch.setattr(graph._Builder, "__init__", lambda self, *given: made.append(self) or make(self, *given))
    plan = variant.plans["forward"]
    relaxed_s(plan, variant.problem, request.cluster)
    kept = graph._KEPT[plan]
    run = simulate(plan, variant.problem, request.cluster, nearly_alike=True)
    assert made == [kept] and plan not in graph._KEPT
    monkeypatch.setattr(graph, "KEPT_TASKS", 0)
    relaxed_s(plan, variant.problem, request.cluster)
    assert plan not in graph._KEPT
    alone = simulate(plan, variant.problem, request.cluster, nearly_alike=True)
    assert alone.finish_s.tolist() == run.finish_s.tolist()


def test_of_ranks_that_are_all_unlike_few_variants_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """StarTrail's teams by the bound with one shared link, which is most of each: the choice is the same as of all."""
    request = point("method=startrail", "method.layout=zigzag", "gpus=144", "seqlen=36k", "kv_heads=4")
    monkeypatch.setattr(graph, "SOME_TASKS", 0)
    timed, chosen = list[int](), list[tuple[str, float]]()
    for bound in (variant_bounds.relaxed_s, lambda *_: 0.0):
        monkeypatch.setattr(variant_bounds, "relaxed_s", bound)
        choice = choose(request)
        assert choice.candidates is not None
        timed.append(sum(each["step_ms"] is not None for each in choice.candidates))
        assert all(run.graph.quotient.ranks.size == 144 for run in choice.runs.values())
        chosen.append((choice.variant, choice.total_s))
    assert timed == [1, 5]
    assert chosen[0] == chosen[1]


def test_while_one_of_many_ranks_is_simulated_no_other_plans_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest so far keeps its own. Those of others are made anew if they are looked at again."""
    request = point("method=startrail", "gpus=16", "seqlen=16k", "every_variant=true")
    held, planned, usual = list[int](), list[Choice](), choose(request)

    def noted(plan: Plan, *args: object, **keys: object) -> object:
        held.append(sum(one.plans._made != {} for one in planned if isinstance(one.plans, LazyPlans)))
        return simulate(plan, *args, **keys)  # pyright: ignore[reportArgumentType]

    def known(*asked: object) -> Sequence[Choice]:
        planned[:] = variants(*asked)  # pyright: ignore[reportArgumentType]
        return planned

    monkeypatch.setattr(choosing, "simulate", noted)
    monkeypatch.setattr(choosing, "variants", known)
    most = list[int]()
    for large in (17, 16):
        monkeypatch.setattr(choosing, "LARGE", large)
        choice = choose(request)
        assert (choice.variant, choice.total_s, choice.candidates) == (usual.variant, usual.total_s, usual.candidates)
        most.append(max(held))
        held.clear()
    assert most == [len(planned), 2]
