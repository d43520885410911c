"""Models of transformers' own classes with attn_implementation="sp_bench": right, or refused."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from sp_bench.measure.pool import RankPool
from tests.integrations import models
from tests.support.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the transformers package")

EXACT = 1e-5


@pytest.mark.parametrize("case", models.CASES)
def test_a_model_is_right_or_refused(ranks: Ranks, case: str) -> None:
    refusal, found = models.CASES[case][2], ranks.run(models.against_eager, case)[: models.RANKS]
    for each in found:
        if refusal:
            assert isinstance(each, str), f"computed, off by {each}"
            assert each.startswith(refusal)
            assert "would work" in each
            assert "tensor(" not in each
        else:
            assert isinstance(each, float), each
            assert each < EXACT


def test_one_result_for_a_sequence_is_refused(ranks: Ranks) -> None:
    """It would be that of the last token of each rank."""
    for each in ranks.run(models.of_a_sequence)[: models.RANKS]:
        assert each.startswith("LlamaForSequenceClassification: gives one result for a sequence")


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        ("its own", ""),
        ("one of single tokens", ""),
        ("a convolution", "model.layers.1.mlp (Conv1d): mixes tokens"),
        ("a recurrence", "model.layers.1.mlp (GRU): mixes tokens"),
        ("a mean", "model.layers.1.mlp (Averages): gives a token something else"),
        ("no attention", "model.layers.1 (LlamaDecoderLayer): has no attention that goes through the interface"),
    ],
)
def test_a_layer_that_mixes_tokens_is_refused_by_what_it_is(part: str, refusal: str) -> None:
    found = models.changed(part)
    assert (refusal in found) if refusal else not found


@pytest.mark.parametrize("how", ["takes more", "sharded"])
def test_parts_that_cant_be_tried_alone_are_tried_when_called(how: str) -> None:
    with RankPool(models.RANKS, timeout_s=60) as pool:  # what FSDP leaves of a model would be in the way of other tests
        for each in pool.run(models.not_tried_alone, how, True):
            assert "gives a token something else if other tokens are not there" in str(each)
        for each in pool.run(models.not_tried_alone, how, False):
            assert isinstance(each, float), each
            assert each < EXACT


@pytest.mark.parametrize("case", ["gpt2", "bert"])
def test_keys_of_another_sequence_are_refused(ranks: Ranks, case: str) -> None:
    """Whatever their number: here it is that of the queries."""
    for each in ranks.run(models.another_sequence, case)[: models.RANKS]:
        assert "its keys are of another sequence" in each
    assert not any(ranks.run(models.another_sequence, f"{case}, alone"))
