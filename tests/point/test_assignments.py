"""Choices of layout=auto: no GPU is left without work where another assignment gives it some."""

from __future__ import annotations

import numpy as np
import pytest

from sp_bench import account
from sp_bench.describe import memory_front
from sp_bench.methods import REGISTRY
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.point.choose import choose
from tests.workload.requests import point

SIZES = (1, 2, 3, 5, 8, 16, 64)
TOKENS = 192
MASKS: tuple[Mask, ...] = (
    FULL,
    CAUSAL,
    *(Window((TOKENS,), causal, left, right) for causal, left, right in ((True, 15, None), (False, 7, 8))),
    *(Chunked.of(tokens, TOKENS) for tokens in (TOKENS, 64, 7)),
    *(Documents(lengths) for lengths in ((TOKENS,), (96, 96), (3,) * 63 + (3,), (3,) * 62 + (6,), (1,) * 60 + (132,))),
    Documents((64, 64, 64), False, 5, 5),
)
H100 = ("model=none", "workload=attention", "cluster=h100_ndr400", "mode=simulate", "dtype=bfloat16", "head_dim=128")
ASKED = {
    "causal": "mask=causal",
    "full": "mask=full",
    "window": "mask=window window=[63,0]",
    "chunked": "mask=chunked chunk=1k",
    "document": "mask=document data=lengths data.lengths=[4096,2048,2048]",
}
"""Few tokens, of which one GPU alone is the fastest."""


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.name}{len(getattr(mask, 'lengths', ()))}")
def test_auto_gives_every_chunk_tokens(mask: Mask, n: int) -> None:
    """Methods on all layouts, on each kind alone, and on the assignments with any one other."""
    several = [(*LAYOUTS, *ASSIGNMENTS)] if isinstance(mask, Packed) else [tuple(LAYOUTS)]
    several += [(*ASSIGNMENTS, one) for one in LAYOUTS] if isinstance(mask, Packed) else []
    for among in several:
        layout = mask.layout("auto", n, among)
        tokens = np.broadcast_to(layout.chunk_tokens(np.arange(n), n, TOKENS), n)
        assert tokens.min() > 0, (layout.name, among)
        assert layout.gives_all_work(n, TOKENS)


def test_one_document_fewer_than_ranks_leaves_none_idle() -> None:
    """63 documents on 64 ranks are nearly even where none is cut, and a rank has nothing to do."""
    mask = Documents((1000, 1001, 999) * 21)
    assert not mask.layout("whole_documents").gives_all_work(64, mask.seqlen)
    assert mask.layout("whole_documents").gives_all_work(63, mask.seqlen)
    assert mask.layout("auto", 64).name != "whole_documents"
    assert mask.layout("auto", 63).name == "whole_documents"


@pytest.mark.parametrize(
    ("method", "mask", "gpus"),
    [
        ("all_gather", "window", 8),
        ("tokenring", "document", 8),
        ("tokenring", "window", 2),
        ("mesh", "chunked", 16),
        ("startrail", "document", 32),
    ],
)
def test_the_fastest_of_auto_uses_all_gpus(method: str, mask: str, gpus: int) -> None:
    assert_all_work(method, mask, gpus)


@pytest.mark.long
@pytest.mark.parametrize("gpus", [2, 8, 32])
@pytest.mark.parametrize("mask", ASKED)
@pytest.mark.parametrize("method", [name for name in REGISTRY if name != "reference"])
def test_the_fastest_of_auto_uses_all_gpus_with_any_method(method: str, mask: str, gpus: int) -> None:
    assert_all_work(method, mask, gpus)


def assert_all_work(method: str, mask: str, gpus: int) -> None:
    request = point(f"method={method}", f"gpus={gpus}", "seqlen=8k", "heads=32", *ASKED[mask].split(), *H100)
    choice = choose(request)
    for plan in choice.plans.values():
        assert account.pairs(plan, choice.problem).min() > 0, choice.problem.layout.name


def test_who_asks_for_an_assignment_gets_it() -> None:
    """By its name, and as one of all with layout=search; the front of memory against time is auto's, too."""
    keys = ("gpus=8", "seqlen=8k", *ASKED["window"].split(), *H100)
    named = choose(point("method=ring", "method.layout=whole_documents", *keys))
    assert named.problem.layout.name == "whole_documents"
    rows = choose(point("method=ring", "method.layout=search", *keys)).candidates
    assert rows and "whole_documents" in {row["layout"] for row in rows}
    front = memory_front(point("method=ring", *keys))
    assert front and "whole_documents" not in {one.layout for one in front}
