"""How often parts of a simulated point are found, and how large they are: what its time follows from."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sp_bench import simulate
from sp_bench.account import memory
from sp_bench.check import check_all
from sp_bench.collection import uncollected
from sp_bench.errors import RequestError
from sp_bench.plan import dataflow, demand, ops, schedule
from sp_bench.plan.documents import Documents, Packed
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Plan
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.point import backing, run_points, variant_bounds
from sp_bench.point import choose as choosing
from sp_bench.point.choose import choose
from sp_bench.simulate import collectives, graph, symmetry
from tests.support.points import point


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], list[Any]]:
    """A function that returns the list to which all results of a function, of a module or a class, will be added."""

    def watch(where: object, name: str) -> list[Any]:
        function, results = getattr(where, name), []

        def noted(*args: Any, **kwargs: Any) -> Any:
            results.append(function(*args, **kwargs))
            return results[-1]

        monkeypatch.setattr(where, name, noted)
        return results

    return watch


def test_a_ring_of_1024_is_simulated_as_the_gpus_of_one_node(watched: Callable[[object, str], list[Any]]) -> None:
    """Both layouts, and the one that is chosen with its fastest and its slowest blocks: 16 thousand tasks each."""
    graphs, timings = watched(simulate, "build_graph"), watched(simulate, "solve")
    choose(point("method=ring", "gpus=1024", "seqlen=4M", "phase=forward"))
    n, hops = 1024, 1023
    assert [graph.quotient.ranks.size for graph in graphs] == [8, 8]
    assert [graph.tasks.delay_s.size for graph in graphs] == [8 * (n + hops)] * 2
    assert [timing.start_s.size for timing in timings] == [8 * (n + hops)] * len(timings)
    assert len(timings) <= 3


def test_each_plan_has_at_most_one_dataflow_one_schedule_and_one_list_of_neutral_elements(
    watched: Callable[[object, str], list[Any]],
) -> None:
    """Whatever the layouts that share it, and however often it is simulated; none if links rule it out."""
    found = watched(choosing, "variants")
    flows, waits = watched(dataflow, "_values"), watched(schedule, "_waits")
    neutral, moves = watched(demand._Found, "untouched"), symmetry._rotations.cache_info().misses
    choose(point("method=mesh", "gpus=32", "seqlen=64k"))
    (variants,) = found
    plans = {plan for choice in variants for plan in choice.plans.values()}
    assert len(plans) < sum(len(choice.plans) for choice in variants), "layouts share plans"
    assert len(flows) == len(waits) < len(plans)
    assert len(neutral) <= len(plans)
    groups = {choice.method for choice in variants}
    assert symmetry._rotations.cache_info().misses - moves <= 2 * len(groups)


def test_messages_of_layouts_phases_and_bounds_go_the_same_paths(watched: Callable[[object, str], list[Any]]) -> None:
    """The links that they cross are found once for each choice of ranks to simulate."""
    symmetry._quotient.cache_clear()  # other tests' paths
    found, graphs = watched(collectives, "path_to"), watched(graph, "_Builder")
    choose(point("method=all_gather", "gpus=32", "seqlen=64k", "method.collectives=messages"))
    paths = {(id(each.quotient), key) for each in graphs for key in each.messages.paths}
    assert len(graphs) > len({id(each.quotient) for each in graphs})
    assert len(found) == len(paths)


def test_a_variant_is_simulated_once_and_the_chosen_one_with_its_own_blocks(
    watched: Callable[[object, str], list[Any]],
) -> None:
    runs, exact = watched(choosing, "simulate"), watched(choosing, "exactly")
    choice = choose(point("method=mesh", "gpus=32", "seqlen=64k"))
    assert choice.candidates is not None
    timed = sum(each["step_ms"] is not None for each in choice.candidates)
    assert len(runs) == len(choice.plans) * timed
    assert timed < len(choice.candidates)
    assert len(exact) <= len(choice.plans)


def test_plans_of_beaten_variants_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last one is simulated, there are its own and the best one's: those on thousands of ranks are large."""
    made, alive = list[weakref.ref[Plan]](), list[int]()
    plan, run = Method.plan, choosing.simulate

    def planned(*args: Any) -> Plan:
        found = plan(*args)
        made.append(weakref.ref(found))
        return found

    def simulated(*args: Any, **kwargs: Any) -> Any:
        alive.append(len({each for ref in made if (each := ref())}))
        return run(*args, **kwargs)

    monkeypatch.setattr(Method, "plan", planned)
    monkeypatch.setattr(choosing, "simulate", simulated)
    choice = choose(point("method=mesh", "gpus=16", "seqlen=64k", "every_variant=true"))
    assert choice.candidates and len(choice.candidates) > 4
    assert alive[-1] <= 2 * len(choice.plans) < max(alive)


def test_the_memory_of_a_plan_is_counted_once(watched: Callable[[object, str], list[Any]], tmp_path: Path) -> None:
    """It says whether a variant fits, and is in the record of the fastest."""
    counted, held = watched(memory, "_most_moving_bytes"), watched(memory, "_moving_bytes")
    (outcome,) = run_points([point("method=mesh", "gpus=16", "seqlen=64k")], folder=tmp_path, reuse=False)
    assert outcome.record.status == "ok"
    assert 0 < len(counted) < len(held)


def test_the_figures_of_a_cluster_are_hashed_once_for_all_its_points(
    watched: Callable[[object, str], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backing, "_HASHES", {})
    read, asked = watched(backing, "_figures"), watched(backing, "figures_of")
    points = [point("method=ring", "gpus=8", f"seqlen={seqlen}") for seqlen in ("64k", "128k", "256k")]
    assert [each.record.status for each in run_points(points, folder=tmp_path, reuse=False)] == ["ok"] * 3
    assert len(asked) >= 3 and len(read) == 1


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_pairs_of_a_long_pack_are_counted_without_each_of_its_tokens(
    watched: Callable[[object, str], list[Any]], layout: str
) -> None:
    """The keys that a query sees are asked for where they turn: at ends of documents and of runs."""
    mask = Documents((1 << 16,) * 8)
    blocks, seen = mask.blocks(mask.layout(layout), 8, mask.seqlen), watched(Packed, "sees")
    assert isinstance(blocks, PackBlocks)
    assert int(blocks.pairs.sum()) == 8 * (1 << 16) * ((1 << 16) + 1) // 2
    assert sum(first.size for first, _ in seen) < mask.seqlen // 100


@pytest.mark.parametrize(
    "overrides",
    [
        ("method=mesh", "gpus=32", "seqlen=256k"),
        ("method=mesh", "gpus=64", "seqlen=64k", "kv_heads=4"),
        ("method=usp", "gpus=32", "seqlen=128k"),
        ("method=group_cast", "gpus=16", "seqlen=64k", "mask=document", "data=magi_attention"),
        ("method=mesh", "gpus=8", "cluster=local", "seqlen=2k", "head_dim=64", "mode=simulate"),
    ],
    ids=" ".join,
)
def test_what_bounds_rule_out_is_slower(overrides: tuple[str, ...]) -> None:
    """Each variant that isn't simulated takes as long as its bound at least, and none is faster than the one chosen."""
    request = point(*overrides)
    choice = choose(request)
    assert choice.candidates is not None
    assert isinstance(request.method, Method)
    best_ms = min(each["step_ms"] for each in choice.candidates if each["step_ms"] is not None)
    planned = choosing.variants(request, [request.method])
    for one, row in zip(planned, choice.candidates, strict=True):
        if "refused" not in row:
            about, as_it_is = (
                1e3 * choosing.simulated(one, request.cluster.even, nearly_alike=nearly).total_s
                for nearly in (True, False)
            )
            assert best_ms * (1 - 1e-9) <= about
            assert row["bound_ms"] <= as_it_is * (1 + 1e-9)
    assert sum(row["step_ms"] is not None for row in choice.candidates) < len(planned)


def test_a_proof_has_words_for_an_operation_only_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(point("method=ring", "gpus=4", "seqlen=8k"))
    for kind in (ops.Pass, ops.Attend, ops.AttendBackward, ops.Fold):
        monkeypatch.setattr(kind, "__str__", lambda op: pytest.fail(f"{type(op)} was put in words"))
    check_all(choice.plans, choice.problem)


def test_python_looks_for_no_garbage_while_variants_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[bool] = Counter()
    variants = choosing.variants
    monkeypatch.setattr(choosing, "variants", lambda *args: (seen.update([gc.isenabled()]), variants(*args))[1])
    choose(point("method=ring", "gpus=4", "seqlen=8k"))
    assert seen == {False: 1}
    assert gc.isenabled()
    with pytest.raises(RequestError), uncollected():
        raise RequestError("a", "b", "c")
    assert gc.isenabled()


@pytest.mark.parametrize("method", ["all_gather", "ulysses_all_gather", "tasp"])
def test_estimates_by_one_rank_of_each_kind_rule_out_only_slower_variants(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on many GPUs, where all ranks would have to be simulated for each."""
    keys = (f"method={method}", "gpus=32", "seqlen=64k")
    as_it_is = choose(point(*keys))
    monkeypatch.setattr(variant_bounds, "MANY_RANKS", 2)
    estimates = list[float]()
    estimated = variant_bounds.least_s

    def noted(*args: Any) -> float:
        estimates.append(estimated(*args))
        return estimates[-1]

    monkeypatch.setattr(variant_bounds, "least_s", noted)
    found = choose(point(*keys))
    assert (found.variant, found.problem, found.total_s) == (as_it_is.variant, as_it_is.problem, as_it_is.total_s)
    assert (method != "all_gather") or any(estimates)
    assert found.candidates is not None and as_it_is.candidates is not None
    for now, before in zip(found.candidates, as_it_is.candidates, strict=True):
        assert before["step_ms"] is None or now["bound_ms"] <= before["step_ms"] * (1 + 1e-9)
        assert now["step_ms"] in (None, before["step_ms"])
