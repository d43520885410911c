"""sp_bench.advise: what it ranks, refuses and claims, and what backs that."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.advise.__main__ import backing, heading, how_to, main, size, what_changes
from sp_bench.advise.candidates import LEFT_OUT, Answer, Feasible, Question, answer
from sp_bench.advise.changes import changes
from sp_bench.advise.flags import FRAMEWORKS
from sp_bench.cli.columns import SEVERAL
from sp_bench.methods import REGISTRY
from tests.support.marks import exhaustive

ASKED = ["gpus=16", "seqlen=32k", "model=llama3_8b", "cluster=h100_ndr400", "implementation=published"]


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(Question(ASKED))


@pytest.mark.long
def test_an_interval_is_what_would_be_measured(found: Answer) -> None:
    """With simulated / measured - 1 at either end of the error of the record's own validation."""
    for each in found.feasible:
        time, record = each.time, each.record
        assert time.step_ms == record.step_ms_median
        if (error := record.validation_error) is None:
            assert time.low_ms is time.high_ms is None
        else:
            assert time.step_ms / (time.low_ms or 0) - 1 == pytest.approx(error)
            assert time.step_ms / (time.high_ms or 0) - 1 == pytest.approx(-error)
    names = {each.method.name: each.time.backed for each in found.feasible}
    assert names["zigzag"] and names["ulysses"] and not names["mesh"]


@pytest.mark.long
def test_all_methods_are_ranked_or_refused(found: Answer) -> None:
    names = [each.method.name for each in found.feasible]
    assert {*names, *found.refused} == {*REGISTRY} - {*LEFT_OUT}
    steps = [each.time.step_ms for each in found.feasible]
    assert steps == sorted(steps)
    record = found.feasible[0].record
    assert (record.mode, record.workload, record.heads, record.kv_heads) == ("simulate", "attention", 32, 8)


@pytest.mark.long
def test_memory_rules_methods_out(found: Answer) -> None:
    needed = sorted(each.record.peak_mem_bytes_max or 0 for each in found.feasible)
    limit = (needed[0] + needed[-1]) / 2
    tight = answer(Question(ASKED), memory_bytes=limit)
    assert tight.refused
    assert all((each.record.peak_mem_bytes_max or 0) <= limit for each in tight.feasible)
    assert all("GB a GPU, of" in why for why in tight.refused.values())


@pytest.mark.long
def test_no_answer_beyond_what_is_backed(found: Answer) -> None:
    """A tie names everybody in it, and says of each what backs it, or that nothing does."""
    by_name = {each.method.name: each for each in found.feasible}
    zigzag, mesh = by_name["zigzag"], by_name["mesh"]

    def told(*feasible: Feasible) -> str:
        one = Answer(found.config, list(feasible))
        return "\n".join([*heading(one), *backing(one), ""])

    tied, alone = told(zigzag, zigzag), told(zigzag)
    assert f"Too close to call: {zigzag.name}, {zigzag.name}." in tied
    assert f"{zigzag.name} comes first: no other interval reaches its own." in alone
    for text in (tied, alone):
        assert "All times are simulated." in text
        assert f"  {zigzag.record.validation}\n" in text and "not validated" not in text
        assert f"Kernel rates: {zigzag.record.kernel}. Measure the first two on your machine." in text
    fastest, second = told(mesh, zigzag), told(zigzag, mesh)
    assert f"{mesh.name} is the fastest in simulation. It is not validated" in fastest
    assert f"Of the validated methods, {zigzag.name} comes first: no other interval reaches its own." in fastest
    assert f"Of the validated methods, too close to call: {zigzag.name}, {zigzag.name}." in told(mesh, zigzag, zigzag)
    assert "validated methods" not in told(mesh)
    for text in (fastest, second):
        assert (
            f"These have no interval, and can't be told apart from any other:\n  {mesh.name}: not validated (" in text
        )


@pytest.mark.long
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
        same = change.first is change.was_first or change.first.time.overlaps(change.was_first.time)
        assert change.changes == (not same)
    assert len(what_changes(few, varied)) == 2 + len(varied)


@pytest.mark.long
def test_a_method_that_no_framework_has_comes_with_the_best_that_one_has(found: Answer) -> None:
    mesh = next(each for each in found.feasible if each.method.name == "mesh")
    lines = how_to(Answer(found.config, [mesh, *found.feasible]))
    assert any(line.startswith(f"  {mesh.name}: none of torchtitan, Megatron-LM") for line in lines)
    assert any(line.split()[0] in FRAMEWORKS for line in lines if line.startswith("    "))


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "three.svg"
    assert main([*ASKED, "memory=60GB", "changes=false", f"plots={figure}"]) == 0
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert said.startswith("One attention of 32,768 tokens, batch 1, 32 heads (8 of keys) of 128, causal, bfloat16")
    table = [line for line in printed.splitlines() if line.startswith("│")]
    assert len(table) > 5 and max(map(len, table)) <= SEVERAL and "--all prints these too: " in said
    assert "How to run it:" in printed
    assert figure.read_text().count("<svg") == 1


@pytest.mark.long
def test_advice_for_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus=2", "seqlen=4k", "mask=document", "data=short", "heads=4", "changes=false"]) == 0
    assert "mask=documents(lengths_of({" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory=60"], "memory=60: is no size; memory=60GB, or GiB, would work"),
        (["method=mesh"], "method=mesh: is what the advice is about"),
        (["model=llama9"], "model=llama9: there is no such model"),
        (["changes=maybe"], "changes=maybe: must be true or false"),
        exhaustive(["gpus=16", "seqlen=4", "changes=false"], "no method can serve it"),
        exhaustive(["memory=1MB", "gpus=16", "seqlen=32k"], "no method can serve it"),
    ],
)
def test_bad_requests(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_sizes() -> None:
    assert (size("60GB"), size("1.5 GiB")) == (60e9, 1.5 * 2**30)


def test_latents_that_travel_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus=8", "heads=8", "head_dim=192", "v_head_dim=128", "latent_dim=512"]) == 2
    assert "latent_dim=512: is what no framework and no module here sends yet" in " ".join(
        capsys.readouterr().err.split()
    )
