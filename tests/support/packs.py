"""Strategies that draw packs of documents."""

from __future__ import annotations

from hypothesis import strategies as st

from sp_bench.plan.documents import Documents, Packed, Window


@st.composite
def packs(draw: st.DrawFn, most_documents: int = 8, most_tokens: int = 30) -> Packed:
    """Documents of one token and more, causal or full inside, some with a window; or one sequence with a window."""
    causal = draw(st.booleans())
    left, right = (draw(st.none() | st.integers(0, most_tokens)) for _ in range(2))
    lengths = draw(st.lists(st.integers(1, most_tokens), min_size=1, max_size=most_documents))
    if draw(st.booleans()):
        return Documents(tuple(lengths), causal, left, right)
    return Window((sum(lengths),), causal, left, right)
