"""sp_bench.advise: what it ranks, refuses and claims, and what backs that."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from sp_bench.advise import evidence
from sp_bench.advise.__main__ import heading, how_to, main, size, what_changes
from sp_bench.advise.candidates import Answer, Feasible, answer
from sp_bench.advise.changes import changes
from sp_bench.advise.flags import FRAMEWORKS, settings
from sp_bench.methods import REGISTRY, build

ROOT = Path(__file__).parents[2]
ASKED = ["gpus=16", "seqlen=32k", "model=llama3_8b", "cluster=h100_ndr400"]


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(ASKED)


def test_errors_are_those_of_the_measured_points() -> None:
    with (ROOT / "docs/results/validation.csv").open() as file:
        errors = [abs(float(row["step_error"])) for row in csv.DictReader(file) if row["status"] == "ok"]
    assert len(errors) == evidence.POINTS
    assert round(float(np.percentile(errors, 90)), 3) == evidence.USUAL_ERROR
    assert round(max(errors), 2) == evidence.LARGEST_ERROR


def test_an_interval_is_what_would_be_measured() -> None:
    """With simulated / measured - 1 at either end of the usual error."""
    found = evidence.interval(100.0)
    assert found.step_ms / found.low_ms - 1 == pytest.approx(evidence.USUAL_ERROR)
    assert found.step_ms / found.high_ms - 1 == pytest.approx(-evidence.USUAL_ERROR)
    assert found.overlaps(evidence.interval(110.0))
    assert not found.overlaps(evidence.interval(120.0))


def test_all_methods_are_ranked_or_refused(found: Answer) -> None:
    names = [each.method.name for each in found.feasible]
    assert {*names, *found.refused} == {*REGISTRY} - {"reference"}
    steps = [each.time.step_ms for each in found.feasible]
    assert steps == sorted(steps)
    record = found.feasible[0].record
    assert (record.mode, record.workload, record.heads, record.kv_heads) == ("simulate", "attention", 32, 8)


def test_memory_rules_methods_out(found: Answer) -> None:
    needed = sorted(each.record.peak_mem_bytes_max or 0 for each in found.feasible)
    limit = (needed[0] + needed[-1]) / 2
    tight = answer(ASKED, memory_bytes=limit)
    assert tight.refused
    assert all((each.record.peak_mem_bytes_max or 0) <= limit for each in tight.feasible)
    assert all("GB a GPU, of" in why for why in tight.refused.values())


def test_no_answer_beyond_what_is_backed(found: Answer) -> None:
    """A tie names everybody in it, and an unmeasured cluster says so, also where there is no tie."""
    first = found.feasible[0]
    tied = "\n".join(heading(Answer(found.config, [first, Feasible(first.method, first.record)])))
    assert f"One of {first.name}, {first.name}: which of them is the fastest is within" in tied
    alone = "\n".join(heading(Answer(found.config, [first])))
    assert f"{first.name} comes first, by more than the simulator's usual error." in alone
    for text in (tied, alone):
        assert "All times are simulated." in text
        assert "No step was measured on h100_ndr400, whose kernel rates are assumed and published" in text


def test_what_would_change_the_answer(found: Answer) -> None:
    few = Answer(found.config, found.feasible[:2])
    varied = changes(ASKED, few, memory_bytes=None)
    assert [change.what for change in varied] == [
        "NICs at half the rate",
        "NICs at twice the rate",
        "as many key heads as heads, 32",
        "a quarter of the key heads, 2",
        "a quarter of the length, 8,192",
        "four times the length, 131,072",
    ]
    for change in varied:
        assert change.first is not None
        assert change.was_first is not None
        assert change.first.time.step_ms <= change.was_first.time.step_ms
        assert change.changes == (not change.first.time.overlaps(change.was_first.time))
    assert len(what_changes(few, varied)) == 2 + len(varied)


@pytest.mark.parametrize(
    ("name", "options", "framework", "says"),
    [
        ("ulysses", {}, "Megatron-LM", "--context-parallel-size 8 --cp-comm-type a2a"),
        ("usp", {"ulysses": 4}, "Megatron-LM", "a2a+p2p --hierarchical-context-parallel-sizes 4 2"),
        ("zigzag", {}, "torchtitan", "context_parallel_degree 8 --parallelism.context_parallel_rotate_method alltoall"),
        ("all_gather", {}, "torchtitan", "rotate_method allgather"),
        ("ulysses", {}, "DeepSpeed", "sequence_parallel_size=8"),
        ("usp", {"ulysses": 2}, "diffusers", "ContextParallelConfig(ulysses_degree=2, ring_degree=4)"),
        ("usp", {"ulysses": 2}, "yunchang", "set_seq_parallel_pg(2, 4, rank, world_size)"),
        ("striped", {}, "yunchang", 'ring_impl_type="strip"'),
        ("mesh", {"tile": (2, 4)}, "sp_bench", 'SequenceParallelAttention("mesh", tile=(2, 4)'),
    ],
)
def test_settings(name: str, options: dict[str, object], framework: str, says: str) -> None:
    layout = {"striped": "striped", "zigzag": "zigzag"}.get(name, "contiguous")
    assert says in settings(build(name, options), 8, layout)[framework]


def test_a_method_that_no_framework_has_comes_with_the_best_that_one_has(found: Answer) -> None:
    mesh = next(each for each in found.feasible if each.method.name == "mesh")
    lines = how_to(Answer(found.config, [mesh, *found.feasible]))
    assert f"  {mesh.name}: no framework of the five has it" in lines
    assert any(line.split()[0] in FRAMEWORKS for line in lines if line.startswith("    "))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "three.svg"
    assert main([*ASKED, "memory=60GB", "changes=false", f"plots={figure}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("One attention of 32,768 tokens, batch 1, 32 heads (8 of keys) of 128, causal, bfloat16")
    assert "How to run it:" in printed
    assert figure.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory=60"], "memory=60: is no size; memory=60GB, or GiB, would work"),
        (["method=mesh"], "method=mesh: is what the advice is about"),
        (["model=llama9"], "model=llama9: there is no such model"),
        (["changes=maybe"], "changes=maybe: must be true or false"),
        (["gpus=16", "seqlen=4", "changes=false"], "no method can serve it"),
        (["memory=1MB", "gpus=16", "seqlen=32k"], "no method can serve it"),
    ],
)
def test_bad_requests(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_sizes() -> None:
    assert (size("60GB"), size("1.5 GiB")) == (60e9, 1.5 * 2**30)
