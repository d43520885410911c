"""Keys and values that blocks make of latents: exact by every method, and as many bytes as counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench.errors import RequestError
from sp_bench.kernels import choose
from sp_bench.kernels.pieces import Pieces
from sp_bench.methods import REGISTRY
from sp_bench.plan import Problem
from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.region_table import table_of
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.run.latents import Expanding, Latents
from tests.run.latent_jobs import NAMES, find_errors, of_latents
from tests.run.matrix import DTYPES, everything
from tests.run.test_documents import CACHED, PACKS, cases_of, some_cases_of
from tests.run.test_padded_heads import METHODS as SPLIT_HEADS
from tests.run.test_padded_heads import padded_cases, with_documents
from tests.support.attention_cases import Case, of_each_method, of_one_batch_entry, relative
from tests.support.marks import exhaustive, long
from tests.support.packs import packs
from tests.support.ranks import Ranks

AT_MOST = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2}


def taken(cases: Iterable[Case]) -> list[Case]:
    """The cases, with one key head and widths of values in turn, whose methods take latents."""
    found: list[Case] = []
    for i, case in enumerate(cases):
        case = replace(case, kv_heads=1, v_head_dim=(8, 12, None)[i % 3], wire_dtype="")
        try:
            case.built.refuse(of_latents(case))
        except RequestError:
            continue
        found.append(case)
    return list(dict.fromkeys(found))


def with_latents(cases: Iterable[Case]) -> list[Case]:
    """The cases whose methods take one key head, on a layout of theirs: masks, dtypes, other keys take turns."""
    turned: list[Case] = []
    for i, case in enumerate(cases):
        layouts, causal = REGISTRY[case.method].layouts, i % 3 > 0
        keys = case.seqlen + case.n * case.tokens if i % 4 == 3 else None
        shape = {"layout": layouts[i % len(layouts)], "causal": causal, "dtype": DTYPES[i // 2 % 3], "kv_seqlen": keys}
        turned.append(replace(case, **shape))
    found = taken(turned)
    return found + of_one_batch_entry(found)


def of_packs(n: int) -> list[Case]:
    """Every variant of every method that takes latents, packs and layouts in turn, in fp64 or fp32: of few tokens
    roundings to bfloat16 leave little (tests.support.bounds).
    """
    packed = [cases_of(n, pack) for pack in (*PACKS, *CACHED)]
    found = taken(case for cases in zip_longest(*packed) for case in cases if case)
    return [replace(case, dtype=DTYPES[i % 2]) for i, case in enumerate(found)]


def with_padded_heads(n: int) -> list[Case]:
    """Every variant of every method where heads are padded, of whole sequences and of documents."""
    cases = padded_cases(n)
    found = taken([*cases, *with_documents(replace(case, dtype="float64") for case in cases)])
    return [case for case in found if case.problem.padded]


def assert_exact(ranks: Ranks, cases: list[Case]) -> list[float]:
    """Results and gradients are those of the definition in fp64, bytes the plans' and, of whole sequences, the closed
    form's; memory is at most as counted, and keys are made as often as is simulated. Returns the share of the counted
    memory of each case.
    """
    answers, shares = ranks.run(find_errors, cases), []
    for case in cases:
        found = [answer[case] for answer in answers[: case.n]]
        for name in NAMES:
            assert relative(each.errors[name] for each in found) <= AT_MOST[case.dtype], (case, name)
        assert all(each.sent == each.counted for each in found), case
        if not case.pack:
            assert sum(each.counted for each in found) == pytest.approx(sum(each.closed for each in found)), case
        assert max(each.live for each in found) <= found[0].expected, case
        for each in found:
            assert each.makings[0] == each.simulated[0], case
            # Of tokens that lie apart, all keys are counted of the documents that queries are of.
            at_most = case.pack and case.problem.layout.name == "striped"
            assert each.makings[1] <= each.simulated[1] if at_most else each.makings[1] == each.simulated[1], case
        shares += [max(each.live for each in found) / found[0].expected]
    return shares


@pytest.mark.parametrize("count", [1, exhaustive(6)])
def test_each_method(ranks: Ranks, count: int) -> None:
    cases = of_each_method(with_latents(everything(4)), count)
    assert {case.method for case in cases} >= REGISTRY.keys() - {"reference"}
    shares = assert_exact(ranks, cases)
    assert min(shares) > 0.6 and max(shares) <= 1.0


@pytest.mark.parametrize("n", [long(3), *map(exhaustive, (1, 2, 4, 6, 8))])
def test_every_variant(ranks: Ranks, n: int) -> None:
    cases = with_latents(everything(n))
    assert_exact(ranks, cases if n != 3 else of_each_method(cases, 2, turn=1))


@pytest.mark.parametrize(("n", "count"), [(4, 1), exhaustive(4, 10), exhaustive(3, 8), exhaustive(8, 4)])
def test_documents_and_windows(ranks: Ranks, n: int, count: int) -> None:
    cases = of_each_method(of_packs(n), count, turn=count)
    assert {case.method for case in cases} >= REGISTRY.keys() - {"reference"}
    assert_exact(ranks, cases)


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pack=packs(cached=True), n=st.sampled_from([1, 2, 3, 4, 6, 8]), turn=st.integers(0, 10))
def test_any_pack(ranks: Ranks, pack: Packed, n: int, turn: int) -> None:
    """Behind histories or none, with windows or none."""
    assert_exact(ranks, taken(replace(case, dtype="float64") for case in some_cases_of(n, pack, 3, turn)))


@pytest.mark.parametrize(("n", "count"), [(4, 2), exhaustive(3, 8), exhaustive(4, 12), exhaustive(8, 4)])
def test_padded_heads(ranks: Ranks, n: int, count: int) -> None:
    cases = of_each_method(with_padded_heads(n), count)
    assert {case.method for case in cases} == {*SPLIT_HEADS} and {bool(case.pack) for case in cases} == {False, True}
    assert_exact(ranks, cases)


def test_pieces_are_their_regions_and_add_to_the_matrices_gradients() -> None:
    """Heads that are evenly apart, and some that aren't."""
    regions = (Region(RegionKind.CAUSAL, range(2, 6), range(4)), Region(RegionKind.CAUSAL, range(6, 10), range(5, 9)))
    pieces, device = Pieces(table_of(regions), torch.device("cpu")), torch.device("cpu")
    problem = Problem(
        n=1, seqlen=16, heads=6, kv_heads=1, head_dim=16, v_head_dim=8, latent_dim=20, rope_dim=4, dtype="float64",
        layout=LAYOUTS["contiguous"],
    )  # fmt: skip
    kernel, source = choose("auto", "cpu", "float64", 16), torch.Generator().manual_seed(2)
    for heads in ([0, 2, 4], [1, 2, 5]):
        shapes = (2, 16, 3, 16), (2, 16, 1, 24), (2, 16, 3, 8)
        q, c, dout = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
        at_once, one_by_one = (Latents.random(problem, 5, device) for _ in range(2))
        assert at_once and one_by_one and at_once.gradients
        none = c[..., :0]
        given = q[:, pieces.queries], c[:, pieces.keys], none[:, pieces.keys]
        kernels = [Expanding(kernel, each, torch.tensor(heads), lambda *x: None) for each in (at_once, one_by_one)]
        out, lse = kernels[0].forward(*given, pieces)
        dq, dc, dv = kernels[0].gradients(dout[:, pieces.queries], *given, out, lse, pieces)
        assert dv.shape[3] == 0
        for i, region in enumerate(regions):
            rows, mine = (slice(each.start, each.stop) for each in (region.q, region.kv))
            part = slice(4 * i, 4 * i + 4)
            alone, its_lse = kernels[1].forward(q[:, rows], c[:, mine], none[:, mine], region.kind)
            torch.testing.assert_close(out[:, part], alone)
            found = kernels[1].gradients(
                dout[:, rows], q[:, rows], c[:, mine], none[:, mine], alone, its_lse, region.kind
            )
            torch.testing.assert_close((dq[:, part], dc[:, part]), found[:2])
        torch.testing.assert_close(at_once.gradients, one_by_one.gradients)
        assert all(set(x.flatten(1).any(1).nonzero().flatten().tolist()) == set(heads) for x in at_once.gradients)
