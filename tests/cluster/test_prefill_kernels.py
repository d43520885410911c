"""Kernels of few queries behind many keys, beside published times of cuDNN on one GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies.inference.kernels import Call, errors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Call, float]:
    return errors(Runs(tmp_path_factory.mktemp("records"), workers=1))


def of(found: Mapping[Call, float], gpu: str, *, alone: bool | None = None) -> np.ndarray:
    kept = [e for call, e in found.items() if call.gpu == gpu and alone in (None, call.keys == call.queries)]
    return np.abs(kept)


def test_an_h200_takes_as_long_as_published(found: Mapping[Call, float]) -> None:
    """In calls that no figure is fitted to: few queries, and few heads."""
    assert of(found, "NVIDIA H200").size == 80
    assert np.median(of(found, "NVIDIA H200")) < 0.08 and of(found, "NVIDIA H200").max() < 0.16


def test_causal_thread_blocks_end_with_the_longest(found: Mapping[Call, float]) -> None:
    """With the longest first, 4k tokens of 8 heads would take 0.6 of what they took."""
    (error,) = [e for call, e in found.items() if (call.gpu, call.heads, call.queries) == ("NVIDIA H200", 8, 4096)]
    assert abs(error) < 0.07


def test_a_newer_cudnn_on_a_b200_is_faster_than_the_figures(found: Mapping[Call, float]) -> None:
    """By as much with few heads as with many: the thread blocks are those that are assumed."""
    alone = of(found, "NVIDIA B200", alone=True)
    assert alone.size == 8 and alone.min() > 0.18 and alone.max() < 0.4
