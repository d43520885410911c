"""Plans of packed documents: proven for every method and layout, and what is not needed is all that isn't sent."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sp_bench import account, check
from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.demand import Wanted, demand
from sp_bench.plan.documents import Documents, Packed
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.method import PHASES, Method
from sp_bench.plan.ops import Fold, Pass, Plan, PlanError
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.row_runs import Rows
from tests.support.packs import packs

SIZES = (1, 2, 3, 4, 6, 8, 9)


def planned(name: str, layout: str, mask: Packed, n: int) -> list[tuple[Method, Problem, dict[str, Plan]]]:
    """Every variant of a method, its problem and its plans; none where it refuses."""
    method = build(name, {"layout": layout})
    with suppress(RequestError):
        whole = Problem(
            n=n,
            seqlen=mask.seqlen,
            kv_seqlen=mask.seqlen + mask.cached_tokens,
            heads=2 * n,
            kv_heads=n,
            head_dim=8,
            mask=mask,
            layout=method.layout_of(mask, n),
        )
        variants = [(variant, variant.assigned(whole)) for variant in method.candidates(whole)]
        return [
            (variant, problem, {phase: variant.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES})
            for variant, problem in variants
        ]
    return []


ALL = [(name, layout) for name, method in REGISTRY.items() for layout in method.all_layouts()]
layouts = st.sampled_from(ALL)


@given(layouts, packs(cached=True), st.sampled_from(SIZES))
def test_every_method_and_layout_is_proven(layout: tuple[str, str], mask: Packed, n: int) -> None:
    """And sends at least what the lower bound says, at most what it would for a whole sequence."""
    for variant, problem, plans in planned(*layout, mask, n):
        check_all(plans, problem)
        for phase, plan in plans.items():
            sent = account.volume(plan, problem)
            bound = account.lower_bound_bytes(problem, phase, kept=bool(plan.kept))
            assert bound <= sent.payload_bytes * (1 + 1e-9)
            if problem.layout.head_parallel == 1 and variant.name != "tokenring":  # which may trim a whole sequence
                assert sent.total_bytes <= n * variant.bytes_sent(problem, phase) * (1 + 1e-9)


@given(layouts, packs(cached=True), st.sampled_from(SIZES[1:]), st.data())
def test_what_is_needed_must_be_sent(layout: tuple[str, str], mask: Packed, n: int, data: st.DataObject) -> None:
    """Any transfer left out, of one rank, is missed."""
    found = planned(*layout, mask, n)
    assume(found)
    _, problem, plans = data.draw(st.sampled_from(found))
    plan = plans[data.draw(st.sampled_from(PHASES))]
    wanted = demand(plan, problem)
    passes = [index for index, op in plan if isinstance(op, Pass) and wanted[index].there.any()]
    assume(passes)
    index = data.draw(st.sampled_from(passes))
    rank = data.draw(st.sampled_from(np.flatnonzero(wanted[index].there).tolist()))
    less = wanted[index].there.copy()
    less[rank] = False
    spoiled = {**wanted, index: Wanted(less, wanted[index].rows)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "demand", lambda *_: spoiled)
        with pytest.raises(PlanError, match="was not sent there|not sent|lacks its block"):
            check.check(plan, problem)


@given(layouts, packs(cached=True), st.sampled_from(SIZES[1:]), st.booleans(), st.data())
def test_every_row_that_is_needed_must_be_sent(
    layout: tuple[str, str], mask: Packed, n: int, first: bool, data: st.DataObject
) -> None:
    """A run that is a row too short, at either end, is missed."""
    found = planned(*layout, mask, n)
    assume(found)
    _, problem, plans = data.draw(st.sampled_from(found))
    plan = plans[data.draw(st.sampled_from(PHASES))]
    in_runs = passes_in_runs(plan, problem)
    assume(in_runs)
    index = data.draw(st.sampled_from(in_runs))
    rank = data.draw(st.sampled_from(np.flatnonzero(demand(plan, problem)[index].there).tolist()))
    assert_missed(plan, problem, index, rank, first)


@pytest.mark.parametrize("name", sorted({name for name, _ in ALL} - {"reference"}))
def test_every_run_is_as_short_as_it_can_be(name: str) -> None:
    """In each transfer of some variants of each method, at both ends, on the first rank that receives anything."""
    for layout in [each for method, each in ALL if method == name and each in ("contiguous", "zigzag")]:
        for _, problem, plans in planned(name, layout, Documents((19, 3, 11, 7)), 4)[:4]:
            check_all(plans, problem)
            for plan in plans.values():
                for index in passes_in_runs(plan, problem):
                    rank = int(demand(plan, problem)[index].there.argmax())
                    for first in (False, True):
                        assert_missed(plan, problem, index, rank, first)


def passes_in_runs(plan: Plan, problem: Problem) -> list[int]:
    """The passes that carry runs of rows to some rank."""
    wanted = demand(plan, problem)
    return [index for index, op in plan if isinstance(op, Pass) and wanted[index].rows and wanted[index].there.any()]


def assert_missed(plan: Plan, problem: Problem, index: int, rank: int, first: bool) -> None:
    """The first row, or the last, of the run that a rank receives in a Pass."""
    wanted = demand(plan, problem)
    there, rows = wanted[index]
    assert rows is not None
    ends = [end.copy() for end in rows]
    ends[not first][rank] += 1 if first else -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "demand", lambda *_: {**wanted, index: Wanted(there, Rows(*ends))})
        with pytest.raises(PlanError, match=r"lacks rows that (.* sees|see |are to be sent)|stay behind"):
            check.check(plan, problem)


@given(packs(cached=True), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from(sorted({each for _, each in ALL})))
def test_rows_that_blocks_read_are_those_of_their_regions(mask: Packed, n: int, layout: str) -> None:
    """From the first to the last; of layouts whose chunks are no runs of neighbours, all rows of a chunk."""
    with suppress(RequestError):
        of_layout = build("ring", {"layout": layout}).layout_of(mask, n)
        blocks = mask.blocks(of_layout, n, mask.seqlen, mask.seqlen + mask.cached_tokens)
        assert isinstance(blocks, PackBlocks)
        for kind in range(blocks.classes):
            regions = [region.plain for region in blocks.regions_of(kind)]
            of_keys = blocks.keys.chunk_tokens(kind % n), [region.kv for region in regions]
            of_queries = blocks.queries.chunk_tokens(kind // n), [region.q for region in regions]
            for rows, (tokens, seen) in ((blocks.key_rows, of_keys), (blocks.query_rows, of_queries)):
                least = (min(run.start for run in seen), max(run.stop for run in seen)) if seen else (0, 0)
                whole = seen and blocks._neighbours is None
                assert tuple(rows[:, kind].tolist()) == ((0, int(tokens)) if whole else least)


def test_messages_name_what_is_missing() -> None:
    (_, problem, plans), *_ = planned("ring", "contiguous", Documents((8, 8)), 4)
    wanted = demand(plans["forward"], problem)
    sent = [index for index, op in plans["forward"] if isinstance(op, Pass) and wanted[index].there.any()]
    assert sent == [0]
    assert wanted[0].there.tolist() == [False, True, False, True]  # the second rank of each document sees the first one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "demand", lambda *_: {**wanted, 0: Wanted(np.zeros(4, bool))})
        with pytest.raises(PlanError, match=r"operation \d+, Attend q#0 x kv#1 into o#0: on rank 1, kv#1 is needed"):
            check.check(plans["forward"], problem)


@pytest.mark.parametrize("phase", PHASES)
def test_what_every_stage_brought_is_folded(phase: str) -> None:
    """Gradients of all stages of a group cast, not of the first alone."""
    found = planned("group_cast", "contiguous", Documents((16,)), 4)
    (plan, problem), *_ = ((plans[phase], p) for method, p, plans in found if method.variant(4).endswith("cast 4 in 2"))
    folds = [demand(plan, problem)[index].there for index, op in plan if isinstance(op, Fold)]
    assert len(folds) == (2 if phase == "backward" else 0) and all(ranks.all() for ranks in folds)


def test_whole_masks_send_everything() -> None:
    """As the papers' formulas have it, also to ranks that see nothing of it."""
    method = build("ring", {"layout": "contiguous"})
    problem = Problem(n=4, seqlen=16, heads=2, kv_heads=2, head_dim=8, mask=CAUSAL, layout=method.layout_of(CAUSAL, 4))
    assert demand(method.plan(problem, "forward", COMPUTE_BOUND), problem) == {}


short = st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) <= 14)


@given(
    short,
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.booleans(),
    st.sampled_from(["contiguous", "striped", "zigzag_documents", "blocks"]),
    st.integers(1, 6),
)
def test_the_least_that_is_moved(lengths: list[int], cached: list[int], causal: bool, layout: str, n: int) -> None:
    """Against a vertex cover of least weight, by trying every set of queries that leave their chunk."""
    mask = Documents(tuple(lengths), causal).behind([[tokens] for tokens in cached[: len(lengths)]])
    blocks = mask.blocks(mask.layout(layout), n, mask.seqlen)
    first, stop = mask.sees(mask.query_positions)
    total = 0.0
    for chunk in range(n):
        queries = np.flatnonzero(blocks.owner == chunk)
        seen = [{key for key in range(first[q], stop[q]) if blocks.key_owner[key] != chunk} for q in queries]
        costs = []
        for leaving in range(2 ** len(queries)):
            staying = [keys for i, keys in enumerate(seen) if not leaving >> i & 1]
            costs.append(3.0 * leaving.bit_count() + 2.0 * len(set().union(*staying)))
        total += min(costs)
    assert blocks.least_moved(3.0, 2.0) == pytest.approx(total)
