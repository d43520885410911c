"""Advice on a whole training job: which splits there are, what is ranked, what ties, and what frameworks call it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_bench.advise.__main__ import main
from sp_bench.advise.flags import FRAMEWORKS
from sp_bench.advise.job import FIRST, OTHERS, Answer, Split, answer, splits
from sp_bench.advise.job_words import ROWS, by_memory, command, heading, how_to, ranking, refused, shown_jobs
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.point import resolve
from sp_bench.point.training import simulate_training
from tests.support.typed import Known
from tests.workload.requests import point

JOB = ("model=llama3_8b", "gpus=16", "seqlen=128k", "cluster=h100_ndr400", "train.batch_tokens=1M")


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(JOB)


def divided(*overrides: str) -> list[Split]:
    given = {override.partition("=")[0] for override in overrides}
    with Composer() as composer:
        return splits(composer.compose([*(o for o in JOB if o.partition("=")[0] not in given), *overrides]))


def test_splits_use_all_gpus_and_can_be() -> None:
    all_splits = divided()
    assert all(split.context * split.data * split.tensor == 16 for split in all_splits)
    assert {split.tensor for split in all_splits} == {1, 2, 4, 8} and len(set(all_splits)) == len(all_splits)
    assert {split.data for split in all_splits} == {1, 2, 4, 8}, "16 sequences are more than a step has"
    assert {split.tensor for split in divided("kv_heads=2")} == {1, 2}
    # Nodes of 8: groups of 12 GPUs don't fill nodes.
    assert {24 // split.data for split in divided("gpus=24", "train.batch_tokens=3M")} == {24, 8, 4, 2, 1}
    with pytest.raises(RequestError, match="batch_tokens=65536: is no multiple of the 131072 tokens of a sequence"):
        divided("train.batch_tokens=64k")


def test_jobs_are_ranked_by_tokens_a_second(found: Answer) -> None:
    speeds = [job.tokens_per_s for job in found.jobs]
    assert speeds == sorted(speeds, reverse=True)
    assert found.fitting | found.refused.keys() == set(divided()) and not found.fitting & found.refused.keys()
    assert {job.method.name for job in found.jobs} == {*FIRST, *OTHERS}
    for job in found.jobs:
        record = Known(job.record)
        assert (record.data_parallel, record.tensor_parallel) == (job.split.data, job.split.tensor)
        assert job.split.data * record.turns * record.seqlen == 2**20
        assert record.peak_mem_bytes_max <= 80e9


def test_the_command_is_of_the_simulated_point(found: Answer) -> None:
    first = found.jobs[0]
    overrides = command(found, first).removeprefix("python -m sp_bench ").split()
    with Composer() as composer:
        record = simulate_training(resolve(composer.compose([*overrides, "mode=simulate", "logger=none"])))
    assert record.tokens_per_s == pytest.approx(first.tokens_per_s)
    assert record.peak_mem_bytes_max == first.record.peak_mem_bytes_max


def test_what_ties_is_named_with_the_one_of_least_memory(found: Answer) -> None:
    text = "\n".join(heading(found))
    first = found.jobs[0]
    assert f"{first.name} trains most: {first.tokens_per_s:,.0f} tokens/s" in text
    assert "sequences of 128k tokens, 1M a step" in text and "All times are simulated." in text
    others = [job for job in found.tied_splits if job.split != first.split]
    assert all(job.name in text and job.tokens_per_s > 0.97 * first.tokens_per_s for job in others)
    least = min(Known(job.record).peak_mem_bytes_max for job in found.tied_splits)
    assert by_memory(found).record.peak_mem_bytes_max == least
    alone = Answer(JOB, [first, replace(found.jobs[-1], record=replace(first.record, tokens_per_s=1.0))])
    assert alone.tied == [first] and "Too close" not in "\n".join(heading(alone))


def test_intervals_decide_ties_where_both_have_one(found: Answer) -> None:
    first = found.jobs[0]

    def with_interval(factor: float, error: float):
        ms = Known(first.record).step_ms_median * factor
        ends = {"step_ms_validated_low": ms / (1 + error), "step_ms_validated_high": ms / (1 - error)}
        speed = first.tokens_per_s / factor
        return replace(first, record=replace(first.record, step_ms_median=ms, tokens_per_s=speed, **ends))

    assert with_interval(1.2, 0.15).ties(with_interval(1.0, 0.15))
    assert not with_interval(1.02, 0.001).ties(with_interval(1.0, 0.001))
    assert not with_interval(1.2, 0.15).ties(first), "one has none: they are further apart than repetitions"


def test_the_table_has_the_best_of_each_split(found: Answer) -> None:
    shown = shown_jobs(found, every=False)
    best = {job.split: job for job in reversed(found.jobs)}
    fastest = sorted(best.values(), key=lambda job: -job.tokens_per_s)[:ROWS]
    assert len(shown) == ROWS < len(found.jobs) and [*shown] == fastest
    columns = ranking(found, every=True)
    assert {len(column) for column in columns.values()} == {len(found.jobs)}
    assert columns["tokens/s"][0] == f"{found.jobs[0].tokens_per_s:,.0f}"
    assert len(refused(found)) == (len(found.refused) + 2 if found.refused else 0)


def test_frameworks_have_their_own_names(found: Answer) -> None:
    text = "\n".join(how_to(found))
    for name in ("torchtitan", "Megatron-LM"):
        assert f"{name} ({FRAMEWORKS[name].checked})" in text
    assert "--parallelism.data_parallel_shard_degree" in text and "--training.num_tokens_per_train_step 1048576" in text
    assert "--tensor-model-parallel-size" in text and "--global-batch-size 8 --seq-length 131072" in text
    assert text.count("context_parallel_degree ") == text.count("--context-parallel-size ") == 1


@pytest.mark.long
def test_context_parallel_sizes_tie_as_counted_by_hand() -> None:
    """Llama 3 8B, 512k tokens, 4M a step on 64 H100: about 72k, 72k and 71k tokens/s with 16, 32 and 64 ranks."""
    job = ("model=llama3_8b", "gpus=64", "seqlen=512k", "cluster=h100_ndr400", "train.batch_tokens=4M")
    by_context = {j.split.context: j.tokens_per_s for j in answer(job).tied_splits if j.split.tensor == 1}
    assert {16, 32, 64} <= by_context.keys()
    assert [by_context[n] for n in (16, 32, 64)] == pytest.approx([72e3, 72e3, 71e3], rel=0.01)


@pytest.mark.long
def test_a_pack_and_what_is_given_are_kept() -> None:
    given = ("mask=document", "data=equal", "data.tokens=8k", "train.recompute=full", "train.offload=false")
    pack = answer((*JOB, *given))
    assert {(job.record.recompute, job.record.offload, job.record.mask) for job in pack.jobs} == {
        ("full", False, "document")
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpus=8", "seqlen=64k", "batch_tokens=1M"], "batch_tokens: is of a training job, which needs a model"),
        (["model=llama3_8b", "gpus=8", "seqlen=64k", "batch_tokens=1M", "memory=60GB"], "memory=60GB: can't be given"),
        (["model=llama3_8b", "gpus=8", "batch_tokens=1M", "train.data_parallel=2"], "can't be given with batch_tokens"),
        (["model=llama3_405b", "gpus=8", "seqlen=1M", "batch_tokens=1M"], "fits in no split of the GPUs"),
    ],
)
def test_what_is_no_job_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())


AUTO = ("model=llama3_8b", "method=usp", "gpus=16", "seqlen=64k", "cluster=h100_ndr400", "dtype=bfloat16")
AUTO += ("mode=simulate", "train.batch_tokens=512k")


def test_auto_is_the_number_of_groups_with_most_tokens_a_second() -> None:
    request = point(*AUTO, "train.data_parallel=auto")
    groups = request.workload.groups
    speeds = {}
    for n in (1, 2, 4, 8):
        try:
            speeds[n] = simulate_training(point(*AUTO, f"train.data_parallel={n}")).tokens_per_s
        except RequestError:
            continue
    assert speeds[groups] == max(speeds.values()) and len(speeds) > 2
    assert request.run_id == point(*AUTO, f"train.data_parallel={groups}").run_id
    assert request.config["train"]["data_parallel"] == groups


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("seqlen=max",), "train.data_parallel=auto: needs a length"),
        (("mode=measure",), "train.data_parallel=auto: is simulated only"),
        (("model=llama3_405b",), "GB are missing"),
    ],
)
def test_auto_is_refused_where_it_cannot_be_simulated(overrides: tuple[str, ...], says: str) -> None:
    given = {override.partition("=")[0] for override in overrides}
    kept = [override for override in AUTO if override.partition("=")[0] not in given]
    with pytest.raises(RequestError, match=says):
        point(*kept, *overrides, "train.data_parallel=auto")
