"""attn_implementation="sp_bench": a Hugging Face decoder made from a config, against eager attention."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.integrations import jobs
from tests.support.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the transformers package")

EXACT = 1e-5
CASES = [
    ("mesh", 64, ()),
    ("ulysses", 64, ()),
    ("zigzag", 67, ()),
    ("ring", 64, (10, 30, 1, 23)),
]
"""Methods, lengths of the sequence, and of its documents."""


@pytest.mark.long
def test_logits_loss_and_gradients_are_those_of_eager_attention(ranks: Ranks) -> None:
    found = ranks.run(jobs.differences, CASES)[0]
    assert len(found) == len(CASES)
    for case, error in zip(CASES, found, strict=True):
        assert error < EXACT, f"{case}: off by {error}"


def test_a_padding_mask_is_refused() -> None:
    padded, ones = jobs.padded()
    assert padded.startswith("attention_mask: padding is not masked")
    assert "would work" in padded
    assert not ones


@pytest.mark.parametrize("checkpointing", [False, True])
def test_batches_carry_their_documents(ranks: Ranks, checkpointing: bool) -> None:
    found = ranks.run(_two_batches, checkpointing)[0]
    assert found
    assert max(found.values()) < EXACT, found


def _two_batches(checkpointing: bool) -> dict[str, float]:
    return jobs.two_batches(checkpointing=checkpointing)


def test_a_tensor_of_one_of_several_batches_is_told_apart_or_refused(ranks: Ranks) -> None:
    assert "gather(x, sharded)" in ranks.run(jobs.not_told_which)[0]


def test_rows_with_different_documents(ranks: Ranks) -> None:
    assert 0 < ranks.run(jobs.rows_that_differ)[0] < EXACT


def test_heads_that_ranks_do_not_divide(ranks: Ranks) -> None:
    assert 0 < ranks.run(jobs.padded_heads)[0] < EXACT


@pytest.mark.parametrize("packed", [True, False])
def test_layers_that_are_not_causal(ranks: Ranks, packed: bool) -> None:
    assert 0 < ranks.run(_not_causal, packed)[0] < EXACT


def _not_causal(packed: bool) -> float:
    return jobs.not_causal(packed=packed)


def test_other_batches_on_another_rank_are_refused_on_all(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(jobs.other_batches)[:2]):
        assert found[0].startswith("input_ids (1, 48) with documents of 48 tokens")
        assert "input_ids (1, 40)" in found[0]
        assert "20, 28" in found[1]
        assert "5, 30, 13" in found[1]
        assert all("all must have the same one" in each for each in found[:4])
        assert found[4].startswith(("on rank 1, ", "")[rank] + "position_ids: must count on from 0")
        assert not found[5]


def test_other_shapes_on_another_rank_are_refused_on_all(ranks: Ranks) -> None:
    for found in ranks.run(jobs.other_shapes)[:2]:
        assert "seqlen=16" in found[0]
        assert "seqlen=18" in found[0]
        assert "heads=4" in found[1]
        assert "k must be like q" in found[2]
        assert not found[3]


def test_losses_add_up_whatever_a_model_passes_on(ranks: Ranks) -> None:
    error, refusal = ranks.run(jobs.losses)[0]
    assert error < EXACT
    assert "computes its loss by code of its own" in refusal


def test_tokens_that_the_caller_shards_are_right_or_refused(ranks: Ranks) -> None:
    not_mine = "position_ids: are not those of this rank's tokens"
    wanted = (not_mine, "", not_mine, "", not_mine, "labels: are shifted", "")
    wanted += ("rope_type=longrope beyond 24 tokens", "attn_temperature_tuning from 16 tokens on")
    for found in ranks.run(jobs.sharded_by_caller)[:2]:
        for message, begin in zip(found, wanted, strict=True):
            assert (begin in message) if begin else not message, (found, wanted)


def test_frequencies_that_ranks_would_choose_apart_are_refused(ranks: Ranks) -> None:
    for beyond, below in ranks.run(jobs.frequencies)[:2]:
        assert beyond.startswith("rope_type=longrope beyond 24 tokens: chooses its frequencies")
        assert not below


@pytest.mark.long
def test_packings_in_bounded_memory(ranks: Ranks) -> None:
    assert_bounded(ranks, 48)


@pytest.mark.long
def test_200_packings_in_bounded_memory(ranks: Ranks) -> None:
    assert_bounded(ranks, 200)


def assert_bounded(ranks: Ranks, count: int) -> None:
    for found in ranks.run(jobs.packings, count)[:2]:
        alive, _ = found.pop("tensors")
        assert len(found) == 4
        for nbytes, engines in found.values():
            assert 0 < nbytes < 2**20
            assert engines <= 16
        assert alive < 16 * 2**20


def test_what_is_not_computed_is_refused() -> None:
    wanted = (
        "attention_mask: padding is not masked",
        "attention_mask: is a tensor of shape (1, 1, 8, 8)",
        "use_cache=True: 1 queries and 8 keys",
        "attention_dropout=0.1: is not computed",
        "softcap=30.0: is not computed",
        "position_bias (4,): is not computed",
        "the mask that the model makes for its layers: a window of 4 tokens to both sides",
        "position_ids: must count on from 0",
        "position_ids: has shape (3, 1, 8)",
        "Identity on 4 tokens: this rank has 8 tokens of the batch",
        "method=rings: there is no such method; did you mean ring?",
    )
    found = jobs.refusals()
    assert len(found) == len(wanted)
    for message, begin in zip(found, wanted, strict=True):
        assert message.startswith(begin)
        assert "would work" in message or "known:" in message
        assert "tensor(" not in message
        assert not any(f"{name}=None would work" in message for name in ("sliding_window", "position_bias", "softcap"))
