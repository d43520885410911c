"""Advice for a data set: many packs, their spread, and the ranks that a document asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.advise.__main__ import main
from sp_bench.advise.candidates import Feasible, Question
from sp_bench.advise.packs import (
    OnAPack,
    OnPacks,
    PacksAnswer,
    Spans,
    answer_for_packs,
    class_of,
    packs_of,
    spans_of,
)
from sp_bench.advise.packs_words import heading, rank_table, ranking
from sp_bench.cli.columns import SEVERAL
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.documents import Documents, Packed
from sp_bench.plan.problem import Problem
from sp_bench.point.choose import choose
from tests.support.layouts import tokens_of
from tests.support.packs import packs
from tests.support.points import point

ASKED = ["gpus=4", "seqlen=16k", "mask=document", "data=short", "heads=4", "cluster=h100_ndr400"]
METHODS = ("ulysses", "hybrid_cp", "group_cast", "ring")


@pytest.fixture(scope="module")
def found() -> PacksAnswer:
    drawn = packs_of([*ASKED, "seed=3"], "5")
    assert drawn is not None
    return answer_for_packs(Question([*ASKED, "seed=3"], METHODS), drawn)


def test_each_method_is_simulated_on_every_pack(found: PacksAnswer) -> None:
    """As the point of that seed with the same degrees and layout."""
    assert found.packs.seeds == (3, 4, 5, 6, 7)
    assert {each.feasible.method.name for each in found.methods} >= {"hybrid_cp", "group_cast"}
    assert [each.median_ms for each in found.methods] == sorted(each.median_ms for each in found.methods)
    one = next(each for each in found.methods if each.feasible.method.name == "group_cast")
    method, layout = one.feasible.method, one.feasible.record.layout
    for seed, step_ms in zip(found.packs.seeds, one.steps_ms, strict=True):
        options = [f"method.{key}={vars(method)[key]}" for key in ("ulysses", "stages", "chunk")]
        asked = point(*ASKED, "method=group_cast", f"method.layout={layout}", *options, f"seed={seed}", "mode=simulate")
        assert step_ms == pytest.approx(1e3 * choose(asked).total_s, rel=1e-9)


def test_degrees_are_chosen_on_the_pack_of_middle_work_or_of_most(found: PacksAnswer) -> None:
    def work(seed: int) -> int:
        mask = point(*ASKED, "method=ulysses", f"seed={seed}").problem.mask
        assert isinstance(mask, Packed)
        return int(mask.work_of_documents.sum())

    in_order = sorted(found.packs.seeds, key=work)
    assert (found.packs.middle, found.packs.heaviest) == (in_order[2], in_order[-1])
    assert {each.feasible.record.seed for each in found.methods} <= {found.packs.middle, found.packs.heaviest}


def test_medians_worst_and_wins_are_those_of_the_packs(found: PacksAnswer) -> None:
    table = ranking(found)
    for i, each in enumerate(found.methods):
        assert table["median, ms"][i] == f"{np.median(each.steps_ms):,.1f}"
        assert table["worst, ms"][i] == f"{max(each.steps_ms):,.1f}"
        assert each.balance.min() >= 1 and each.balance.max() < 4 + 1e-9
    assert sum(map(int, table["fastest on"])) >= len(found.packs.seeds)
    assert f"the fastest on {table['fastest on'][0]} of 5 packs" in "\n".join(heading(found, "data=short"))


@pytest.mark.long
def test_a_method_that_is_too_large_on_one_pack_is_refused(found: PacksAnswer) -> None:
    needed = sorted(each.peak_bytes for each in found.methods)
    limit = (needed[0] + needed[-1]) / 2
    tight = answer_for_packs(Question([*ASKED, "seed=3"], METHODS), found.packs, memory_bytes=limit)
    assert tight.methods and all(each.peak_bytes <= limit for each in tight.methods)
    assert any("on its largest pack its attention needs" in why for why in tight.refused.values())
    with pytest.raises(RequestError, match="no method can serve all packs"):
        answer_for_packs(Question([*ASKED, "seed=3"], METHODS), found.packs, memory_bytes=1.0)


@given(packs(most_documents=12), st.sampled_from(["hybrid_cp", "group_cast"]), st.integers(1, 3), st.booleans())
def test_ranks_of_a_document_are_those_with_its_tokens(mask: Packed, name: str, half: int, split: bool) -> None:
    n = 2 * half
    pack = Documents(mask.lengths, mask.causal, mask.left, mask.right)
    method = build(name, {"ulysses": 1 + split} if name == "group_cast" else {})
    problem = method.assigned(
        Problem(n=n, seqlen=pack.seqlen, batch=1, heads=4, kv_heads=2, head_dim=8, mask=pack, dtype="float32",
                wire_dtype="", layout=method.layout_of(pack, n))
    )  # fmt: skip
    degree, chunks = problem.layout.head_parallel, n // problem.layout.head_parallel
    plain = replace(problem.layout, head_parallel=1)
    owners = [{*tokens_of(plain, chunk, chunks, pack.seqlen).tolist()} for chunk in range(chunks)]
    wanted: Counter[tuple[int, int]] = Counter()
    for start, length in zip(pack.edges, pack.lengths, strict=False):
        ranks = degree * sum(1 for owned in owners if owned & {*range(start, start + length)})
        wanted[int(class_of(np.array([length]), pack.seqlen // n)[0]), ranks] += 1
    found = spans_of(problem)
    assert {key: documents for key, (documents, _) in found.items()} == wanted
    assert sum(tokens for _, tokens in found.values()) == pack.seqlen


def made(name: str, steps_ms: list[float], spans: Spans | None = None) -> OnPacks:
    feasible = Feasible(REGISTRY[name](), None)  # pyright: ignore[reportArgumentType]
    return OnPacks(feasible, [OnAPack(step_ms, 1.0, 1, spans or {}) for step_ms in steps_ms])


def test_the_table_of_ranks_names_ties() -> None:
    hybrid = made("hybrid_cp", [1.0], {(64, 1): (9, 300), (64, 2): (1, 60), (128, 4): (5, 500), (128, 2): (5, 450)})
    cast = made("group_cast", [2.0], {(64, 1): (10, 360), (128, 8): (10, 950)})
    table = rank_table([hybrid, cast, made("ring", [3.0])])
    assert table == {
        "method": ["1 to 64", "65 to 128"],
        "documents": ["10", "10"],
        "of tokens": ["27.5%", "72.5%"],
        "ranks, hybrid_cp": ["1 (1 to 2)", "2 or 4"],
        "ranks, group_cast": ["1", "8"],
    }
    assert rank_table([made("ring", [3.0])]) == {}


def test_packs_tell_methods_apart_by_the_ratio_on_each_pack() -> None:
    """Not by the spread of packs, which both have in common."""
    steps = [10.0, 20.0, 40.0, 30.0, 15.0, 25.0]
    first = made("ring", steps)
    assert not made("usp", [1.1 * x for x in steps]).ties_with(first)
    assert made("usp", [1.02 * x for x in steps]).ties_with(first)
    mixed = made("usp", [x * f for x, f in zip(steps, (0.7, 1.4, 0.8, 1.3, 0.9, 1.2), strict=True)])
    assert mixed.ties_with(first) and first.ties_with(first)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["packs=0", "mask=document", "data=short"], "packs=0: "),
        (["packs=4"], "packs=4: are drawn from a data set, and mask=causal is the same each time"),
        (["packs=4", "mask=document", "data=equal"], "and data=equal is the same each time"),
        (["mask=document", "data=sample", "data.path=/nowhere"], "data.path=/nowhere: can't be read"),
        (["mask=document", "data=short", "plots=a.svg"], "plots=a.svg: is of one pack; packs=1 would work"),
    ],
)
def test_bad_requests(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus=2", "seqlen=4k", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lengths := tmp_path / "lengths.txt").write_text("100 900, 3k\n64\n500 500 20 5000\n")
    data = ["mask=document", "data=sample", f"data.path={lengths}"]
    assert main(["gpus=4", "seqlen=8k", "heads=4", *data, "packs=3"]) == 0
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert said.startswith("3 packs of 8,192 tokens from data=sample (seeds 0 to 2), batch 1, 4 heads")
    assert "Ranks that have tokens of a document, by its length in tokens:" in said
    assert "ranks, hybrid_cp" in said and "How to run it:" in said
    assert max(len(line) for line in printed.splitlines() if line.startswith("│")) <= SEVERAL
