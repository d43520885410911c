"""Simulated prompts: chunks are attention points behind a history, and with a model all layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.errors import RequestError
from sp_bench.point import choose, run_points, variants
from sp_bench.point.choose import DeviceMemoryError
from sp_bench.point.prefill import least_compute_s, phases_ms, simulate_prefill
from sp_bench.point.simulated import simulate_point
from sp_bench.records.checking import problems_of
from sp_bench.workload import Train
from tests.support.points import point
from tests.support.typed import Known, of_kind

SHAPE = ("gpus=8", "heads=32", "kv_heads=8", "cluster=h100_ndr400")
PROMPT = (*SHAPE, "workload=prefill")
LLAMA = ("gpus=8", "cluster=h100_ndr400", "model=llama3_8b", "workload=prefill")


def prompt(*overrides: str) -> Known:
    return Known(simulate_prefill(point(*PROMPT, *overrides)))


def attention(*overrides: str) -> Known:
    return Known(simulate_point(point(*SHAPE, "phase=forward", *overrides))[0])


@pytest.mark.parametrize("method", ["ring", "usp", "mesh"])
def test_a_prompt_in_one_piece_is_an_attention_point(method: str) -> None:
    one, same = (f(f"method={method}", "seqlen=64k") for f in (prompt, attention))
    assert (one.chunks, one.prefill_chunk, one.prefill_cached) == (1, 2**16, 0)
    names = ("step_ms_median", "bound_ms", "bound_by", "compute_ms", "comm_bytes_per_gpu", "comm_bytes_expected",
             "comm_bytes_by_lane", "comm_bytes_by_link", "peak_mem_bytes_max", "mfu", "variant", "tokens_per_s",
             "comm_bytes_lower_bound", "work_imbalance", "rank_imbalance", "exposed_comm_ms")  # fmt: skip
    assert {name: getattr(one.record, name) for name in names} == {
        name: pytest.approx(value) if isinstance(value := getattr(same.record, name), float) else value
        for name in names
    }
    assert one.ttft_s == pytest.approx(one.step_ms_median / 1e3)
    assert "attention of one layer" in " ".join(one.notes)


@pytest.mark.parametrize("method", ["ring", "pass_q", "usp"])
def test_chunks_are_attention_points_behind_what_is_cached(method: str) -> None:
    """24k of new tokens in chunks of 8k and a rest of 4k, behind 16k."""
    whole = prompt(f"method={method}", "seqlen=20k", "prefill.chunk=8k", "prefill.cached=16k")
    parts = [
        attention(f"method={method}", f"seqlen={new}", f"kv_seqlen={keys}")
        for new, keys in (("8k", "24k"), ("8k", "32k"), ("4k", "36k"))
    ]
    assert whole.chunk_ms == pytest.approx([part.step_ms_median for part in parts])
    assert whole.step_ms_median == pytest.approx(sum(whole.chunk_ms))
    for name in ("comm_bytes_per_gpu", "comm_bytes_expected", "comm_bytes_lower_bound", "comm_bytes_busiest_gpu"):
        assert getattr(whole, name) == pytest.approx(sum(getattr(part, name) for part in parts)), name
    assert whole.peak_mem_bytes_max == max(part.peak_mem_bytes_max for part in parts)
    assert whole.bound_ms == pytest.approx(sum(part.bound_ms for part in parts))
    assert (whole.seqlen, whole.kv_seqlen) == (20 * 2**10, 36 * 2**10)
    assert whole.kv_cache_bytes == 36 * 2**10 // 8 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("method", ["ring", "group_cast"])
def test_chunks_under_a_window_send_what_one_behind_a_history_does(method: str) -> None:
    """In one layout: the end of earlier chunks lies where these were assigned."""
    window = ("mask=window", "window=[1023,0]", f"method={method}", "method.layout=contiguous")
    whole = prompt(*window, "seqlen=24k", "prefill.chunk=8k")
    first, later = (attention(*window, "seqlen=8k", f"kv_seqlen={keys}") for keys in ("8k", "16k"))
    assert whole.chunk_ms == pytest.approx([each.step_ms_median for each in (first, later, later)])
    assert whole.comm_bytes_per_gpu == pytest.approx(first.comm_bytes_per_gpu + 2 * later.comm_bytes_per_gpu)
    assert whole.layout == "contiguous" and whole.chunks == 3
    flops = 4 * 32 * 128 * (24 * 2**10 * 1024 - 1023 * 512)
    assert whole.tflops_per_gpu == pytest.approx(flops / 8 / whole.step_ms_median / 1e9)
    most = (1023 + 2**10) * 2 * 8 * 128 * 2
    assert whole.kv_cache_bytes == most, "the last rank has the end of the history"
    for seqlen in ("16k", "18k", "80k"):  # however long the last chunk is
        assert prompt(*window, f"seqlen={seqlen}", "prefill.chunk=8k").kv_cache_bytes == most


@pytest.mark.parametrize("mask", ["window window=[1023,0]", "chunked chunk=4k"])
def test_chunks_that_see_alike_are_planned_and_simulated_once(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    """However long the prompt is: the first one sees no history, and the last one may be shorter."""
    calls: dict[str, list[str]] = {"_plan": [], "simulated": []}
    for module, (name, found) in zip((variants, choose), calls.items(), strict=True):
        real = getattr(module, name)

        def counted(*args, real=real, found=found, **more):
            found.append(real.__name__)
            return real(*args, **more)

        monkeypatch.setattr(module, name, counted)
    asked = (*f"method=ring mask={mask}".split(), "prefill.chunk=4k", "prefill.cached=2k")
    numbers = []
    for seqlen in ("18k", "82k"):
        record = prompt(*asked, f"seqlen={seqlen}")
        numbers.append([len(found) for found in calls.values()])
    (few, many), chunks = numbers, record.chunk_ms
    assert [a - b for a, b in zip(many, few, strict=True)] == few, "as many for the second prompt as for the first"
    assert len(chunks) == 21 and len({*chunks[1:-1]}) == 1


@pytest.mark.parametrize(("model", "full", "layers"), [("gpt_oss_20b", 12, 24), ("gemma3_27b", 10, 62)])
def test_layers_of_two_kinds(model: str, full: int, layers: int) -> None:
    """Times, bytes and caches of each kind are those of its layers alone, in the layout that is best for all."""
    asked = ("gpus=8", "cluster=h100_ndr400", "workload=prefill", "method=ring", "seqlen=64k", "prefill.chunk=16k")
    asked = (f"model={model}", *asked, "method.layout=zigzag")
    both = Known(simulate_prefill(point(*asked)))
    alone = [
        Known(simulate_prefill(point(*asked, "model.full_every=null", *more)))
        for more in (("mask=causal", "window=null"), ())
    ]
    shares = (full / layers, 1 - full / layers)

    def summed(name: str) -> object:
        values = [getattr(each, name) for each in alone]
        return pytest.approx(sum(share * value for share, value in zip(shares, values, strict=True)))

    assert both.full_layers == full
    for name in ("attention_ms", "comm_bytes_per_gpu", "comm_bytes_lower_bound", "kv_cache_bytes", "bound_ms"):
        assert getattr(both, name) == summed(name), name
    assert both.dense_ms == pytest.approx(alone[0].dense_ms)
    assert both.mfu * both.ttft_s == pytest.approx(
        sum(share * each.mfu * each.ttft_s for share, each in zip(shares, alone, strict=True))
    )
    assert both.ttft_s < alone[0].ttft_s and both.peak_mem_bytes_max < alone[0].peak_mem_bytes_max
    assert both.record.sinks == (True if model == "gpt_oss_20b" else None)


@pytest.mark.long
def test_measured_prompts_with_windows_and_sinks(tmp_path: Path) -> None:
    """Bytes and memory are those of the plans and a cache for all of the prompt, and errors those of roundings."""
    asked = ("cluster=local", "gpus=3", "seqlen=192", "heads=6", "head_dim=16", "dtype=float32", "iters=2", "warmup=0")
    each = (
        "method=ring mask=window window=[50,0]",
        "method=group_cast mask=chunked chunk=100",
        "method=mesh mask=causal",
    )
    more = ("workload=prefill", "prefill.chunk=60", "prefill.cached=30", "sinks=true")
    requests = [point(*asked, *more, *one.split()) for one in each]
    for outcome in run_points(requests, folder=tmp_path, reuse=False):
        record = Known(outcome.record)
        assert (record.status, outcome.record.error) == ("ok", None)
        assert 0 < record.err_out < 2e-6 and 0 < record.err_timed_out < 2e-6
        assert record.chunks == 4 and record.sinks is True
        expected = outcome.record.comm_bytes_expected
        assert expected is None or expected == record.comm_bytes_per_gpu
        assert 0.7 < record.peak_mem_bytes_max / record.peak_mem_bytes_expected < 1.03, "rounded to the arena's steps"
    assert [problems_of(path) for path in tmp_path.glob("*.json") if path.name.count(".") == 1] == [[]] * len(each)


def test_smaller_chunks_send_more_and_hold_less() -> None:
    """Ring passes every key of the history round again for each chunk."""
    records = [prompt("method=ring", "seqlen=128k", f"prefill.chunk={chunk}") for chunk in ("null", "32k", "8k")]
    sent, held = ([getattr(one, name) for one in records] for name in ("comm_bytes_per_gpu", "peak_mem_bytes_max"))
    assert sent == sorted(sent) and held == sorted(held, reverse=True)
    assert sent[1] == pytest.approx(sent[0] * (1 + 2 + 3 + 4) / 4), "of each chunk's end the keys"
    assert len({one.kv_cache_bytes for one in records}) == 1


@pytest.mark.parametrize("degree", [1, 2])
def test_a_model_is_all_its_layers(degree: int) -> None:
    asked = (*LLAMA, "method=ring", "seqlen=64k", "prefill.chunk=16k", f"prefill.tensor_parallel={degree}")
    record, one = (Known(simulate_prefill(point(*asked, *more))) for more in ((), ("model.layers=1",)))
    assert (record.status, record.model, record.chunks, record.tensor_parallel) == ("ok", "llama3_8b", 4, degree)
    parts = (record.attention_ms, record.dense_ms, record.tensor_sum_ms)
    assert record.step_ms_median == pytest.approx(sum(parts)) == pytest.approx(sum(record.chunk_ms))
    assert record.attention_ms == pytest.approx(32 * one.attention_ms)
    assert (record.tensor_sum_ms > 0) == (degree > 1)
    assert record.bound_ms <= record.step_ms_median
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    assert record.kv_cache_bytes == 32 * one.kv_cache_bytes == 32 * 2**16 // (8 // degree) * 2 * 8 // degree * 128 * 2
    assert record.parameters == 8_030_261_248
    assert record.parameters_bytes == pytest.approx(2 * record.parameters / degree, rel=1e-3)
    held = record.parameters_bytes + record.kv_cache_bytes
    assert held < record.peak_mem_bytes_max < held + record.attention_bytes + record.activations_bytes


def test_the_linears_are_those_of_a_training_steps_forward() -> None:
    """But for the loss: a prompt has the head for its last token alone."""
    asked = ("method=ring", "gpus=8", "cluster=h100_ndr400", "model=llama3_8b", "seqlen=64k")
    trained = point(*asked)
    costs = of_kind(Train, trained.workload).costs(trained.problem, trained.cluster.device)
    record = Known(simulate_prefill(point(*asked, "workload=prefill")))
    layers_ms = 1e3 * 32 * costs.layer_s("forward")
    assert layers_ms < record.dense_ms < 1.004 * layers_ms, "the embedding and one row of logits"
    matrices = 2 * (8_030_261_248 - 2 * 128256 * 4096) * 2**16 + 2 * 128256 * 4096
    flops = matrices + 32 * 2 * 2.0**32 * 4096
    assert record.tflops_per_gpu == pytest.approx(flops / record.ttft_s / 8 / 1e12, rel=1e-4)


def test_a_prompt_has_as_many_flops_however_it_is_shared() -> None:
    """All GPUs of a tensor-parallel group make the latents, which count once."""
    asked = ("model=deepseek_v2_lite", "workload=prefill", "method=ring", "cluster=h200_ndr400", "seqlen=64k")
    one, two = (
        Known(simulate_prefill(point(*asked, f"gpus={4 * degree}", f"prefill.tensor_parallel={degree}")))
        for degree in (1, 2)
    )
    assert one.tflops_per_gpu * one.ttft_s * 4 == pytest.approx(two.tflops_per_gpu * two.ttft_s * 8)


def test_records_pass_their_own_check_and_say_which_prompt(tmp_path: Path) -> None:
    asked = [("prefill.chunk=16k",), (), ("prefill.chunk=16k", "prefill.cached=8k"), ("model=llama3_8b",)]
    requests = [point(*PROMPT, "method=ring", "seqlen=32k", *each) for each in asked]
    outcomes = run_points(requests, folder=tmp_path, reuse=False)
    assert [problems_of(path) for path in sorted(tmp_path.glob("*.json"))] == [[]] * 4
    assert [outcome.record.workload_id.partition("/")[0] for outcome in outcomes] == [
        "prefill[chunk=16384]",
        "prefill[chunk=32768]",
        "prefill[chunk=16384]",
        "prefill:llama3_8b[chunk=32768]",
    ]
    assert len({request.run_id for request in requests}) == 4
    assert "/32768:40960x1/" in outcomes[2].record.workload_id
    assert point(*SHAPE, "prefill.chunk=16k").run_id == point(*SHAPE).run_id, "no key of other workloads"


def test_what_computes_is_part_of_the_whole() -> None:
    request = point(*LLAMA, "method=ring", "gpus=16", "seqlen=64k", "prefill.chunk=16k")
    record = Known(simulate_prefill(request))
    assert 0 < 1e3 * least_compute_s(request) <= record.compute_ms < record.step_ms_median
    assert phases_ms(request, request.cluster) == {"forward": pytest.approx(record.step_ms_median)}


def test_a_model_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(DeviceMemoryError, match=r"a GPU holds in GB parameters 141.* prefill.tensor_parallel"):
        simulate_prefill(point(*LLAMA, "model=llama3_70b", "method=ring", "seqlen=64k"))
    fits = point(*LLAMA, "model=llama3_70b", "method=ring", "seqlen=64k", "gpus=16", "prefill.tensor_parallel=8")
    assert Known(simulate_prefill(fits)).peak_mem_bytes_max < 80e9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("prefill.chunk=128k", "prefill.chunk=131072: is longer than the prompt, seqlen=65536; prefill.chunk=65536"),
        ("prefill.chunk=0", "prefill.chunk=0: must be a whole number of at least 1"),
        ("prefill.chunk=1001", "prefill.chunk=1001: must be a multiple of the 8 ranks.*; prefill.chunk=1000 would"),
        (
            "prefill.chunk=8 method.layout=zigzag",
            "prefill.chunk=8: leaves 8 tokens for every chunk, and the zigzag layout for 8 ranks",
        ),
        (
            "prefill.chunk=65528 method.layout=zigzag",
            "prefill.chunk=65528: leaves 8 tokens for the last chunk, and the zigzag layout",
        ),
        ("prefill.cached=9", "prefill.cached=9: must be a multiple of the 8 ranks.*; prefill.cached=8 would work"),
        ("prefill.cached=-1", "prefill.cached=-1: must be a whole number of at least 0"),
        ("kv_seqlen=128k", "kv_seqlen=131072: workload=prefill counts its keys itself"),
        ("mask=full", "mask=full: is not that of a prompt.*; mask=causal, window or chunked would work"),
        ("mask=full prefill.cached=8k", "mask=full: is not that of a prompt"),
        ("mask=window window=[512,8]", "causal=false: is not that of a prompt, whose later tokens"),
        ("mask=chunked chunk=8k causal=false", "causal=false: is not that of a prompt"),
        ("mask=window window=[512,0] method.layout=blocks", "method.layout=blocks: assigns documents, and mask=causal"),
        ("model=gemma3_27b workload=prefill mask=causal window=null", "model.full_every=6: sets layers apart"),
        ("mask=document data=short prefill.cached=8k", "mask=document: is not that of a prompt"),
        (
            "method=peer impl=torch_context_parallel cluster=local dtype=float32 seqlen=1k gpus=2",
            "method=peer impl=torch_context_parallel: workload=prefill runs",
        ),
        ("phase=backward", "phase=backward: there is no such phase.*forward"),
        ("phase=forward_backward", "phase=forward_backward: there is no such phase"),
        ("train.recompute=full", "train.recompute=full: is about training, .*; train.recompute=attention would work"),
        ("train.data_parallel=2", "train.data_parallel=2: is about training"),
        ("prefill.tensor_parallel=2", "prefill.tensor_parallel=2: splits the matrices of a model"),
        ("model=dit_xl workload=prefill", "model=dit_xl: is a dit, and a first token is that of a decoder"),
        ("model=llama3_8b workload=prefill prefill.tensor_parallel=3", "prefill.tensor_parallel=3: must divide"),
        (
            "model=llama3_8b workload=prefill prefill.tensor_parallel=16 gpus=16",
            "prefill.tensor_parallel=16: .*kv_heads",
        ),
        ("cuda_graph=true", "cuda_graph=true"),
        ("seqlen=max", "seqlen=max"),
    ],
)
def test_what_is_refused(overrides: str, message: str) -> None:
    given = {override.partition("=")[0] for override in overrides.split()}
    usual = [each for each in (*PROMPT, "seqlen=64k", "method=ring") if each.partition("=")[0] not in given]
    with pytest.raises(RequestError, match=message):
        point(*usual, *overrides.split())
