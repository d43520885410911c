"""Points of workload=decode, from the config to the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.errors import RequestError
from sp_bench.plan.caches import Caches
from sp_bench.point import run_points
from sp_bench.point.simulated import simulate_point
from sp_bench.records.checking import problems_of
from sp_bench.records.workloads import workload_id
from tests.support.points import point
from tests.support.typed import Known

STEP = ("workload=decode", "gpus=8", "heads=32", "kv_heads=8", "batch=16", "kv_seqlen=128k", "mode=simulate")
SMALL = ("workload=decode", "cluster=local", "heads=4", "kv_heads=2", "head_dim=16", "iters=2", "warmup=0")


def test_a_step_by_default() -> None:
    request = point("workload=decode", "gpus=8", "kv_heads=8", "method=helix")
    assert request.problem.mask == Caches((2**17,), share=4)
    assert (request.asked().seqlen, request.asked().kv_seqlen, request.asked().phase) == (1, 2**17, "forward")
    assert request.phases == ("forward",)


def test_heads_that_share_a_key_head_are_rows() -> None:
    problem = point(*STEP, "method=helix").problem
    assert (problem.heads, problem.kv_heads, problem.seqlen, problem.keys.seqlen) == (8, 8, 16 * 4, 16 * 2**17)
    assert problem.mask == Caches((2**17,) * 16, share=4)


def test_documents_are_sequences_of_their_own_lengths() -> None:
    documents = ("mask=document", "data=lengths", "data.lengths=[100k,20k,8k]", "kv_seqlen=128k", "batch=1")
    request = point(*STEP, *documents, "method=pass_q")
    assert request.problem.mask == Caches((100 * 2**10, 20 * 2**10, 8 * 2**10), share=4)
    assert request.workload.decoded(request.problem).sequences == 3


def test_a_layer_with_a_window_reads_the_end_of_its_caches() -> None:
    """And costs what a layer with caches of so many tokens does; the attention of gpt-oss-20b has sinks, too."""
    window, short = (
        Known(simulate_point(point(*STEP, "method=helix", *more))[0])
        for more in (("mask=window", "window=[127,0]"), ("kv_seqlen=128",))
    )
    for name in ("step_ms_median", "comm_bytes_per_gpu", "cache_bytes", "tflops_per_gpu", "peak_mem_bytes_max"):
        assert getattr(window, name) == getattr(short, name), name
    assert (window.kv_seqlen, window.window) == (2**17, [127, 0])
    several = point(*STEP, "method=helix", "mask=window", "window=[127,0]", "seqlen=3").problem
    assert several.keys.seqlen == 16 * 130 and several.pairs == 16 * 4 * 3 * 128
    lengths = ("mask=document", "data=lengths", "data.lengths=[100k,100]", "kv_seqlen=102500", "batch=1")
    mixed = point(*STEP, "method=dcp", *lengths, "window=[511,0]").problem
    assert isinstance(mixed.mask, Caches) and mixed.mask.lengths == (512, 100)


def test_a_chunk_of_the_mask_begins_a_cache() -> None:
    """The last token of 20k is the 4k-th of its chunk of 8k."""
    chunked, short = (
        Known(simulate_point(point(*STEP, "method=dcp", *more))[0])
        for more in (("mask=chunked", "chunk=8k", "kv_seqlen=20k"), ("kv_seqlen=4k",))
    )
    for name in ("step_ms_median", "comm_bytes_per_gpu", "cache_bytes", "tflops_per_gpu"):
        assert getattr(chunked, name) == getattr(short, name), name
    several = point(*STEP, "method=helix", "mask=chunked", "chunk=8k", "kv_seqlen=16385", "seqlen=2").problem
    assert isinstance(several.mask, Caches) and (several.mask.lengths[0], several.mask.firsts) == (8193, (0, 8192))


MODEL = ("workload=decode", "gpus=8", "cluster=h100_ndr400", "batch=4", "kv_seqlen=64k", "method=helix")
OF_A_STEP = ("step_ms_median", "comm_bytes_per_gpu", "comm_bytes_lower_bound", "bound_ms", "compute_ms")


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("llama3_8b", {"": 32}),
        ("gpt_oss_20b", {"mask=causal window=null": 12, "": 12}),
        ("gemma3_27b", {"mask=causal window=null": 10, "": 52}),
        ("minicpm3_4b", {"": 62}),
    ],
)
def test_a_step_of_a_model_is_all_its_layers(model: str, kinds: dict[str, int]) -> None:
    """Times, bytes, FLOPs and caches are those of each kind's layers; tokens are those that all layers have."""
    request = point(*MODEL, f"model={model}")
    record = Known(simulate_point(request)[0])
    layers = ("model.layers=1", "model.full_every=null")
    alone = {each: Known(simulate_point(point(*MODEL, f"model={model}", *layers, *each.split()))[0]) for each in kinds}
    for name in (*OF_A_STEP, "kv_cache_bytes"):
        assert getattr(record, name) == pytest.approx(sum(n * getattr(alone[each], name) for each, n in kinds.items()))
    assert record.tokens_per_s == pytest.approx(4e3 / record.step_ms_median)
    flops = [one.tflops_per_gpu * one.step_ms_median for one in (record, *alone.values())]
    assert flops[0] == pytest.approx(sum(n * x for n, x in zip(kinds.values(), flops[1:], strict=True)))
    assert record.model == model and record.record.full_layers == (
        next(iter(kinds.values())) if len(kinds) > 1 else None
    )
    assert record.peak_mem_bytes_max >= record.kv_cache_bytes > record.cache_bytes
    notes = [" ".join(one.record.notes or ()) for one in (record, *alone.values())]
    assert f"of all {sum(kinds.values())} layers" in notes[0] and "of all 1 layers" in notes[1]


def test_a_model_of_latents_keeps_them() -> None:
    """As many bytes a token as the shape of DeepSeek-V3's layers, which is that of DeepSeek-V2-Lite's."""
    record = Known(simulate_point(point(*MODEL, "model=deepseek_v2_lite"))[0])
    assert record.cache_bytes == 4 * 2**16 // 8 * 576 * 2 and record.kv_cache_bytes == 27 * record.cache_bytes
    shape = ("heads=16", "kv_heads=1", "head_dim=576", "v_head_dim=512", "decode.latent=true")
    one = Known(simulate_point(point(*MODEL, *shape))[0])
    assert record.step_ms_median == pytest.approx(27 * one.step_ms_median) and record.latent_keys is True


def test_caches_of_all_layers_must_fit() -> None:
    with pytest.raises(RequestError, match="keys in a layer's caches on gpus=8: other layers' caches have .* GB"):
        simulate_point(point(*MODEL, "model=llama3_8b", "kv_seqlen=1M", "batch=32"))


@pytest.mark.parametrize("more", ["", "mask=window window=[40,0] seqlen=3"])
@pytest.mark.parametrize("method", ["helix", "tree"])
def test_measured_steps_with_sinks(method: str, more: str, tmp_path: Path) -> None:
    asked = ("workload=decode", "cluster=local", "gpus=3", "heads=6", "kv_heads=2", "head_dim=16", "batch=3", "iters=2")
    request = point(*asked, "kv_seqlen=200", "dtype=float32", "sinks=true", f"method={method}", *more.split())
    (outcome,) = run_points([request], folder=tmp_path, reuse=False)
    record = Known(outcome.record)
    assert (record.status, outcome.record.error) == ("ok", None)
    assert 0 < record.err_out < 2e-6 and 0 < record.err_timed_out < 2e-6
    assert record.comm_bytes_per_gpu == pytest.approx(record.comm_bytes_expected)
    assert not problems_of(tmp_path / f"{record.run_id}.json")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("method=ring", "method=ring: would send keys, .* method=.*helix.* would work"),
        (
            "mask=full",
            "mask=full: a new token sees what is cached .* mask=causal, a causal mask=window or chunked, or mask=doc",
        ),
        ("mask=window window=[512,8]", "mask=window: a new token sees what is cached"),
        ("mask=chunked chunk=8k causal=false", "mask=chunked: a new token sees what is cached"),
        ("mask=chunked chunk=1k kv_seqlen=2050", "a cache of 2 keys: each of gpus=8 ranks has a run of every cache"),
        ("model=dit_xl mask=causal", "model=dit_xl: is a dit, and tokens are those of a decoder"),
        (
            "model=gpt_oss_20b mask=causal window=null",
            "model.full_every=2: .* here all see their whole caches; .* model.full_every=null, would work",
        ),
        ("mask=window window=[5,0]", "a cache of 6 keys: each of gpus=8 ranks has a run of every cache; 8 keys"),
        (
            "mask=window window=[511,0] seqlen=2 decode.page_tokens=16",
            "decode.page_tokens=16 with mask=window: kernels read pages .*; seqlen=1, or decode.page_tokens=null",
        ),
        (
            "mask=document data=lengths data.lengths=[64k,64k] data.cached=[8,8] batch=1",
            r"data.cached=.8, 8.: are those of parts of prompts: here lengths are those of caches",
        ),
        ("kv_heads=3", "kv_heads=3: must divide heads=32 .* 8, 16, 32 would work"),
        ("kv_seqlen=7", "a cache of 7 keys: each of gpus=8 ranks .*; 8 keys or more"),
        ("seqlen=4 kv_seqlen=2", "sequence 0 with 2 keys: .* 4 new tokens"),
        ("decode.page_tokens=32k", "decode.page_tokens=32768: each of gpus=8 ranks has a page .*; 229377 keys or more"),
        ("decode.page_tokens=0", "decode.page_tokens=0: must be"),
        ("decode.tensor_parallel=3", "decode.tensor_parallel=3: must divide gpus=8"),
        ("decode.tensor_parallel=0", "decode.tensor_parallel=0: must be a whole number of at least 1"),
        ("decode.latent=true", "decode.latent=true, kv_heads=8: all query heads share .* kv_heads=1 would work"),
        ("phase=backward", "phase=backward: .* forward"),
        ("method.layout=zigzag", "method.layout=zigzag: every rank has a run of each cache"),
        ("mask=document data=lengths data.lengths=[64k,64k]", "batch=16: the sequences are the documents"),
    ],
)
def test_what_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        point(*STEP, "method=pass_q", *overrides.split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "cluster=a10_pcie decode.tensor_parallel=2",
            "decode.tensor_parallel=2: has GPUs of a group in turn .*a10_pcie",
        ),
        ("model=deepseek_v3 kv_heads=2 decode.tensor_parallel=2", "kv_heads=2: all query heads share the one head"),
    ],
)
def test_groups_that_share_heads_must_be_alike(overrides: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        point(*STEP, "method=helix", *overrides.split())


def test_what_only_simulations_have() -> None:
    with pytest.raises(
        RequestError, match="model=tiny: is simulated only: .*; mode=simulate, or model=none, would work"
    ):
        point(*SMALL, "gpus=2", "method=helix", "model=tiny", "mode=measure")
    with pytest.raises(RequestError, match="decode.tensor_parallel=2: is simulated only"):
        point(*SMALL, "gpus=2", "method=helix", "decode.tensor_parallel=2", "mode=measure")


@pytest.mark.parametrize("method", ["helix", "dcp", "pass_q", "tree"])
def test_a_simulated_step(method: str) -> None:
    request = point(*STEP, f"method={method}")
    record, choice = simulate_point(request)
    assert record.status == "ok"
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    cache_bytes = 16 * 2**17 // 8 * 2 * 8 * 128 * 2
    assert record.cache_bytes == cache_bytes
    assert record.step_ms_median and record.tokens_per_s == pytest.approx(16 / record.step_ms_median * 1e3)
    # No step is faster than its cache is read.
    assert record.step_ms_median > 1e3 * cache_bytes / request.cluster.device.memory_bytes_per_s
    assert choice.problem.queries_everywhere == (method in ("helix", "tree"))


def test_helix_sends_half_and_is_not_slower_than_dcp() -> None:
    helix, dcp = (simulate_point(point(*STEP, f"method={name}"))[0] for name in ("helix", "dcp"))
    assert helix.comm_bytes_per_gpu and dcp.comm_bytes_per_gpu == 2 * helix.comm_bytes_per_gpu - 16 * 4 * 8 * 4 * 7 / 8
    assert helix.step_ms_median and dcp.step_ms_median and helix.step_ms_median < dcp.step_ms_median


def test_a_call_reads_a_cache_once_for_all_rows() -> None:
    """Four times as many rows of each key head read no more of it, four times as many sequences read four times."""
    one, rows, sequences = (
        simulate_point(point(*STEP, "method=helix", *more))[0].compute_ms
        for more in (("kv_heads=8",), ("heads=128",), ("batch=64",))
    )
    assert one and rows and sequences
    assert rows == pytest.approx(one, rel=0.05) and sequences == pytest.approx(4 * one, rel=0.1)


def test_latent_keys_are_held_once() -> None:
    """DeepSeek-V3: 576 elements a token, of which 512 are the values (DeepSeek-AI 2024, section 2.1.1)."""
    request = point("model=deepseek_v3", "gpus=8", "batch=8", "kv_seqlen=128k", "method=helix", "mode=simulate")
    record, choice = simulate_point(request)
    assert record.cache_bytes == 2**17 * 576 * 2 and record.workload == "decode"
    assert workload_id(vars(record)) == "decode/forward/causal/1:131072x8/128:1:576:512:latent/bfloat16"
    assert choice.problem.seqlen == 8 * 128 and record.v_head_dim == 512
    assert record.comm_bytes_per_gpu == 7 / 8 * 8 * 128 * (512 * 2 + 4)


def test_heads_shared_by_gpus() -> None:
    """Two GPUs that share heads have half of the ranks, and as much of the cache each."""
    whole, shared = (
        simulate_point(point(*STEP, "method=helix", *more))[0] for more in ((), ("decode.tensor_parallel=2",))
    )
    assert shared.cache_bytes == whole.cache_bytes and shared.cache_tensor_parallel == 2
    assert shared.comm_bytes_per_gpu and whole.comm_bytes_per_gpu
    assert shared.comm_bytes_per_gpu / whole.comm_bytes_per_gpu == pytest.approx(3 / 4 / 2 / (7 / 8))


def test_caches_of_pages_are_rounded_up() -> None:
    """A rank has whole pages, and what is left in the last ones is held but not read."""
    lengths = ("mask=document", "data=lengths", "data.lengths=[100k,20001,8k]", "kv_seqlen=130593", "batch=1")
    runs, pages = (point(*STEP, *lengths, "method=helix", *more) for more in ((), ("decode.page_tokens=1k",)))
    runs, pages = simulate_point(runs)[0], simulate_point(pages)[0]
    of_key = 8 * 2 * 128 * 2
    assert runs.cache_bytes == (12800 + 2501 + 1024) * of_key and runs.cache_page_tokens is None
    assert pages.cache_bytes == 1024 * (13 + 3 + 1) * of_key and pages.cache_page_tokens == 1024
    runs, pages = Known(runs), Known(pages)
    assert pages.work_imbalance > runs.work_imbalance
    assert runs.compute_ms < pages.compute_ms < 17 / 16 * runs.compute_ms
    assert pages.comm_bytes_per_gpu == runs.comm_bytes_per_gpu


LATENT = ("kv_heads=1", "v_head_dim=8", "decode.latent=true")
PAGES = ("decode.page_tokens=8",)
IN_PLACE = ("decode.page_tokens=64", "kv_seqlen=201")


@pytest.mark.parametrize(
    ("method", "more"),
    [
        *((name, ()) for name in ("helix", "dcp", "pass_q", "tree")),
        ("helix", LATENT),
        ("helix", PAGES),
        ("dcp", IN_PLACE),
    ],
)
def test_a_measured_step(method: str, more: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (*SMALL, "gpus=2", "batch=3", "seqlen=2", "kv_seqlen=65", f"method={method}", "dtype=float32", *more)
    (outcome,) = run_points([point(*overrides)], folder=tmp_path, reuse=False)
    record = outcome.record
    assert record.status == "ok", record.error
    assert record.err_out is not None and record.err_out < 2e-6
    assert record.err_timed_out is not None and record.err_timed_out < 2e-6
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    assert not problems_of(tmp_path / f"{record.run_id}.json")
    assert set(records.load(tmp_path)["sequences"]) == {3}
    note = "aten_cpu reads no pages of 8 tokens: keys are copied by an index before it"
    assert (note in (record.notes or ())) == (more == PAGES)
