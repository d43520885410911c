"""The output of advice: settings that give the mask that was asked for, and Python that is executed here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from sp_bench.advise.__main__ import how_to
from sp_bench.advise.candidates import Answer, Question, answer
from sp_bench.advise.code import Wanted
from sp_bench.advise.flags import FRAMEWORKS, OURS, settings
from sp_bench.cli.compose import Composer
from sp_bench.measure.pool import RankPool
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.mask import CAUSAL, FULL, MASKS, Mask
from sp_bench.point.masks import mask_of
from tests.advise import jobs
from tests.advise.jobs import Printed
from tests.support.attention_cases import relative
from tests.support.bounds import FLOORS

World = Callable[[int], RankPool]

SHAPE = ["seqlen=64", "heads=4", "kv_heads=2", "cluster=h100_ndr400"]
ASKED = {
    "causal": ["mask=causal"],
    "full": ["mask=full"],
    "window": ["mask=window", "window=[9,0]"],
    "window ahead": ["mask=window", "window=[9,4]"],
    "chunked": ["mask=chunked", "chunk=24"],
    "document": ["mask=document", "data=short", "data.median=9", "seed=3"],
    "full documents": ["mask=document", "data=lengths", "data.lengths=[40,4,20]", "causal=false"],
    "window in documents": ["mask=document", "data=equal", "data.tokens=24", "window=[9,0]"],
    "no even shards": ["mask=causal", "seqlen=61"],
}
"""Every kind of mask, as it is asked for."""


def wanted_of(words: Iterable[str], gpus: int, methods: Iterable[str] = tuple(REGISTRY)) -> list[Wanted]:
    """Requests that advice has settings for: every method at its fastest degrees."""
    keys = {word.partition("=")[0] for word in words}
    shape = [word for word in SHAPE if word.partition("=")[0] not in keys]
    found = answer(Question([f"gpus={gpus}", *shape, *words], tuple(methods)))
    return [Wanted.of(each.method, each.record) for each in found.feasible]


def laid_out_otherwise(wanted: Wanted) -> list[Wanted]:
    """The same in all layouts that the method has under the mask."""
    names = [name for name in wanted.method.all_layouts() if isinstance(wanted.mask, Packed) or name not in ASSIGNMENTS]
    return [replace(wanted, layout=name) for name in names]


def printed(wanted: Wanted, text: str, dtype: str = "float64") -> Printed:
    layout = wanted.method.layout_for(wanted.mask.layout(wanted.layout), wanted.gpus)
    return Printed(text, wanted.mask, layout, wanted.seqlen, wanted.heads, wanted.kv_heads, dtype)


def assert_right(world: World, cases: list[Printed]) -> None:
    by_rank = world(2).run(jobs.differences, cases)
    for case, shares in zip(cases, zip(*by_rank, strict=True), strict=True):
        errors = [relative(share) for share in zip(*shares, strict=True)]
        assert max(errors) < FLOORS[case.dtype], f"{case.code}: {errors}"


FEW = 4
"""Methods that each mask has in a short run."""


@pytest.mark.parametrize("name", ASKED)
def test_our_python_has_the_mask_that_was_asked_for(world: World, name: str) -> None:
    """In the layout that is a method's fastest; what is printed is executed as it stands. Methods take turns."""
    methods = [method for method in REGISTRY if method != "reference"]
    first = FEW * list(ASKED).index(name)
    wanted = wanted_of(ASKED[name], 2, [methods[(first + i) % len(methods)] for i in range(FEW)])
    assert_right(world, [printed(each, settings(each)[OURS]) for each in wanted])


@pytest.mark.long
@pytest.mark.parametrize("words", ASKED.values(), ids=ASKED)
def test_our_python_in_all_layouts(world: World, words: list[str]) -> None:
    cases = [other for each in wanted_of(words, 2) for other in laid_out_otherwise(each)]
    assert_right(world, [printed(each, settings(each)[OURS]) for each in cases])


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("yunchang"), reason="yunchang is not installed")
def test_python_of_frameworks_has_it_too(world: World) -> None:
    names = ("ulysses", "ring", "zigzag", "striped", "usp")
    found = [each for words in ASKED.values() for each in wanted_of(words, 2, names)]
    cases = [(each, settings(each).get("yunchang")) for wanted in found for each in laid_out_otherwise(wanted)]
    several = [printed(each, text, "bfloat16") for each, text in cases if text]
    assert {case.mask for case in several} == {CAUSAL, FULL}
    world(2).run(jobs.stand_in_for_flash_attn)
    assert_right(world, several)


def test_a_setting_is_for_the_mask_and_the_shape() -> None:
    """Under no other mask than those whose support was read in the framework's source, and never for uneven shards."""
    known = {
        "torchtitan": {"causal", "document"},
        "Megatron-LM": {"causal", "window"},
        "DeepSpeed": {"causal", "document"},
        "diffusers": {"full"},
        "yunchang": {"causal", "full"},
    }
    assert {*known} == {*FRAMEWORKS}
    found: dict[str, set[str]] = {name: set() for name in FRAMEWORKS}
    options: dict[str, dict[str, object]] = {"usp": {"ulysses": 2}, "ulysses_all_gather": {"ulysses": 2}}
    for name, words in ASKED.items():
        with Composer() as composer:
            config = composer.compose([*SHAPE[:1], *words])
        mask = mask_of(config, 0, int(config["seqlen"]))
        for method in ("ulysses", "all_gather", "zigzag", "striped", "ring", *options):
            asked = wanted(method, options.get(method, {}), mask, seqlen=config["seqlen"], config=config, gpus=4)
            for other in laid_out_otherwise(asked):
                for framework in {*settings(other)} - {OURS}:
                    found[framework].add(name)
    assert found == known


def wanted(name: str, options: dict[str, object], mask: Mask = CAUSAL, **changes: object) -> Wanted:
    layout = {"striped": "striped", "zigzag": "zigzag", "all_gather": "zigzag", "usp": "zigzag", "ring": "zigzag"}
    fields: dict = {"heads": 32, "kv_heads": 32, "batch": 1, "seqlen": 2**15, "seed": 0, "config": {}, "gpus": 8}
    fields |= {"kv_seqlen": None, "layout": layout.get(name, "contiguous"), **changes}
    return Wanted(method=build(name, options), mask=mask, **fields)


@pytest.mark.parametrize(
    ("asked", "framework", "says"),
    [
        (wanted("ulysses", {}), "Megatron-LM", "--context-parallel-size 8 --cp-comm-type a2a"),
        (wanted("usp", {"ulysses": 4}), "Megatron-LM", "a2a+p2p --hierarchical-context-parallel-sizes 4 2"),
        (wanted("usp", {"ulysses": 1}), "Megatron-LM", "--cp-comm-type p2p"),
        (wanted("ulysses", {}, Window((2**15,), left=4095)), "Megatron-LM", "--cp-comm-type a2a --window-size 4095,0"),
        (wanted("all_gather", {}), "torchtitan", "context_parallel_load_balancer headtail"),
        (wanted("all_gather", {}), "torchtitan", "spmd_backend spmd_types"),
        (wanted("all_gather", {}, Documents((2**15,)), layout="blocks"), "torchtitan", "load_balancer ptrr"),
        (wanted("ulysses", {}), "DeepSpeed", "sequence_parallel_size=8"),
        (wanted("ulysses", {}, Documents((2**14, 2**14))), "DeepSpeed", "position_ids that restart with each document"),
        (wanted("all_gather", {}, FULL), "diffusers", "ContextParallelConfig of ring_degree=8"),
        (wanted("ulysses_all_gather", {"ulysses": 2}, FULL), "diffusers", "ulysses_degree=2, ring_degree=4"),
        (wanted("usp", {"ulysses": 2}), "yunchang", "set_seq_parallel_pg(2, 4, dist.get_rank(), 8)"),
        (wanted("striped", {}), "yunchang", 'ring_impl_type="strip"'),
        (wanted("ulysses", {}, FULL), "yunchang", "causal=False"),
        (wanted("mesh", {"tile": (2, 4)}), OURS, 'SequenceParallelAttention("mesh", tile=(2, 4), layout="contiguous")'),
        (wanted("ulysses", {}), OURS, 'SequenceParallelAttention("ulysses")'),
        (wanted("ulysses", {}, FULL), OURS, 'SequenceParallelAttention("ulysses", mask="full")'),
        (wanted("ulysses", {}, Chunked.of(8192, 20000), seqlen=20000), OURS, "documents([8192] * 2 + [3616])"),
        (wanted("ulysses", {}, config={"wire_dtype": "float32"}), OURS, 'wire_dtype="float32"'),
        (wanted("ring", {}, kv_seqlen=2**16), OURS, "attention(q, k, v, seqlen=32768, kv_seqlen=65536)"),
        (wanted("ring", {}, config={"sinks": True}), OURS, "attention(q, k, v, sinks=sinks)"),
    ],
)
def test_settings(asked: Wanted, framework: str, says: str) -> None:
    assert says in settings(asked)[framework]


@pytest.mark.parametrize(
    ("asked", "framework"),
    [
        (wanted("ulysses", {}, kv_heads=4), "Megatron-LM"),  # Transformer Engine's a2a splits key heads evenly
        (wanted("ring", {}, layout="contiguous"), "Megatron-LM"),
        (wanted("zigzag", {}, Window((2**15,), left=4095)), "Megatron-LM"),
        (wanted("ulysses", {}, Window((2**15,), causal=False, left=9, right=9)), "Megatron-LM"),
        (wanted("ring", {}), "torchtitan"),
        (wanted("ulysses", {}, Documents((2**14, 2**14)), batch=2), "DeepSpeed"),
        (wanted("ulysses", {}, FULL, kv_heads=8), "diffusers"),
        (wanted("ring", {}, FULL), "diffusers"),  # its rings gather
        (wanted("zigzag", {}, FULL), "yunchang"),  # its zigzag rings assert a causal mask
        (wanted("ulysses", {}, seqlen=2**15 + 8), "Megatron-LM"),
        (wanted("ulysses", {}, kv_seqlen=2**16), "DeepSpeed"),
        (wanted("ulysses", {}, config={"sinks": True}), "DeepSpeed"),
    ],
)
def test_what_a_framework_refuses_is_left_out(asked: Wanted, framework: str) -> None:
    assert framework not in settings(asked)


def test_a_mask_that_the_suite_gets_is_printed_and_no_framework_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(type(FULL)):
        name = "mine"

    monkeypatch.setitem(MASKS, "mine", Mine())  # pyright: ignore[reportArgumentType]
    assert settings(wanted("ulysses", {}, MASKS["mine"])).keys() == {OURS}
    assert 'mask="mine"' in settings(wanted("ulysses", {}, MASKS["mine"]))[OURS]


def test_every_setting_names_the_version_that_it_was_checked_against() -> None:
    found = answer(Question(["gpus=2", *SHAPE, "mask=causal"], ("mesh", "ulysses")))
    labels = [line for line in how_to(Answer(found.config, found.feasible)) if re.match(r"    \S", line)]
    assert len(labels) > 2
    for line in labels:
        framework = re.split(r"[ :]", line.strip())[0]
        assert framework == OURS or line == f"    {framework} ({FRAMEWORKS[framework].checked}):"


@pytest.mark.parametrize("layout", ASSIGNMENTS)
@pytest.mark.parametrize(("name", "options"), [("ring", {}), ("usp", {"ulysses": 2}), ("all_gather", {})])
def test_layouts_of_documents_have_settings(name: str, options: dict[str, object], layout: str) -> None:
    """Advice ended in a KeyError where a layout of documents was the fastest."""
    asked = wanted(name, options, Documents((2**14, 2**14)), layout=layout)
    assert f'layout="{layout}"' in settings(asked)[OURS]
