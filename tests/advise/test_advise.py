"""sp_bench.advise: what it ranks, refuses and claims, and what backs that."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from sp_bench.advise import candidates
from sp_bench.advise.__main__ import backing, heading, how_to, main, reasons, size, what_changes
from sp_bench.advise.candidates import LEFT_OUT, Answer, Feasible, Question, answer, answers
from sp_bench.advise.changes import changes, to_each
from sp_bench.advise.flags import FRAMEWORKS
from sp_bench.cli.columns import SEVERAL
from sp_bench.methods import REGISTRY
from sp_bench.point.simulated import simulate_point
from tests.support.marks import exhaustive
from tests.support.points import point

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


SLOW_LINKS = ["gpus=16", "seqlen=32k", "heads=8", "cluster=h100_ndr400", "cluster.inter.bytes_per_s=1e9"]
METHODS = ("ring", "zigzag", "usp", "ulysses_all_gather", "group_cast", "mesh", "hybrid_cp", "ulysses")


@pytest.mark.long
def test_methods_that_cant_be_fast_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their links alone take longer than others that are simulated; whatever can be fast is simulated as ever."""
    monkeypatch.setattr(candidates, "ALL_SIMULATED", 8)
    question = Question(SLOW_LINKS, METHODS)
    some, every = answer(question), answer(question, every=True)
    assert some.hopeless and not every.hopeless and some.refused == every.refused
    simulated = {each.method.name for each in some.feasible}
    assert simulated | some.hopeless.keys() == {each.method.name for each in every.feasible}
    assert len(simulated) >= candidates.AT_FIRST
    first = some.feasible[0].time.step_ms
    by_name = {each.method.name: each.time.step_ms for each in every.feasible}
    for each in some.feasible:
        assert by_name[each.method.name] == each.time.step_ms
    for name, least_ms in some.hopeless.items():
        assert candidates.HOPELESS * first < least_ms <= by_name[name]
        assert f"{name} {least_ms:,.1f} ms" in "\n".join(reasons(some))
    assert (some.feasible[0].name, some.tied_validated[:1]) == (every.feasible[0].name, every.tied_validated[:1])


def test_on_few_gpus_all_methods_are_simulated() -> None:
    assert not answer(Question(SLOW_LINKS, METHODS[:2])).hopeless


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
def test_questions_that_end_early_have_the_same_first_answer() -> None:
    """Methods that take longer than today's first needn't be simulated; all others have the same steps."""
    names = ["usp", "group_cast", "mesh", "ring"]
    questions = [Question([*SLOW_LINKS[:-1], f"cluster.inter.bytes_per_s={rate}"], names) for rate in (5e8, 5e10)]
    for then, whole in zip(to_each(questions, answers), answers(questions), strict=True):
        steps_ms = {each.method.name: each.time.step_ms for each in whole.feasible}
        assert then.feasible[0].name == whole.feasible[0].name
        for each in then.feasible:
            assert each.time.step_ms == steps_ms.pop(each.method.name)
        assert min(steps_ms.values(), default=math.inf) >= then.feasible[0].time.step_ms
        assert "usp" not in steps_ms and then.refused == whole.refused


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
    assert "every_method=true" in how_to(Answer(found.config, [mesh], hopeless={"usp": 9.0}))[-1]
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


DECODE = ["workload=decode", "gpus=8", "heads=8", "kv_heads=2", "batch=4", "kv_seqlen=16k"]
LATENTS = ["gpus=4", "seqlen=4k", "kv_seqlen=12k", "heads=8", "head_dim=192", "v_head_dim=128", "latent_dim=512"]
OF_H200 = ["cluster=h200_ndr400", "phase=forward"]


@pytest.mark.parametrize("more", [[], ["seqlen=3"], ["model=llama3_8b"]])
def test_a_decode_step_is_ranked_among_methods_that_leave_caches(more: list[str]) -> None:
    found = answer(Question([*DECODE, *more]))
    assert {each.method.name for each in found.feasible} == {"helix", "dcp", "tree", "pass_q"} and not found.refused
    steps = [each.time.step_ms for each in found.feasible]
    assert steps == sorted(steps)
    for each in found.feasible:
        (alone,) = answer(Question([*DECODE, *more], [each.method.name])).feasible
        assert (each.record.workload, each.record.sequences) == ("decode", 4) and not each.time.backed
        assert alone.time == each.time


def test_the_advice_on_a_decode_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DECODE) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "in a decode step: a new token of 4 sequences with caches of 16,384 keys" in said
    assert "It is not validated" in said and "These have no interval" in said
    for change in (
        "caches of four times as many keys, 65,536",
        "2 GPUs that share heads",
        "four times the sequences, 16",
    ):
        assert f"{change}: " in said
    command = said[said.index("python -m sp_bench workload=decode") :]
    assert command.startswith(f"python -m sp_bench {' '.join(DECODE)} method=")


def test_the_command_of_a_decode_step_is_the_point_that_was_ranked() -> None:
    found = answer(Question(["model=deepseek_v3", "gpus=16", "batch=2", "kv_seqlen=32k"]))
    for each in found.feasible:
        (*_, line) = how_to(Answer(found.config, [each]), ["model=deepseek_v3", "gpus=16", "batch=2", "kv_seqlen=32k"])
        keys = line.split()[3:]
        record, _ = simulate_point(point(*keys, "mode=simulate"))
        assert record.step_ms_median == each.time.step_ms and record.method == each.method.name, line


@pytest.mark.long
def test_what_would_change_a_decode_step() -> None:
    """Latent keys have no other heads; caches of documents are those of data."""
    latent = answer(Question(["model=deepseek_v3", "gpus=4", "kv_seqlen=16k"]))
    varied = changes(["model=deepseek_v3", "gpus=4", "kv_seqlen=16k"], latent, memory_bytes=None)
    whats = [change.what for change in varied]
    assert not any("heads" in what or what == "one sequence" for what in whats)
    assert whats[-2:] == ["caches of four times as many keys, 65,536", "four times the sequences, 4"]
    lengths = [*DECODE[:4], "mask=document", "data=lengths", "data.lengths=[10k,6k]", "kv_seqlen=16k"]
    assert not any("cache" in each.what for each in changes(lengths, answer(Question(lengths)), memory_bytes=None))


def test_the_advice_on_latents(capsys: pytest.CaptureFixture[str]) -> None:
    """The same ranking as of points, without an interval or code; and keys of all heads beside it."""
    asked = [*LATENTS, *OF_H200]
    found = answer(Question(asked, ["ring", "ulysses", "group_cast"]))
    assert {each.method.name for each in found.feasible} == {"ring", "ulysses", "group_cast"} and not found.refused
    for each in found.feasible:
        record, _ = simulate_point(point(*asked, f"method={each.method.name}", "mode=simulate"))
        assert record.step_ms_median == each.time.step_ms and record.latent_dim == 512
        assert not each.time.backed and "latent keys" in (each.record.validation or "")
    (change,) = [x for x in changes(asked, found, memory_bytes=None) if "in place of latents" in x.what]
    assert change.first and change.first.record.latent_dim is None and change.first.record.kv_heads == 8
    assert "SequenceParallelAttention takes no latents" in " ".join(how_to(found, asked))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*DECODE, "packs=3"], "packs=3: are of documents .* in a decode step they are its sequences"),
        (["workload=train"], "workload=train: is what the advice is about; leaving it out, or workload=decode"),
        ([*DECODE, "phase=backward"], "phase=backward: .*forward"),
        ([*DECODE, "batch_tokens=1M"], "workload=decode: has no batch_tokens, which are of a training step"),
    ],
)
def test_what_a_decode_step_has_not(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize(
    ("name", "rule"), [("/dev/null/a.svg", "can't be made"), ("a.xyz", "ends in none of"), ("a", "ends in none of")]
)
def test_figures_that_can_not_be_written_are_refused_first(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sp_bench.advise.__main__.answer", lambda *_, **__: pytest.fail("simulated"))
    assert main([*ASKED, f"plots={name}"]) == 2
    assert rule in capsys.readouterr().err
