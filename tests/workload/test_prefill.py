"""Chunks of a prompt: what each sees, and what ranks keep of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.problem import Problem
from sp_bench.workload.prefill import Chunking, Prefill
from sp_bench.workload.prefill_costs import layer_cache_bytes


def prompt_of(seqlen: int, n: int, layout: str = "zigzag", cached: int = 0, batch: int = 1) -> Problem:
    """A whole prompt behind what is cached."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "batch": batch}
    return Problem(n=n, seqlen=seqlen, kv_seqlen=seqlen + cached, layout=LAYOUTS[layout], **shape)


def prefill(chunk: int | None, cached: int = 0) -> Prefill:
    return Prefill(phases=("forward",), chunking=Chunking(chunk=chunk, cached=cached))


@given(
    n=st.integers(1, 8),
    layout=st.sampled_from(sorted(LAYOUTS)),
    each=st.integers(2, 40),
    whole=st.integers(1, 5),
    rest=st.integers(0, 40),
    cached=st.integers(0, 30),
)
def test_each_chunk_finds_the_cache_as_the_ones_before_left_it(
    n: int, layout: str, each: int, whole: int, rest: int, cached: int
) -> None:
    """On every rank: its keys are those of the history, as many as it had after the last chunk, and its new ones."""
    chunk, last = each * n, rest * n // 3 if rest * n // 3 >= 2 * n else 0
    workload = prefill(chunk, cached * n)
    prompt = prompt_of(whole * chunk + last, n, layout, cached * n)
    workload.refuse(prompt, "simulate", None)
    chunks = workload.chunks(prompt)
    assert sum(one.seqlen for one in chunks) == prompt.seqlen and chunks[-1].keys.seqlen == prompt.keys.seqlen
    held = [cached] * n
    for one in chunks:
        for rank in range(n):
            new = one.queries.tokens(rank)
            assert one.keys.tokens(rank) - new == held[rank]
            held[rank] += new
    assert sum(held) == prompt.keys.seqlen
    assert sum(account.model_flops(one, "forward") for one in chunks) == account.model_flops(prompt, "forward")


@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_is_every_key_and_value_once(batch: int) -> None:
    prompt = prompt_of(64, 4, cached=32, batch=batch)
    assert 4 * layer_cache_bytes(prompt) == 96 * batch * 2 * (2 * 16) * 4
    described = prefill(16, 32).prompt(prompt)
    assert (described.chunks, described.prefill_chunk, described.prefill_cached) == (4, 16, 32)
    assert described.cache_bytes == layer_cache_bytes(prompt)
