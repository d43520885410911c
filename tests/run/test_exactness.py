"""SequenceParallelAttention on real ranks against torch's attention in fp64 on the whole sequence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from sp_bench import SequenceParallelAttention
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from sp_bench.plan import CostProfile
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Transfer
from sp_bench.plan.tensors import DKV, DQ, O
from sp_bench.plan.transfers import peers
from tests.run import jobs
from tests.run.matrix import (
    DTYPES,
    LARGE,
    assert_exact,
    axes,
    cover_of_the_matrix,
    everything,
    key_heads,
    matrix,
    measure,
    others,
    part_of_the_matrix,
    variants,
)
from tests.support.attention_cases import (
    HEAD_DIM,
    HEADS,
    Case,
    inputs,
    of_each_method,
    of_one_batch_entry,
    reference,
    wrong_in,
)
from tests.support.bounds import FLOORS
from tests.support.marks import exhaustive, exhaustive_from
from tests.support.problems import all_methods, splittable_problem
from tests.support.ranks import SIZES, WORLD, Ranks

UNEVEN = CostProfile(
    forward_block_s=1.0,
    backward_block_s=1.0,
    node_size=3,
    intra_latency_s=0.5,
    intra_bytes_per_s=4e3,
    inter_latency_s=2.5,
    inter_bytes_per_s=2e3,
)
"""Costs of which no two are alike, for schedules that are less regular."""


@pytest.mark.parametrize("n", SIZES[:-1])
def test_the_matrix_holds_every_variant(n: int) -> None:
    """On every layout that it has, with each mask; from n = 6 with one of them.

    But for all_gather's strides and mesh's slices, which depend on the key heads.
    """
    by_mask = {causal: {case.built for case in matrix(n, causal=causal)} for causal in (True, False)}
    for layout, causal in itertools.product(LAYOUTS, (True, False)):
        methods = all_methods(splittable_problem(n, layout, causal=causal))
        wanted = {replace(m, layout=layout) for m in methods if layout in m.layouts and m.name != "all_gather"}
        wanted = {method for method in wanted if getattr(method, "slices", 1) == 1}
        wanted = {method for method in wanted if not getattr(method, "row_sums", False)}
        wanted = {method for method in wanted if getattr(method, "collectives", "") != "messages"}
        if layout != "zigzag" or not causal or n >= 6:
            wanted = {method for method in wanted if getattr(method, "trim", True)}
        assert wanted <= (by_mask[causal] if n < 6 else by_mask[True] | by_mask[False])
    for found in by_mask.values():
        assert {method.name for method in found} == {*REGISTRY} - ({"reference"} if n > 1 else set())


def test_the_matrix_holds_every_combination() -> None:
    """MHA and GQA in every dtype, for every method, layout and mask; of more than two ranks each of these at least."""
    methods = [(m.name, layout) for m in REGISTRY.values() if m.name != "reference" for layout in m.layouts]
    axes = ((True, False), (True, False), DTYPES)
    combinations = {(*method, *rest) for method, *rest in itertools.product(methods, *axes)}
    assert _combinations([2]) == combinations
    found, wanted = (
        {(m, *axis) for m, *rest in each for axis in _parts(rest)} for each in (_combinations(LARGE), combinations)
    )
    assert found == wanted


def _combinations(sizes: Iterable[int]) -> set[tuple]:
    cases = (case for n in sizes for causal in (True, False) for case in matrix(n, causal=causal))
    return {(case.method, case.layout, case.causal, case.kv_heads < case.heads, case.dtype) for case in cases}


def _parts(combination: Sequence) -> list[tuple]:
    layout, causal, grouped, dtype = combination
    return [(layout, causal), (grouped, causal), (dtype,)]


def test_the_cover_holds_each_method_with_all_axes() -> None:
    """Also where it is not exhaustive: layouts with masks, MHA and GQA with dtypes."""
    covered = {(case.method, *axis) for case in cover_of_the_matrix(2) for axis in axes(case)}
    methods = [m for m in REGISTRY.values() if m.name != "reference"]
    wanted = {(m.name, layout, causal) for m in methods for layout in m.layouts for causal in (True, False)}
    wanted |= {(m.name, grouped, dtype) for m in methods for grouped in (True, False) for dtype in DTYPES}
    assert covered == wanted


@pytest.mark.parametrize("n", LARGE)
def test_a_part_of_the_matrix_holds_every_variant(n: int) -> None:
    found, wanted = (
        {(replace(case.built, layout=case.built.layouts[0]), case.batch) for case in cases}
        for cases in (part_of_the_matrix(n), matrix(n, causal=True) + matrix(n, causal=False))
    )
    assert found == wanted


def test_a_cover_of_the_matrix(ranks: Ranks) -> None:
    assert_exact(ranks, cover_of_the_matrix(2))


@pytest.mark.long
def test_each_method_on_eight_ranks(ranks: Ranks) -> None:
    assert_exact(ranks, of_each_method(part_of_the_matrix(8)))


@pytest.mark.parametrize("n", [1, 3, exhaustive(4)])
def test_a_part_of_the_matrix(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, part_of_the_matrix(n))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("n", exhaustive_from(1))
def test_the_matrix(ranks: Ranks, n: int, causal: bool) -> None:
    assert_exact(ranks, matrix(n, causal=causal))


def taking_turns(n: int, tokens: Sequence[Callable[[str], dict]]) -> list[Case]:
    """Every variant on every layout; tokens by the layout, masks and dtypes take turns. Of the others up to 4 ranks."""
    found = []
    for i, case in enumerate(variants(n) + (others(n) if n <= 4 else [])):
        for j, layout in enumerate(REGISTRY[case.method].layouts):
            turn = i + j + SIZES.index(n)
            causal, dtype = turn // len(tokens) % 2 == 0, DTYPES[turn % 3]
            case = replace(case, layout=layout, causal=causal, dtype=dtype, kv_heads=key_heads(case.heads)[:2][-1])
            found.append(replace(case, **tokens[turn % len(tokens)](layout)))
    return found


@pytest.mark.parametrize("n", exhaustive_from(3))
def test_odd_chunks(ranks: Ranks, n: int) -> None:
    """One token each, five, and for zigzag pieces of one token and of three."""
    assert_exact(
        ranks,
        taking_turns(
            n,
            [
                lambda layout: {"tokens": 2 if layout == "zigzag" else 1},
                lambda layout: {"tokens": 6 if layout == "zigzag" else 5},
            ],
        ),
    )


@pytest.mark.parametrize("n", exhaustive_from(3)[1:])
def test_lengths_that_ranks_do_not_divide(ranks: Ranks, n: int) -> None:
    """One token too many, one too few, and more than every first piece."""
    assert_exact(
        ranks, taking_turns(n, [lambda _, more=more: {"tokens": 4, "more": more} for more in (1, n - 1, n + 1)])
    )


def test_uneven_calls_say_how_long_the_sequence_is(ranks: Ranks) -> None:
    """Else ranks would disagree on it: a call without it, or of another length than assigned, is refused on each."""
    answers = ranks.run(jobs.refusals_of_uneven_calls, Case(n=4, method="ring", more=2))
    for rank, (unsaid, wrong) in enumerate(answers[:4]):
        q = f"RequestError: q (2, {9 if rank < 2 else 8}, {HEADS}, {HEAD_DIM})"
        assert unsaid == (
            f"{q}: 4 ranks don't share 34 tokens evenly, so that the call must say seqlen; seqlen=34 would work"
        )
        assert wrong == f"{q}: rank {rank} of 4 owns 16 tokens of 64; what `shard` returns would work"


def test_shares_of_a_zigzag_chunk_that_are_not_alike(ranks: Ranks) -> None:
    """The middle one of three ranks that own a chunk together has some of both its pieces."""
    usp = Case(n=3, method="usp", layout="zigzag", heads=6, kv_heads=1, options=(("ulysses", 3),))
    assert_exact(ranks, (replace(usp, n=n, tokens=tokens) for n in (3, 6, 9) for tokens in (2, 6)))


@pytest.mark.parametrize("lanes", ["one", "each"])
@pytest.mark.parametrize("n", [4, exhaustive(6), exhaustive(9)])
@pytest.mark.long
def test_lanes_and_uneven_costs(ranks: Ranks, n: int, lanes: str) -> None:
    cases = [replace(variant, lanes=lanes, costs=UNEVEN, kv_heads=1) for variant in variants(n) if variant.tile]
    assert_exact(ranks, [replace(case, layout=layout) for case in cases for layout in LAYOUTS])


@pytest.mark.parametrize("n", exhaustive_from(6))
def test_lanes_each(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, (replace(v, lanes="each", dtype="float32") for v in variants(n) if v.tile))


@pytest.mark.parametrize("kernel", ["reference", "aten_cpu"])
@pytest.mark.long
def test_kernels(ranks: Ranks, kernel: str) -> None:
    variant = Case(n=4, method="mesh", tile=(2, 2), kernel=kernel, kv_heads=2)
    assert_exact(ranks, (replace(variant, layout=layout, dtype=dtype) for layout in LAYOUTS for dtype in DTYPES))


@pytest.mark.long
def test_auto_tile_and_layout(ranks: Ranks) -> None:
    assert_exact(
        ranks, (Case(n=n, method="mesh", layout="auto", causal=causal) for n in SIZES for causal in (True, False))
    )
    assert_exact(ranks, (Case(n=4, method=method, kv_heads=2) for method in ("startrail", "all_gather")))


def test_row_sums_in_place_of_o(ranks: Ranks) -> None:
    """In every dtype; rounding of the O that is put back must not show."""
    options = ((), (("ulysses", 2),), (("schedule", "searched"), ("slices", 2)), (("placement", "kv"),))
    options += ((("form", "gather"), ("placement", "kv")), (("form", "gather"), ("slices", 2)))
    meshes = [Case(n=8 if "ulysses" in dict(each) else 4, method="mesh", tile=(2, 2), options=each) for each in options]
    cases = [*meshes, Case(n=4, method="pass_q"), Case(n=1, method="pass_q"), Case(n=3, method="mesh", tile=(3, 1))]
    summed = [replace(case, options=(*case.options, ("row_sums", True))) for case in cases]
    layouts = zip(itertools.cycle(LAYOUTS), itertools.product(summed, DTYPES), strict=False)
    assert_exact(ranks, [replace(case, layout=layout, dtype=dtype) for layout, (case, dtype) in layouts])


def test_nodes_that_are_tiles(ranks: Ranks) -> None:
    """Rings of two levels, of Q and O or of KV, and gathers of such groups."""
    shapes = (((4, 2), (2, 1)), ((2, 4), (1, 2)), ((8, 1), (2, 1)))
    forms = ((), (("form", "gather"),))
    cases = [
        Case(n=8, method="mesh", tile=tile, options=(("placement", node), *form), layout=layout, causal=causal)
        for (tile, node), form in itertools.product(shapes, forms)
        for layout, causal in (("zigzag", True), ("contiguous", False))
    ]
    assert_exact(ranks, cases)


@pytest.mark.long
def test_degrees_are_chosen_where_heads_are_given(ranks: Ranks) -> None:
    """With as many key heads as heads, half as many, and fewer than ranks that split them."""
    options = (("ulysses", "auto"),)
    cases = [Case(n=n, method=m, heads=8, options=options, says_heads=True) for m in ("usp", "mesh") for n in (1, 4, 8)]
    assert_exact(ranks, [replace(case, kv_heads=kv_heads) for case in cases for kv_heads in (8, 4, 1)])


def test_other_heads_than_said_are_refused() -> None:
    attention = SequenceParallelAttention("mesh", ulysses="auto", heads=8, kv_heads=2)
    q, k = torch.ones(1, 8, 8, 4), torch.ones(1, 8, 4, 4)
    with pytest.raises(RequestError, match="chosen for heads=8 and kv_heads=2; as many of each would work"):
        attention(q, k, k)


def some_grouped(n: int, dtype: str) -> list[Case]:
    """Everything with half as many key heads as heads, on the last layout that the method has."""
    found = [case for case in everything(n) if case.kv_heads == key_heads(case.heads)[1]]
    found += of_one_batch_entry(found)
    return [replace(case, dtype=dtype, layout=REGISTRY[case.method].layouts[-1]) for case in found]


@pytest.mark.long
@pytest.mark.parametrize("n", [4, exhaustive(9)])
def test_wider_wire_is_no_less_exact(ranks: Ranks, n: int) -> None:
    """The partials of bf16 travel in bf16 or in fp32."""
    narrow = some_grouped(n, "bfloat16")
    wide = [replace(case, wire_dtype="float32") for case in narrow]
    errors = measure(ranks, [*narrow, *wide])
    helped = set()
    for narrow_case, wide_case in zip(narrow, wide, strict=True):
        for tensor, error in errors[wide_case].items():
            # Results end in bf16, whose rounding is most of the error and falls a little differently each time.
            assert error <= 1.02 * errors[narrow_case][tensor], f"{wide_case}: {tensor}"
        assert not wrong_in(narrow_case, errors[narrow_case]), narrow_case
        if sum(errors[wide_case].values()) < sum(errors[narrow_case].values()):
            helped.add(narrow_case.method)
    # Where sums of blocks travel, the wire's rounding must show, or the option has done nothing. What these send is of
    # one block, in bf16 from the kernel on; group_cast in two levels sends sums of a node.
    of_one_block = {"reference", "pass_q", "ulysses", "upipe", "hybrid_cp"}
    assert helped == {case.method for case in narrow} - of_one_block
    assert n == 9 or len(helped) == len(REGISTRY) - len(of_one_block)


ROUNDED_WITH = {O: ("out", "dq", "dk"), DQ: ("dq",), DKV: ("dk", "dv")}
ROUNDED_WITH |= {tensor.by_heads: results for tensor, results in ROUNDED_WITH.items()}
"""By the tensor that travels in the wire dtype: the results that take its rounding. dv depends on the lse, not on O."""


@pytest.mark.parametrize("every", [False, exhaustive(True)])
def test_the_wire_rounds_partials_and_nothing_else(ranks: Ranks, every: bool) -> None:
    """fp32 with a bf16 wire."""
    cases = [replace(case, wire_dtype="bfloat16") for case in some_grouped(4, "float32")]
    cases = cases if every else of_each_method(cases, 2)
    for case, by_tensor in measure(ranks, cases).items():
        plans = [case.built.plan(case.problem, phase, case.costs) for phase in PHASES]
        carried = {op.tensor for plan in plans for op in plan.ops if isinstance(op, Transfer) and peers(op)}
        rounded = {result for tensor in carried for result in ROUNDED_WITH.get(tensor, ())}
        assert rounded, f"{case}: no partials travel"
        assert not wrong_in(case, by_tensor), case
        for tensor, error in by_tensor.items():
            told_apart = error >= 1e-4 if tensor in rounded else error <= FLOORS["float32"]
            assert told_apart, f"{case}: {tensor} is off by {error:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_unshard_and_positions(ranks: Ranks, layout: str) -> None:
    cases = [Case(n=n, method="ring", layout=layout, tokens=tokens) for n in SIZES for tokens in (2, 6)]
    shared = Case(n=4, method="usp", layout=layout, options=(("ulysses", 2),))
    cases += [replace(shared, n=n, tokens=tokens) for n in (4, 6, 8) for tokens in (1, 6)]
    answers = ranks.run(jobs.round_trip, cases)
    for case in cases:
        positions, takes_them, comes_back = zip(*(answer[case] for answer in answers[: case.n]), strict=True)
        assert sorted(sum(positions, [])) == list(range(case.n * case.tokens)), case
        assert [len(own) for own in positions] == [case.tokens] * case.n, case
        assert all(takes_them), f"{case}: shard takes other tokens than positions says"
        assert all(comes_back), f"{case}: unshard doesn't undo shard"
        if case.method == "usp":
            chunks = [LAYOUTS[layout].positions(i, case.n // 2, case.n * case.tokens) for i in range(case.n // 2)]
            assert sum(positions, []) == [token for chunk in chunks for run in chunk for token in run], case


REUSED = [
    Case(n=3, method="ring", dtype="bfloat16", kv_heads=2),
    Case(n=9, method="mesh", tile=(3, 3), dtype="bfloat16", kv_heads=2),
    Case(n=6, method="mesh", tile=(3, 2), lanes="each", dtype="float32"),
    Case(n=4, method="mesh", tile=(4, 1), layout="zigzag", dtype="float32"),
    Case(n=4, method="mesh", tile=(2, 2), options=(("schedule", "searched"), ("slices", 2)), dtype="bfloat16"),
    Case(n=2, method="mesh", tile=(1, 2), layout="contiguous", causal=False, kv_heads=1),
    Case(n=4, method="tokenring", options=(("nodes", 2),), kv_heads=2, dtype="float32"),
    Case(n=4, method="tokenring", layout="zigzag", kv_heads=2, dtype="bfloat16"),
    Case(n=6, method="ulysses", layout="contiguous", heads=6, kv_heads=2, dtype="bfloat16"),
    Case(n=4, method="usp", options=(("ulysses", 2),), layout="zigzag", kv_heads=2, dtype="bfloat16"),
    Case(n=8, method="loongtrain", options=(("ulysses", 2), ("inner", 2)), kv_heads=2, dtype="bfloat16"),
    Case(n=4, method="burst_attention", options=(("inner", 2),), kv_heads=2, dtype="bfloat16"),
    Case(n=4, method="tasp", options=(("inner", 4), ("rings", 2)), kv_heads=2, dtype="bfloat16"),
    Case(n=4, method="startrail", options=(("team", 2),), dtype="bfloat16"),
    Case(n=4, method="all_gather", options=(("stride", 1),), kv_heads=2, dtype="float32"),
]


@pytest.mark.parametrize("case", REUSED[:1] + [exhaustive(case) for case in REUSED[1:]], ids=str)
def test_repeated_calls_are_bitwise_equal(ranks: Ranks, case: Case) -> None:
    """Also with a second and a third shape in the same module, which each reuse their buffers."""
    seqlens = [case.n * tokens for tokens in (case.tokens, 2, 14)]
    assert sum(ranks.run(jobs.differ_when_repeated, case, seqlens), []) == []


@pytest.mark.parametrize("case", REUSED, ids=str)
def test_two_forwards_before_their_backwards(ranks: Ranks, case: Case) -> None:
    assert sum(ranks.run(jobs.differ_when_interleaved, case), []) == []


@pytest.mark.parametrize("case", REUSED, ids=str)
def test_strided_inputs_and_gradients(ranks: Ranks, case: Case) -> None:
    assert sum(ranks.run(jobs.differ_when_strided, case), []) == []
    assert sum(ranks.run(jobs.differ_with_broadcast_gradient, case), []) == []


def test_refusals_name_value_rule_and_remedy(ranks: Ranks) -> None:
    mesh = Case(n=6, method="mesh", tile=(2, 2))
    assert (
        ranks.run(jobs.refusal, mesh, (1, 4, 2, 8), (1, 4, 2, 8))[:6]
        == ["RequestError: method.tile=[2,2]: a * b must be gpus=6; one of [1,6], [2,3], [3,2], [6,1] would work"] * 6
    )
    ring = Case(n=2, method="ring")
    for q_shape, k_shape, value in (
        ((1, 4, 2, 8), (1, 4, 2, 16), "k (1, 4, 2, 16)"),
        ((1, 4, 2, 8), (1, 6, 2, 8), "k (1, 6, 2, 8): there are 4 queries here, so that the call must say"),
        ((1, 4, 3, 8), (1, 4, 2, 8), "kv_heads=2"),
    ):
        for answer in ranks.run(jobs.refusal, ring, q_shape, k_shape)[:2]:
            assert answer.startswith("RequestError") and value in answer and "would work" in answer
    ulysses = Case(n=3, method="ulysses", layout="contiguous")
    answer = ranks.run(jobs.refusal, ulysses, (1, 4, 4, 8), (1, 4, 4, 8))[:3]
    assert answer == [
        "RequestError: gpus=3: ulysses splits heads=4 evenly, and kv_heads=4 must divide evenly too or be a divisor of "
        "the ranks; one of 1, 2, 4, or method.pad_heads=true would work"
    ] * 3  # fmt: skip
    zigzag = Case(n=3, method="ring", layout="zigzag")
    assert "seqlen=3: the zigzag layout" in ranks.run(jobs.refusal, zigzag, (1, 1, 2, 8), (1, 1, 2, 8))[0]


def test_tokens_are_not_assigned_out_before_the_degree_is_chosen(ranks: Ranks) -> None:
    for answers in ranks.run(jobs.refusals_to_shard, Case(n=4, method="usp"), 16)[:4]:
        assert answers == [
            "RequestError: method.ulysses=auto: decides which tokens a rank owns, and must be chosen before they are "
            "assigned; a number, such as method.ulysses=2, would work"
        ] * 3  # fmt: skip


@pytest.mark.parametrize(("method", "n"), [("ring", 1), ("zigzag", 2), ("ulysses", 2), ("mesh", 4)])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_scores_are_multiplied_by_a_scale(ranks: Ranks, method: str, n: int, scale: float) -> None:
    answers = [each for each in ranks.run(jobs.scaled, method, n, scale) if each is not None]
    assert len(answers) == n
    assert max(map(max, answers)) < 1e-12


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    with pytest.raises(RequestError, match=f"scale={scale}.*finite and more than 0.*leaving it out"):
        SequenceParallelAttention("ring", scale=scale)


def test_one_process_needs_no_group() -> None:
    """A plain program that never started torch.distributed is a group of one."""
    assert not torch.distributed.is_initialized()
    for method in {*REGISTRY} - {"usp", "zigzag"}:
        attention = SequenceParallelAttention(method, causal=True)
        full = inputs(11, 2, "float64")
        got, wanted = jobs.attend(attention, full), reference(11, 2, "float64", CAUSAL)
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
        assert attention.positions(11).tolist() == list(range(11))
        assert torch.equal(attention.unshard(attention.shard(full.q_BSHD)), full.q_BSHD)
        assert not attention.sent_bytes


def test_unknown_names_are_refused() -> None:
    with pytest.raises(RequestError, match="method=rong.*did you mean ring"):
        SequenceParallelAttention("rong")
    with pytest.raises(
        RequestError, match="method.tiles.*did you mean method.tile.*known: .*method.fuse, method.lanes, method.layout"
    ):
        SequenceParallelAttention("mesh", tiles=(1, 1))
    with pytest.raises(RequestError, match="layout=stripes.*did you mean striped"):
        SequenceParallelAttention("ring", layout="stripes")


def test_the_pool_has_room_for_every_size() -> None:
    assert max(SIZES) <= WORLD
