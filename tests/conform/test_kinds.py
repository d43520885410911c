"""sp_bench.conform on attentions that are wrong for one kind of shape or call only, and what it says of what it ran."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest

from sp_bench.conform.__main__ import main
from sp_bench.conform.case import Case
from sp_bench.conform.cases import SIZES, share
from sp_bench.conform.catalogue import CHECKS, Check, check_named
from sp_bench.conform.claims import Claims, claims
from sp_bench.conform.ranks import Verdict, Worlds
from sp_bench.conform.report import advice, checks_table, remark, run_with
from sp_bench.conform.run import rows_of
from sp_bench.conform.subjects import Subject
from sp_bench.errors import RequestError
from sp_bench.plan.layout import LAYOUTS
from tests.conform.support import failures, named, row
from tests.support.marks import exhaustive

HERE = "tests.conform.narrow"
ROOT = Path(__file__).parents[2]
EVERYTHING = Claims(uneven=True, documents=True, window=True, scale=True)


@pytest.mark.parametrize(
    ("bug", "check", "sizes"),
    [
        ("kv_heads_padded", "kv_heads", (2,)),
        ("kv_heads_padded", "kv_heads", (4,)),
        ("head_dim_192", "head_dim", (2,)),
        ("documents_grouped", "documents", (2,)),
        ("documents_in_a_batch", "documents", (2,)),
        ("frozen_q", "frozen", (2,)),
        ("frozen_k", "frozen", (2,)),
        ("frozen_v", "frozen", (2,)),
        ("length", "length", (4,)),
        exhaustive("length", "length", (2,)),
        exhaustive("length_2048", "length", (2,)),
        exhaustive("packs", "shapes", (2,)),
        exhaustive("other_length_hangs", "other_length", (2,)),
    ],
)
def test_what_is_wrong_for_one_kind_only_is_caught(bug: str, check: str, sizes: tuple[int, ...]) -> None:
    """A plain call is right. Each wrong attention is one of a public bug report, or beside one."""
    with Worlds(timeout_s=15) as worlds:
        plain = [each for each in CHECKS if each.name in ("out", "dq", "dk", "dv")]
        assert not failures(rows_of(named(bug), worlds, sizes=(min(sizes),), checks=plain))
        found = row(worlds, named(bug), check, sizes)
        assert found.status == "fails" and found.why, found


@pytest.mark.parametrize(
    "name", ["other_length_refused", "any_length", "any_length_of_seqlen", "few_shapes", "windowed"]
)
def test_what_is_right_beside_it_holds(worlds: Worlds, name: str) -> None:
    """An error on all ranks, lengths that may differ, a cache that is bounded, windows and scales."""
    checks = {"few_shapes": ["shapes"], "windowed": ["window", "scale"]}.get(name, ["other_length"])
    for check in checks:
        found = row(worlds, named(name), check, (2,))
        assert found.status == "holds", found


def test_another_length_after_a_right_call_is_caught() -> None:
    """Also in new ranks, which have made no call before, since what is usual was judged on others."""
    subject, check = named("other_length_later"), check_named("other_length")
    with Worlds(timeout_s=15) as worlds:
        for case in check.cases(subject.claims, (2,), False):
            assert worlds.judge(subject, replace(check, function="exact", loud=False), case).status == "holds"
        worlds.renew()
        assert row(worlds, subject, "other_length", (2,)).status == "fails"


class Slow(Worlds):
    """Ranks that take a while for each case, and find all of them wrong."""

    asked = 0

    def judge(self, subject: Subject, check: Check, case: Case) -> Verdict:
        self.asked += 1
        time.sleep(0.1)
        return Verdict("fails", "wrong") if subject == named("unclaimed") else Verdict("holds")


@pytest.mark.parametrize(("limit_s", "most"), [(0, 0), (0.15, 4)])
def test_shrinking_and_trying_layouts_end_in_time(limit_s: float, most: int) -> None:
    worlds = Slow()
    found = row(worlds, named("unclaimed"), "out", (2, 3), shrink_s=limit_s)
    assert (found.status, found.failed) == ("fails", 4)
    assert worlds.asked <= 5 + most


@pytest.mark.parametrize("sizes", [(1,), (2, 8), (3,), (6, 8), SIZES])
@pytest.mark.parametrize("masks", [("causal",), ("full",), ("causal", "full"), ("full", "causal")])
def test_all_numbers_of_ranks_are_run_with_all_masks(sizes: tuple[int, ...], masks: tuple[str, ...]) -> None:
    """Whichever are asked for, for each of the results of a call; and no other number of ranks, for any check."""
    for check, long in product(CHECKS, (False, True)):
        cases = [*check.cases(Claims(masks=masks, documents=True, uneven=True), sizes, long)]
        assert {case.n for case in cases} <= {*sizes} and {case.mask for case in cases} <= {*masks}
        if check.name in ("out", "dq", "dk", "dv"):
            assert {(case.n, case.mask) for case in cases} == {*product(sizes, masks)}


def test_every_check_has_a_case_for_every_number_of_ranks_that_can_show_it() -> None:
    """Asked for one number of ranks, no check is left out but those between ranks on one."""
    for check, n in product(CHECKS, SIZES):
        cases = [*check.cases(EVERYTHING, (n,), False)]
        assert bool(cases) is (n > 1 or check.name not in ("other_length",)), (check.name, n)


def test_the_kinds_that_are_run_by_default() -> None:
    """Each kind that public reports are of, in the short profile."""

    def ran(check: str) -> list:
        return [*check_named(check).cases(EVERYTHING, SIZES, False)]

    assert {256, 2048} <= {
        limit for limit in (256, 2048) for case in ran("length") if case.seqlen > limit and case.n > 1
    }
    assert {(3, 2), (7, 4)} <= {(case.kv_heads, case.n) for case in ran("kv_heads")}
    assert {192, 256} <= {case.head_dim for case in ran("head_dim")}
    packed = ran("documents")
    assert {(1, True), (2, False), (2, True)} <= {(case.batch, case.heads > case.kv_heads) for case in packed}
    assert any(case.window > case.tokens for case in ran("window")) and any(case.scale for case in ran("scale"))
    assert all(case.valid for check in CHECKS for case in check.cases(EVERYTHING, SIZES, True))


@pytest.mark.parametrize("n", SIZES)
def test_shares_fit_every_layout(n: int) -> None:
    for layout, seqlen in product(LAYOUTS.values(), (600, 2100)):
        assert n * share(n, seqlen) % (n * layout.pieces) == 0
        assert abs(n * share(n, seqlen) - seqlen) <= n


def test_what_is_said_follows_from_what_ran(worlds: Worlds) -> None:
    """A function that ignores `causal` is found on every number of ranks, and the row names what was run."""
    found = row(worlds, named("causal_ignored"), "out", sizes=(2, 3))
    assert (found.status, found.failed, found.cases) == ("fails", 2, 4)
    assert run_with(found) == "2, 3: causal, full"
    assert run_with(row(worlds, named("causal_ignored", masks="full"), "out", sizes=(2,))) == "2: full"
    zigzag = row(worlds, named("right", layout="zigzag"), "sub_groups", sizes=(8,))
    assert (zigzag.status, run_with(zigzag)) == ("not run", "")


def test_what_is_refused_is_not_said_to_be_run(worlds: Worlds) -> None:
    """torch's own ring takes no full mask on one rank, or the like: pairs that are left out are named."""
    found = row(worlds, named("refuses_full_on_three"), "out", sizes=(2, 3))
    assert (found.status, found.cases) == ("holds", 3)
    assert run_with(found) == "2, 3: causal, full, not 3 full"


def test_a_layout_that_would_hold_is_named(worlds: Worlds, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that claims no layout is tried as striped if causal."""
    rows = rows_of(
        named("unclaimed"), worlds, sizes=(2,), checks=[check_named("out"), check_named("kv_heads")], shrink_s=3
    )
    assert [found.status for found in rows] == ["fails", "fails"]
    assert all("tried as striped, method.layout=contiguous would hold" in remark(found) for found in rows)
    assert advice("my:fn", rows) == (
        "2 of the 2 failing checks hold with method.layout=contiguous, and fail as striped. If that is how its tokens "
        "are assigned, claim it: python -m sp_bench.conform my:fn method.layout=contiguous"
    )
    assert main([f"{HERE}:unclaimed", "sizes=2", "checks=out", "shrink_s=3"]) == 1
    assert "method.layout=contiguous would hold" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert main([f"{HERE}:unclaimed", "sizes=2", "checks=out", "method.layout=contiguous"]) == 0


def test_a_claimed_layout_that_is_wrong_is_named_too(worlds: Worlds) -> None:
    found = row(worlds, named("right", layout="zigzag"), "out", sizes=(2,), shrink_s=3)
    assert (found.layout, found.other_layouts) == ("zigzag", ("contiguous",))
    assert row(worlds, named("batch"), "batch", sizes=(2,), shrink_s=3).other_layouts == ()


def test_names_of_dtypes_and_masks() -> None:
    """Those of torch and short ones stand for the full ones; others are refused where they are claimed."""
    assert Claims(dtypes=("bf16", "torch.float16", "fp32")).dtypes == ("bfloat16", "float16", "float32")
    assert named("right", dtypes="bf16,half").claims.dtypes == ("bfloat16", "float16")
    assert Claims(masks="full").masks == ("full",)  # pyright: ignore[reportArgumentType]
    for wrong in (
        {"masks": ("sliding",)},
        {"dtypes": ("float8",)},
        {"layout": "ring"},
        {"mask": "full"},
        {"uneven": 2},
    ):
        with pytest.raises(RequestError):
            claims(**wrong)


def test_the_page_has_the_table_of_checks_and_all_claims() -> None:
    page = (ROOT / "docs/how-to/conform.md").read_text()
    assert checks_table() in page
    assert all(f"`{each.name}`" in page for each in fields(Claims))
