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


@pytest.mark.exhaustive
def test_logits_loss_and_gradients_are_those_of_eager_attention(ranks: Ranks) -> None:
    found = ranks.run(jobs.differences, CASES)[0]
    assert len(found) == len(CASES)
    for case, errors in zip(CASES, found, strict=True):
        assert max(errors) < EXACT, f"{case}: logits, loss, gradients are off by {errors}"


@pytest.mark.exhaustive
def test_what_is_not_computed_is_refused() -> None:
    wanted = (
        "attention_mask: padding is not masked",
        "use_cache=True: 1 queries and 8 keys",
        "attention_dropout=0.1: is not computed",
        "sliding_window=4: is shorter than the sequence",
        "softcap=30.0: is not computed",
        "position_ids: must count on from 0",
        "method=rings: there is no such method; did you mean ring?",
    )
    found = jobs.refusals()
    assert len(found) == len(wanted)
    for message, begin in zip(found, wanted, strict=True):
        assert message.startswith(begin)
        assert "would work" in message or "known:" in message
