"""Group casts and sub-groups of ranks: who gets which rows, and how even the work is."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.__main__ import main
from sp_bench.check import check_all
from sp_bench.methods import build
from sp_bench.packing import Histogram
from sp_bench.plan import Method
from sp_bench.plan.cast_rows import keys_of
from sp_bench.plan.casts import casts
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.documents import Documents, Packed
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import AllToAll, Gathered, GroupCast, Plan
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.region_table import by_keys, rows_seen, stacks, table_of
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.plan.tensors import KV
from sp_bench.point.choose import choose
from sp_bench.reading import read
from sp_bench.resources import CONF
from tests.support.packs import packs
from tests.support.points import point
from tests.support.seen import seen


def assigned(method: Method, mask: Mask, n: int, seqlen: int) -> Problem:
    layout = method.layout_of(mask, n)
    keys = mask.seqlen + mask.cached_tokens if isinstance(mask, Packed) else seqlen
    return method.assigned(
        Problem(n=n, seqlen=seqlen, kv_seqlen=keys, heads=8, kv_heads=8, head_dim=16, mask=mask, layout=layout)
    )


def positions(problem: Problem, chunk: int) -> np.ndarray:
    chunks = problem.n // problem.layout.head_parallel
    runs = problem.layout.ranges(chunk, chunks, problem.seqlen)
    return np.concatenate([np.zeros(0, int), *map(np.array, runs)]).astype(int)


def key_positions(problem: Problem, chunk: int) -> np.ndarray:
    return np.concatenate([np.zeros(0, int), *map(np.array, problem.keys.chunk_positions(chunk))]).astype(int)


METHODS = [("group_cast", {"ulysses": u, "stages": s}) for u, s in ((1, 1), (1, 3), (2, 2))] + [("hybrid_cp", {})]
RELAYED = [("group_cast", {"ulysses": u, "stages": s, "inner": i}) for u, s, i in ((1, 1, 2), (1, 2, 2), (2, 1, 2))]
methods = st.sampled_from(METHODS)


@given(pack=packs(cached=True), n=st.sampled_from([4, 6, 8]), method=methods)
def test_what_is_sent_is_each_row_that_is_seen_once(pack: Packed, n: int, method: tuple) -> None:
    """The rows, their number and their bytes, against a dense mask. Every plan is proven."""
    built = build(*method)
    problem = assigned(built, pack, n, pack.seqlen)
    visible, degree = seen(pack), problem.layout.head_parallel
    chunks, total = n // degree, 0
    for q in range(chunks):
        for kv in range(chunks):
            rows = np.flatnonzero(visible[np.ix_(positions(problem, q), key_positions(problem, kv))].any(axis=0))
            np.testing.assert_array_equal(casts(problem).rows(q, kv), rows)
            assert casts(problem).counts[q, kv] == rows.size
            total += rows.size * (q != kv)
    plans = {phase: built.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    check_all(plans, problem)
    for phase, plan in plans.items():
        sent = account.volume(plan, problem).sent_bytes
        row = 4 * problem.head_dim * problem.kv_heads // degree
        assert sum(v for (lane, *_), v in sent.items() if lane == "kv") == pytest.approx(total * degree * row / n)
        assert account.volume(plan, problem).payload_bytes == pytest.approx(built.bytes_sent(problem, phase))


@given(pack=packs(cached=True), n=st.sampled_from([4, 8, 12]), method=st.sampled_from(RELAYED))
def test_rows_cross_once_for_neighbours_and_go_on_to_those_that_see_them(pack: Packed, n: int, method: tuple) -> None:
    """The rows and their bytes on each kind of link, against a dense mask, forward and backward. Plans are proven."""
    built, near = build(*method), method[1]["inner"]
    problem = assigned(built, pack, n, pack.seqlen)
    visible, degree = seen(pack), problem.layout.head_parallel
    chunks, across, inside = n // degree, 0, 0
    for kv in range(chunks):
        sees = [visible[np.ix_(positions(problem, q), key_positions(problem, kv))].any(axis=0) for q in range(chunks)]
        nodes = [np.any(sees[first : first + near], axis=0) for first in range(0, chunks, near)]
        across += sum(int(rows.sum()) for node, rows in enumerate(nodes) if node != kv // near)
        inside += sum(int(rows.sum()) for q, rows in enumerate(sees) if q % near != kv % near)
    row = 4 * problem.head_dim * problem.kv_heads // degree
    plans = {phase: built.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    check_all(plans, problem)
    for phase, plan in plans.items():
        sent = account.volume(plan, problem).sent_bytes
        for outer, rows in (("outer ", across), ("", inside)):
            for lane in ("kv", "dkv")[: 1 + (phase == "backward")]:
                of_lane = sum(v for (name, *_), v in sent.items() if name == outer + lane)
                assert n * of_lane == pytest.approx(rows * degree * row)
        assert account.volume(plan, problem).payload_bytes == pytest.approx(built.bytes_sent(problem, phase))
        crossing = account.sent_across_nodes(plan, problem, lambda ranks: ranks // (near * degree)).sum()
        assert crossing == pytest.approx(n * sum(v for (name, *_), v in sent.items() if name.startswith("outer ")))


@given(pack=packs(cached=True), n=st.sampled_from([1, 3, 8]), method=methods)
def test_gathered_blocks_have_every_pair_once(pack: Packed, n: int, method: tuple) -> None:
    n += n % dict(method[1]).get("ulysses", 1)
    problem = assigned(build(*method), pack, n, pack.seqlen)
    for phase in PHASES:
        plan, visible = build(*method).plan(problem, phase, COMPUTE_BOUND), seen(pack)
        for rank in range(n):
            mine, degree = positions(problem, rank // problem.layout.head_parallel), problem.layout.head_parallel
            computed = np.zeros(visible.shape, int)
            for op in (op for op in plan.ops if isinstance(op, Gathered)):
                keys = keys_of(op, problem, rank)
                owners = [int(chunk.owner(rank)) // degree for chunk in op.keys]
                rows = [key_positions(problem, kv)[casts(problem).rows(rank // degree, kv)] for kv in owners]
                if owners == [rank // degree] and keys.regions:  # read as they lie there
                    rows = [key_positions(problem, rank // degree)]
                there = np.concatenate(rows)[keys.order]
                assert (np.diff(there) > 0).all()
                for region in keys.regions:
                    computed[np.ix_(mine[region.q], there[region.kv])] += dense(region)
            np.testing.assert_array_equal(computed[mine], visible[mine])


def dense(region: Region) -> np.ndarray:
    ones = np.ones((len(region.q), len(region.kv)), int)
    kinds = {RegionKind.FULL: ones, RegionKind.CAUSAL: np.tril(ones), RegionKind.UPPER: np.triu(ones)}
    return kinds[region.kind]


@pytest.mark.parametrize(
    ("mask", "layout", "share"),
    [(FULL, "contiguous", 1), (CAUSAL, "contiguous", Fraction(1, 2)), (CAUSAL, "zigzag", Fraction(3, 4))],
)
@pytest.mark.parametrize(("name", "u"), [("group_cast", 1), ("group_cast", 2), ("hybrid_cp", 1)])
def test_share_of_a_whole_sequence(name: str, u: int, mask: Mask, layout: str, share: Fraction) -> None:
    """c of the header's formulas."""
    method = build(name, {"layout": layout, **({"ulysses": u} if name == "group_cast" else {})})
    problem = assigned(method, mask, 8, 64)
    assert method.symbols(problem)["c"] == share


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_ranks_get_a_copy_of_the_problem_and_cast_the_same_rows(mask: Mask) -> None:
    problem = assigned(build("group_cast", {"ulysses": 1}), mask, 4, 64)
    assert np.array_equal(casts(pickle.loads(pickle.dumps(problem))).counts, casts(problem).counts)


def magi_attention(gpus: int, seed: int = 0) -> Documents:
    config = yaml.safe_load((CONF / "data" / "magi_attention.yaml").read_text())
    return Documents(tuple(read(Histogram, config, "data").lengths_in(8192 * gpus, seed)))


def row_bytes_sent(plan: Plan, problem: Problem) -> float:
    sent = account.volume(plan, problem).sent_bytes
    return problem.n * sum(each for (lane, *_), each in sent.items() if lane == "kv")


def row_bytes_needed(problem: Problem) -> float:
    """Bytes of the keys that queries see in other chunks, by the mask, on ranks that split the heads."""
    assert isinstance(problem.blocks, PackBlocks)
    chunks = problem.n // problem.layout.head_parallel
    needed = np.array(problem.blocks.keys_seen).reshape(chunks, chunks)
    np.fill_diagonal(needed, 0)
    return float(needed.sum()) * sum(problem.token_bytes(x, wire=True) for x in KV.fields)


@pytest.mark.parametrize("gpus", [8, 64, 256])
@pytest.mark.parametrize("seed", [0, 1])
def test_work_is_even_and_tokens_are_equal(gpus: int, seed: int) -> None:
    """In MagiAttention's own setting: the busiest rank has at most 1.05 of the mean, and at most 1.05 times the rows
    that must be sent are.
    """
    pack = magi_attention(gpus, seed)
    for u in (1, 8):
        problem = assigned(build("group_cast", {"ulysses": u, "stages": 1}), pack, gpus, pack.seqlen)
        plan = build("group_cast", {"ulysses": u, "stages": 1}).plan(problem, "forward", COMPUTE_BOUND)
        assert account.work_imbalance([(1, plan, problem)]) <= 1.05
        assert row_bytes_sent(plan, problem) <= 1.05 * row_bytes_needed(problem)
        assert np.ptp(problem.layout.chunk_tokens(np.arange(gpus // u), gpus // u, pack.seqlen)) <= 16


def test_chunks_are_as_long_as_is_asked_for() -> None:
    pack = magi_attention(16)
    problem = assigned(build("group_cast", {"ulysses": 1, "stages": 1, "chunk": 1024}), pack, 16, pack.seqlen)
    starts = {run.start % 1024 for chunk in range(16) for run in problem.layout.ranges(chunk, 16, pack.seqlen)}
    assert starts == {0}


def test_sub_groups_are_powers_of_two_of_neighbours() -> None:
    pack = Documents((40, 30, 9, 8, 8, 3, 2, 1, 1, 1))
    problem = assigned(build("hybrid_cp", {"rank_tokens": 10}), pack, 8, pack.seqlen)
    edges, found = np.cumsum((0, *pack.lengths)), []
    for start, stop in zip(edges, edges[1:], strict=False):
        ranks = [r for r in range(8) if ((positions(problem, r) >= start) & (positions(problem, r) < stop)).any()]
        tokens = [((positions(problem, r) >= start) & (positions(problem, r) < stop)).sum() for r in ranks]
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks))) and ranks[0] % len(ranks) == 0
        assert max(tokens) <= 10 + 1
        found.append(len(ranks))
    assert found == [4, 4, 1, 1, 1, 1, 1, 1, 1, 1]


@given(pack=packs(), n=st.sampled_from([2, 5, 8]))
def test_sub_groups_have_all_tokens_once(pack: Packed, n: int) -> None:
    problem = assigned(build("hybrid_cp", {}), pack, n, pack.seqlen)
    everyone = np.concatenate([positions(problem, rank) for rank in range(n)])
    np.testing.assert_array_equal(np.sort(everyone), np.arange(pack.seqlen))


def test_stages_divide_the_other_groups() -> None:
    problem = assigned(build("group_cast", {"ulysses": 2, "stages": 3}), CAUSAL, 16, 64)
    plan = build("group_cast", {"ulysses": 2, "stages": 3}).plan(problem, "forward", COMPUTE_BOUND)
    assert [op.members for op in plan.ops if isinstance(op, GroupCast)] == [(1, 2), (3, 4), (5, 6, 7)]


@pytest.mark.parametrize(("u", "slices", "parts"), [(2, 2, 1), (2, 4, 1), (8, 2, 2), (4, 2, 1), (16, 2, 2)])
def test_slices_send_as_much_and_hold_less_that_is_packed(u: int, slices: int, parts: int) -> None:
    """The closed form; a stage's rows of one key head are cast once for all slices of its query heads."""
    pack, volumes = magi_attention(16), []
    for count in (1, slices):
        method = build("group_cast", {"ulysses": u, "stages": 1, "slices": count, "qo_comm": False})
        layout = method.layout_of(pack, 16)
        asked = Problem(n=16, seqlen=pack.seqlen, heads=64, kv_heads=8, head_dim=128, mask=pack, layout=layout)
        problem = method.assigned(asked)
        plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
        check_all(plans, problem)
        for phase, plan in plans.items():
            volumes.append(account.volume(plan, problem).total_bytes)
            assert volumes[-1] == pytest.approx(method.bytes_sent(problem, phase))
    assert problem.query_parts == parts
    assert volumes[:2] == volumes[2:]
    casts_of = [op for op in plans["forward"].ops if isinstance(op, GroupCast)]
    assert len(casts_of) == slices // parts * (u < 16)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("slices", "kv_heads"), [(2, 8), (4, 8), (4, 16)])
def test_backward_the_first_slice_meets_own_keys_first_and_the_others_last(
    stages: int, slices: int, kv_heads: int
) -> None:
    """With 8 key heads on 8 ranks all slices have the same keys; with 16, two and two have."""
    method = build("group_cast", {"ulysses": 8, "stages": stages, "slices": slices, "qo_comm": False})
    pack = magi_attention(64)
    layout = method.layout_of(pack, 64)
    asked = Problem(n=64, seqlen=pack.seqlen, heads=64, kv_heads=kv_heads, head_dim=128, mask=pack, layout=layout)
    problem = method.assigned(asked)
    plan, parts = method.plan(problem, "backward", COMPUTE_BOUND), problem.query_parts
    blocks = [op for op in plan.ops if isinstance(op, Gathered)]
    order = [(*(q.heads for q in op.queries), "own" if not op.keys[0].index else "rows") for op in blocks]
    same = [range(keys * parts, (keys + 1) * parts) for keys in range(slices // parts)]
    expected = [(0, "own")]
    for alike in same:
        expected += [(*alike, "rows")] * stages + [(i, "own") for i in alike if i]
    assert order == expected
    first_lanes = [op.lane for op in plan.ops[: plan.ops.index(blocks[0])] if isinstance(op, AllToAll)]
    assert first_lanes == ["all-to-all"]  # its own queries alone
    check_all({phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}, problem)


@pytest.mark.parametrize("kv_heads", [8, 16])
def test_keys_of_all_slices_have_a_lane_of_their_own(kv_heads: int) -> None:
    method = build("group_cast", {"ulysses": 8, "stages": 1, "slices": 2, "qo_comm": False})
    layout = method.layout_of(CAUSAL, 16)
    problem = method.assigned(
        Problem(n=16, seqlen=1024, heads=64, kv_heads=kv_heads, head_dim=16, mask=CAUSAL, layout=layout)
    )
    for phase in PHASES:
        exchanges = [op for op in method.plan(problem, phase, COMPUTE_BOUND).ops if isinstance(op, AllToAll)]
        lanes = {op.lane for op in exchanges if op.send.tensor.of_keys}
        assert lanes == {"all-to-all of keys" if kv_heads == 8 else "all-to-all"}
        assert {op.lane for op in exchanges if not op.send.tensor.of_keys} == {"all-to-all"}


@pytest.mark.parametrize(("node", "inner"), [(2, {1, 2}), (4, {1, 4}), (8, {1}), (3, {1})])
def test_levels_are_the_nodes_of_the_cluster(node: int, inner: set[int]) -> None:
    """8 GPUs in nodes of as many: one node has no levels, nor have nodes that don't divide the ranks."""
    pack = Documents((96, 5, 40, 3, 112))
    method = build("group_cast", {"ulysses": 1, "stages": 1})
    problem = Problem(n=8, seqlen=256, heads=8, kv_heads=8, head_dim=16, mask=pack, layout=method.layout_of(pack, 8))
    assert {each.inner for each in method.on_nodes(problem, node)} == inner  # pyright: ignore[reportAttributeAccessIssue]
    shape = ("gpus=8", "seqlen=8k", "heads=8", "kv_heads=8", "mask=document", "data=short", "mode=simulate")
    network = ("cluster=h100_ndr400", f"cluster.gpus_per_node={node}", "method.ulysses=1")
    if 8 % node == 0:
        tried = choose(point("method=group_cast", *shape, *network)).candidates or []
        found = {row["variant"].partition(" by ")[2] for row in tried}
        assert found == {f"{size}s" * (size > 1) for size in inner}


def test_of_variants_that_take_as_long_the_simpler_one_is_chosen() -> None:
    """A document of each GPU: nothing is sent, however many stages or levels there are."""
    pack = ("mask=document", "data=lengths", f"data.lengths={[1024] * 16}".replace(" ", ""), "seqlen=16k")
    keys = ("method.ulysses=1", "method.layout=contiguous", "heads=8", "cluster=h100_ndr400", "mode=simulate")
    choice = choose(point("method=group_cast", "gpus=16", *pack, *keys))
    assert {row["variant"] for row in choice.candidates or []} >= {f"ulysses 1 x cast 16 in {s}" for s in (1, 2, 4)}
    assert choice.variant == "ulysses 1 x cast 16 in 1"


STAIRS = [Region(RegionKind.FULL, range(4 * i, 4 * i + 4), range(10 * (i + 1))) for i in range(3)]


def test_stairs_are_cut_along_their_keys() -> None:
    assert by_keys(STAIRS) == [Region(RegionKind.FULL, range(4 * i, 12), range(10 * i, 10 * i + 10)) for i in range(3)]
    table = table_of(STAIRS)
    assert len(stacks(table, table.kind)) == 3
    assert len(stacks(table, table.kind, shared=True)) == 1
    assert rows_seen(STAIRS) == (12, 30)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("method.stages=9", "method.stages=7 or less, or auto, would work"),
        ("method.stages=0", "an integer of at least 1"),
        ("method.inner=3", "method.inner=3: must divide the 8 groups of ranks with the same heads; one of 1, 2, 4, 8"),
        ("method.slices=3", "must divide the heads of a rank; one of 1, 2, 4, 8, or auto, would work"),
        ("method.slices=2 method.inner=2", "come straight from their owner; method.inner=1 would work"),
        ("method.slices=2 method.qo_comm=true", "come straight from their owner; method.qo_comm=false would work"),
        ("method.qo_comm=true method.inner=2", "and not by way of neighbours; method.inner=1 would work"),
        ("method.qo_comm=maybe", "must be auto, true or false"),
        ("method.qo_comm=true head_dim=48 v_head_dim=32 latent_dim=64 rope_dim=16", "not as latents"),
        ("method.chunk=half", "must be auto or an integer"),
        ("method.chunk=64", "chunks of a pack are assigned by the layouts balanced and blocks alone"),
        ("method.ulysses=3", "one of 1, 2, 4, 8 would work"),
        ("method.layout=hybird", "hybrid"),
        ("method.layout=balanced", "or mask=document, would work"),
    ],
)
def test_bad_options_of_group_cast(capsys: pytest.CaptureFixture[str], option: str, said: str) -> None:
    kv_heads = "kv_heads=1" if "latent_dim" in option else "kv_heads=8"
    shape = ["gpus=8", "seqlen=4k", "heads=8", kv_heads, "mode=simulate", "logger=none"]
    assert main(["method=group_cast", "cluster=h100_ndr400", *shape, *option.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["auto", "zigzag"])
def test_sub_groups_are_refused_where_there_are_none(capsys: pytest.CaptureFixture[str], layout: str) -> None:
    shape = ["gpus=8", "seqlen=4k", "heads=8", "mode=simulate", "logger=none", f"method.layout={layout}"]
    pack = ["mask=document", "data=short"] if layout == "zigzag" else []
    assert main(["method=hybrid_cp", "cluster=h100_ndr400", *shape, *pack, "method.rank_tokens=512"]) == 2
    assert "method.rank_tokens=auto would work" in capsys.readouterr().err
