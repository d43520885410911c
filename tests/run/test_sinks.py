"""Sinks: one more score a head in every softmax. On real ranks against fp64, with the gradient of the sinks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench import SequenceParallelAttention
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from sp_bench.plan.documents import Window
from tests.run import jobs
from tests.run.matrix import everything
from tests.support.attention_cases import DTYPES, Case, of_each_method, of_one_batch_entry, relative
from tests.support.marks import exhaustive, long
from tests.support.ranks import Ranks

MOST = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1.5e-2}
NAMES = ("out", "dq", "dk", "dv", "sinks")


def spread(cases: Iterable[Case]) -> list[Case]:
    """The cases with layouts, masks, dtypes, windows and histories in turn."""
    found = []
    for i, case in enumerate(cases):
        layouts, window = REGISTRY[case.method].layouts, i % 5 == 4
        pack = Window((case.seqlen,), True, case.seqlen // 3, None) if window else None
        layout = "auto" if window else layouts[i % len(layouts)]
        case = replace(case, layout=layout, causal=i % 3 > 0, dtype=DTYPES[i // 2 % 3], pack=pack)
        behind = i % 4 == 1 and not pack and case.causal
        found.append(replace(case, kv_seqlen=3 * case.seqlen + 1 if behind else None))
    return found + of_one_batch_entry(found)


@pytest.mark.parametrize("n", [1, 2, long(3), exhaustive(4)])
def test_every_method_with_sinks(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, n, of_each_method(spread(everything(n)), 6, turn=n))


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.sampled_from([1, 2, 3, 4, 6, 8]),
    history=st.integers(0, 150),
    left=st.none() | st.integers(0, 60),
    turn=st.integers(0, 30),
)
def test_any_window_and_history(ranks: Ranks, n: int, history: int, left: int | None, turn: int) -> None:
    """Three variants of any methods."""
    every, found = everything(n), list[Case]()
    for i in range(3):
        case = replace(every[(turn + i * len(every) // 3) % len(every)], causal=True, dtype="float64")
        pack = None if left is None else Window((case.seqlen,), True, left, None).behind([[history]])
        keys = None if pack or not history else case.seqlen + history
        found.append(replace(case, layout="auto", pack=pack, kv_seqlen=keys))
    assert_exact(ranks, n, found)


def assert_exact(ranks: Ranks, n: int, cases: list[Case]) -> None:
    """Results and gradients are those of the definition in fp64, and the sinks' gradient is the same on all ranks."""
    answers = ranks.run(jobs.find_differences_with_sinks, cases)
    wrong = []
    for case in cases:
        by_tensor = zip(*(answer[case] for answer in answers[:n]), strict=True)
        for name, shares in zip(NAMES, by_tensor, strict=True):
            one = shares[:1] if name == "sinks" else shares  # which is the same on all ranks
            if not (error := relative(one)) <= MOST[case.dtype]:
                wrong.append(f"{case}: {name} is off by {error:.1e}")
    assert not wrong, f"{len(wrong)} results are wrong:\n" + "\n".join(wrong)


def test_scores_that_nothing_is_left_beside_and_others_that_hardly_count() -> None:
    """A sink of -inf changes nothing, and has no gradient; a large one takes all."""
    attention, q = SequenceParallelAttention("ring"), torch.randn(1, 8, 2, 16, dtype=torch.float64)
    sinks = torch.tensor([-torch.inf, 1e4], requires_grad=True)
    out = attention(q, q, q, sinks=sinks)
    assert torch.equal(out[:, :, 0], attention(q, q, q)[:, :, 0]) and not out[:, :, 1].any()
    out.sum().backward()
    assert sinks.grad is not None and not sinks.grad.any() and sinks.grad.isfinite().all()


def test_sinks_that_are_not_one_for_each_head() -> None:
    attention, q = SequenceParallelAttention("ring"), torch.randn(1, 8, 4, 16)
    with pytest.raises(RequestError, match=r"sinks \(2,\) .* are a score for each of 4 query heads, .*; \(4,\) would"):
        attention(q, q[:, :, :2], q[:, :, :2], sinks=torch.zeros(2))
