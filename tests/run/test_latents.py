"""Keys and values that blocks make of latents: exact by every method, and as many bytes as counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from tests.run.latent_jobs import NAMES, find_errors, of_latents
from tests.run.matrix import DTYPES, everything
from tests.support.attention_cases import Case, of_each_method, of_one_batch_entry
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks

AT_MOST = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2}


def with_latents(cases: Iterable[Case]) -> list[Case]:
    """The cases whose methods take one key head, on a layout of theirs: masks, dtypes, other keys take turns."""
    found: list[Case] = []
    for i, case in enumerate(cases):
        layouts, causal = REGISTRY[case.method].layouts, i % 3 > 0
        keys = case.seqlen + case.n * case.tokens if i % 4 == 3 and case.method not in OF_QUERIES else None
        shape = {"layout": layouts[i % len(layouts)], "causal": causal, "dtype": DTYPES[i // 2 % 3], "kv_seqlen": keys}
        case = replace(case, kv_heads=1, v_head_dim=(8, 12, None)[i % 3], wire_dtype="", **shape)
        try:
            case.built.refuse(case.built.dealt(of_latents(case)))
        except RequestError:
            continue
        found.append(case)
    return found + of_one_batch_entry(found)


OF_QUERIES = ("group_cast", "hybrid_cp")
"""The methods that cast rows of tokens which are queries and keys."""


def assert_exact(ranks: Ranks, cases: list[Case]) -> list[float]:
    """Results and gradients are those of the definition in fp64, bytes the closed form's; memory at most as counted."""
    answers, shares = ranks.run(find_errors, cases), []
    for case in cases:
        found = [answer[case] for answer in answers[: case.n]]
        for name in NAMES:
            error2, norm2 = (sum(each.errors[name][i] for each in found) for i in range(2))
            assert math.sqrt(error2 / norm2) <= AT_MOST[case.dtype], (case, name)
        assert sum(each.sent for each in found) == pytest.approx(sum(each.counted for each in found)), case
        assert max(each.live for each in found) <= found[0].expected, case
        shares += [max(each.live for each in found) / found[0].expected]
    return shares


@pytest.mark.parametrize("count", [1, exhaustive(6)])
def test_each_method(ranks: Ranks, count: int) -> None:
    cases = of_each_method(with_latents(everything(4)), count)
    assert {case.method for case in cases} >= REGISTRY.keys() - {"reference"}
    shares = assert_exact(ranks, cases)
    assert min(shares) > 0.6 and max(shares) <= 1.0


@pytest.mark.parametrize("n", [3, *map(exhaustive, (1, 2, 4, 6, 8))])
def test_every_variant(ranks: Ranks, n: int) -> None:
    cases = with_latents(everything(n))
    assert_exact(ranks, cases if n != 3 else of_each_method(cases, 2, turn=1))
