"""Strategies that draw packs of documents."""

from __future__ import annotations

from hypothesis import strategies as st

from sp_bench.plan.documents import Chunked, Documents, Packed, Window


@st.composite
def packs(draw: st.DrawFn, most_documents: int = 8, most_tokens: int = 30, *, cached: bool = False) -> Packed:
    """Documents of one token and more, causal or full inside, some with a window; or one sequence with a window or,
    with what is `cached` of some of them before, in chunks.
    """
    causal = draw(st.booleans())
    left, right = (draw(st.none() | st.integers(0, most_tokens)) for _ in range(2))
    lengths = draw(st.lists(st.integers(1, most_tokens), min_size=1, max_size=most_documents))
    if not cached:
        return _pack(draw, lengths, causal, left, right)
    stretches = st.lists(st.integers(0, most_tokens), max_size=3)
    if draw(st.integers(0, 4)) == 0:
        tokens = draw(st.integers(1, most_tokens))
        return Chunked.of(tokens, sum(lengths), causal=causal, cached=draw(stretches))
    mask = _pack(draw, lengths, causal, left, right)
    return mask.behind([draw(stretches) for _ in mask.lengths])


def _pack(draw: st.DrawFn, lengths: list[int], causal: bool, left: int | None, right: int | None) -> Packed:
    if draw(st.booleans()):
        return Documents(tuple(lengths), causal, left, right)
    return Window((sum(lengths),), causal, left, right)
