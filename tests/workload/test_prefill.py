"""Chunks of a prompt: what each sees, and what ranks keep of it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.methods import REGISTRY
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.problem import Problem
from sp_bench.workload.gate import GateErrors, worst_of
from sp_bench.workload.prefill import Chunking, Prefill
from sp_bench.workload.prefill_costs import layer_cache_bytes
from sp_bench.workload.prefill_step import watched
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks
from tests.workload import jobs
from tests.workload.requests import METHODS, prompting


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
    assume(last == 0 or last % chunk == 0 or last % chunk >= 2 * n)  # a token in each piece of the last chunk
    workload.refuse(prompt, "simulate", None)
    chunks = workload.attentions(prompt)
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
    assert described.kv_cache_bytes == layer_cache_bytes(prompt)


EXACT = 1e-13
"""Relative L2 error of a prompt's outputs in fp64."""
REFUSED = ("group_cast", "hybrid_cp")
"""Methods that cast rows of whole packs, behind no history."""


def assert_exact(ranks: Ranks, points: list[str]) -> None:
    found = ranks.run(jobs.prompt_errors, [prompting(*each.split()) for each in points])[0]
    assert len(found) == len(points)
    for named, error in zip(points, found, strict=True):
        assert error < EXACT, f"{named}: off by {error:.1e}"


TAKEN = tuple(name for name in METHODS if name not in REFUSED)


@pytest.mark.parametrize("methods", [("ring", "usp", "mesh", "pass_q"), exhaustive(TAKEN)], ids=len)
def test_chunks_are_the_whole_prompt_with_every_method(ranks: Ranks, methods: tuple[str, ...]) -> None:
    shape = "gpus=4 heads=4 kv_heads=4 seqlen=75 prefill.chunk=16 prefill.cached=12"
    assert_exact(ranks, [f"method={name} {shape}" for name in methods])


LIMITED = ("mask=window window=[20,0]", "mask=window window=[90,0]", "mask=chunked chunk=22")


@pytest.mark.long
@pytest.mark.parametrize("methods", [("ring", "usp", "mesh", "pass_q", "group_cast"), exhaustive(METHODS)], ids=len)
def test_windows_and_chunks_of_a_mask_see_the_end_of_earlier_ones(ranks: Ranks, methods: tuple[str, ...]) -> None:
    """Also with sinks, and with what was assigned in pieces of other lengths."""
    shape = "gpus=4 heads=4 kv_heads=4 seqlen=75 prefill.chunk=16 prefill.cached=12"
    points = []
    for i, name in enumerate(methods):
        layout = "zigzag" if "zigzag" in REGISTRY[name].all_layouts() else "auto"
        points.append(f"method={name} {LIMITED[i % 3]} sinks={i % 2 == 0} method.layout={layout} {shape}")
    assert_exact(ranks, points)


@settings(max_examples=6)
@given(
    method=st.sampled_from(["ring", "usp", "mesh", "group_cast"]),
    gpus=st.sampled_from([1, 2, 4, 8]),
    each=st.integers(2, 9),
    chunks=st.integers(1, 4),
    cached=st.integers(0, 5),
    left=st.integers(0, 60),
    layout=st.sampled_from(["contiguous", "striped", "zigzag", "auto"]),
)
def test_any_window_over_a_cache(
    ranks: Ranks, method: str, gpus: int, each: int, chunks: int, cached: int, left: int, layout: str
) -> None:
    layout = layout if method in ("ring", "usp") or layout != "striped" else "zigzag"
    lengths = f"seqlen={chunks * each * gpus} prefill.chunk={each * gpus} prefill.cached={cached * gpus}"
    asked = f"method={method} gpus={gpus} heads=8 kv_heads=4 method.layout={layout} mask=window window=[{left},0]"
    assert_exact(ranks, [f"{asked} {lengths}"])


@settings(max_examples=6)
@given(
    method=st.sampled_from(["ring", "usp", "mesh", "all_gather", "tokenring"]),
    gpus=st.sampled_from([1, 2, 4, 6, 8]),
    each=st.integers(2, 9),
    chunks=st.integers(1, 4),
    rest=st.integers(0, 8),
    cached=st.integers(0, 5),
    kv_heads=st.sampled_from([8, 4]),
    batch=st.integers(1, 2),
)
def test_chunks_of_any_size_are_the_whole_prompt(
    ranks: Ranks, method: str, gpus: int, each: int, chunks: int, rest: int, cached: int, kv_heads: int, batch: int
) -> None:
    chunk = each * gpus
    seqlen = chunks * chunk + (min(2 * gpus + rest, chunk) if rest else 0)
    lengths = f"seqlen={seqlen} prefill.chunk={chunk} prefill.cached={cached * gpus}"
    assert_exact(ranks, [f"method={method} gpus={gpus} heads=8 kv_heads={kv_heads} batch={batch} {lengths}"])


@pytest.mark.parametrize(("chunks", "wanted"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 4, 8])])
def test_which_chunks_are_compared(chunks: int, wanted: list[int]) -> None:
    assert watched(chunks) == wanted


def test_of_several_chunks_the_wrong_one_counts() -> None:
    right, off = (GateErrors(overall={"out": error}, rows=(3, 0)) for error in (1e-7, 1e-3))
    lost = GateErrors(overall={"out": 1e-7}, lost={"out": 2}, rows=(3, 0))
    unknown = GateErrors(uncompared="memory ran out")
    assert worst_of([right, off, right], "float32", 9) == GateErrors(overall={"out": 1e-3}, rows=(9, 0), seqlen=9)
    assert "2 rows of out are wrong" in worst_of([right, lost, unknown], "float32", 9).wrong("float32")
    assert worst_of([right, unknown], "float32", 9).uncompared == "memory ran out"
