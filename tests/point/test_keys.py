"""Points with other keys than queries, and with narrow values, from the config to the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.errors import RequestError
from sp_bench.point import run_points
from sp_bench.records.checking import problems_of
from sp_bench.records.workloads import workload_id
from tests.support.points import point

SMALL = ("cluster=local", "gpus=2", "seqlen=64", "heads=2", "head_dim=16", "iters=2", "warmup=0", "dtype=float32")


def test_values_as_wide_as_keys_are_the_same_point() -> None:
    base, narrow = point("gpus=8", "seqlen=64k"), point("gpus=8", "seqlen=64k", "v_head_dim=64")
    alike = point("gpus=8", "seqlen=64k", "v_head_dim=128")
    assert alike.run_id == base.run_id != narrow.run_id and alike.problem == base.problem


def test_as_many_keys_as_queries_is_the_same_point() -> None:
    base, more = point("gpus=8", "seqlen=64k"), point("gpus=8", "seqlen=64k", "kv_seqlen=256k")
    alike = point("gpus=8", "seqlen=64k", "kv_seqlen=65536")
    assert alike.run_id == base.run_id != more.run_id and alike.problem == base.problem
    assert (base.asked().kv_seqlen, more.asked().kv_seqlen) == (None, 2**18)


PACK = "mask=document data=lengths data.lengths=[32k,16k,16k]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("kv_seqlen=32k", r"kv_seqlen=32768: under mask=causal .* seqlen=65536; kv_seqlen=65536 or more, or mask=full"),
        ("kv_seqlen=0", "kv_seqlen=0: must be a whole number of at least 1"),
        (
            "kv_seqlen=32k mask=window window=[512,0]",
            "kv_seqlen=32768: keys are those of the seqlen=65536 queries and of histories of 0 tokens; kv_seqlen=65536",
        ),
        ("kv_seqlen=128k mask=document data=short", "kv_seqlen=131072: keys .* of 0 tokens; .* data.cached says how"),
        (f"{PACK} data.cached=[1k,0]", "histories of 2 documents: there is one for each of the 3 documents; 0 for one"),
        (f"{PACK} data.cached=[1k,0,2k] kv_seqlen=66k", "kv_seqlen=67584: keys .* 3072 tokens; kv_seqlen=68608 would"),
        (f"{PACK} data.cached=[1k,0,2k] model=llama3_8b", "kv_seqlen=68608: workload=train trains on whole sequences"),
        ("kv_seqlen=7 mask=full", "kv_seqlen=7: the contiguous layout for 8 ranks .*; kv_seqlen=8 or more would work"),
        ("v_head_dim=256", "v_head_dim=256: kernels pad values to .* head_dim=128; v_head_dim=128 or less would work"),
        (
            "v_head_dim=64 model=llama3_8b",
            "v_head_dim=64, workload=train: the layers of .* have values as wide as keys",
        ),
        ("kv_seqlen=128k model=llama3_8b", "kv_seqlen=131072: workload=train trains on whole sequences"),
    ],
)
def test_what_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        point("gpus=8", "seqlen=64k", *overrides.split())


@pytest.mark.parametrize(
    ("overrides", "pairs"),
    [
        ("seqlen=8k kv_seqlen=1M", 2**13 * (2**20 - 2**13) + 2**25),
        ("seqlen=8k kv_seqlen=1k mask=full", 2**23),
        ("seqlen=8k kv_seqlen=1M mask=window window=[511,0]", 2**13 * 512),
        ("seqlen=8k kv_seqlen=1000k mask=chunked chunk=3k", 2048 * 1024 + 2 * 1024**2 / 2 + 2 * 3072**2 / 2),
        (
            "seqlen=8k mask=document data=lengths data.lengths=[6k,2k] data.cached=[0,64k]",
            6144**2 / 2 + 2048 * 2**16 + 2048**2 / 2,
        ),
    ],
)
def test_a_simulated_record(overrides: str, pairs: int, tmp_path: Path) -> None:
    """Its FLOPs are those of the pairs; nothing was measured like it, so that it has no interval."""
    asked = point("gpus=8", "method=ring", "phase=forward", *overrides.split())
    (outcome,) = run_points([asked], folder=tmp_path, reuse=False)
    record = outcome.record
    assert record.step_ms_median and record.tflops_per_gpu
    flops = 4.0 * pairs * record.heads * record.head_dim
    assert record.tflops_per_gpu == pytest.approx(flops / 8 / record.step_ms_median / 1e9)
    assert record.tokens_per_s == pytest.approx(2**13 / record.step_ms_median * 1e3)
    assert record.step_ms_validated_low is None
    assert record.validation == "not validated (other keys than queries, KV passed on over NVLink)"
    assert not problems_of(tmp_path / f"{record.run_id}.json")
    assert f"/8192:{record.kv_seqlen}x1/" in workload_id(vars(record))


def test_a_simulated_record_of_narrow_values(tmp_path: Path) -> None:
    """Kernels take as long as with wide values, which they make of them; folds less. MFU counts the narrow ones."""
    shape = ("gpus=8", "seqlen=32k", "method=ring", "heads=16")
    asked = [point(*shape, values) for values in ("v_head_dim=null", "v_head_dim=64")]
    wide, narrow = (outcome.record for outcome in run_points(asked, folder=tmp_path, reuse=False))
    assert 0.9 * (wide.compute_ms or 0) < (narrow.compute_ms or 0) < (wide.compute_ms or 0)
    sent = [record.comm_bytes_per_gpu or 0 for record in (wide, narrow)]
    assert sent[1] == pytest.approx(0.75 * sent[0], rel=1e-12)
    assert narrow.mfu and wide.mfu and narrow.step_ms_median and wide.step_ms_median
    products = (4 + 3 * 0.5) / 7
    assert narrow.mfu * narrow.step_ms_median == pytest.approx(products * wide.mfu * wide.step_ms_median)
    assert "values of 64 are padded, and take as long as values of 128" in (narrow.notes or [])
    assert narrow.validation == "not validated (narrow values, KV passed on over NVLink)"
    assert not problems_of(tmp_path / f"{narrow.run_id}.json")


def test_pass_q_is_for_long_histories_over_slow_links(tmp_path: Path) -> None:
    """Yang et al. 2024, section 3.4: keys that are many more than queries are best left where they are."""
    shape = ("gpus=16", "heads=32", "kv_heads=8", "phase=forward", "seqlen=2k", "kv_seqlen=512k")
    asked = [point(f"method={name}", "cluster.inter.bytes_per_s=2e9", *shape) for name in ("ring", "pass_q")]
    ring, pass_q = (outcome.record for outcome in run_points(asked, folder=tmp_path, reuse=False))
    assert (pass_q.step_ms_median or 1) < (ring.step_ms_median or 0)
    assert (pass_q.comm_bytes_per_gpu or 1) < 0.05 * (ring.comm_bytes_per_gpu or 0)


CACHED = "mask=document data=lengths data.lengths=[30,34] data.cached=[99,20]"


@pytest.mark.parametrize(
    "keys",
    [
        "kv_seqlen=300",
        "kv_seqlen=33 mask=full",
        "kv_seqlen=65 v_head_dim=8",
        "kv_seqlen=300 mask=window window=[20,0]",
        "kv_seqlen=301 mask=chunked chunk=48",
        f"kv_seqlen=183 {CACHED}",
        f"kv_seqlen=183 {CACHED} window=[40,0]",
    ],
)
def test_a_measured_record(keys: str, tmp_path: Path) -> None:
    """The gate's sequence and the timed one are compared with fp64, and have as many keys for a query."""
    asked = [point(*SMALL, *keys.split(), f"method={name}") for name in ("mesh", "ulysses", "group_cast")]
    for outcome in run_points(asked, folder=tmp_path, reuse=False):
        record = outcome.record
        assert record.status == "ok", record.error
        assert record.err_dk is not None and max(record.err_dk, record.err_timed_dv or 0) < 2e-6
        formula = record.comm_bytes_expected  # of packs only casts have one
        assert formula == record.comm_bytes_per_gpu or (formula is None and record.method != "group_cast")
        assert not problems_of(tmp_path / f"{record.run_id}.json")
    frame = records.load(tmp_path)
    assert set(frame["kv_seqlen"]) == {int(keys.split()[0].partition("=")[2])}


LATENT = ("heads=8", "kv_heads=null", "head_dim=192", "v_head_dim=128", "latent_dim=512", "cluster=h200_ndr400")


def test_latents_travel_in_place_of_keys_and_are_counted_simulated_and_told(tmp_path: Path) -> None:
    """They have 576 elements a token in place of all heads' keys and values, and making those takes blocks longer."""
    base = ("gpus=8", "seqlen=64k", "method=ring")
    asked = [point(*base, *_but(more, *LATENT), *more) for more in (["latent_dim=null"], [])]
    keys, latents = (outcome.record for outcome in run_points(asked, folder=tmp_path, reuse=False))
    assert keys.comm_bytes_per_gpu and latents.comm_bytes_per_gpu
    # Forward KV travels, backward KV in the dtype and their gradients: as many elements each time.
    assert latents.comm_bytes_per_gpu / keys.comm_bytes_per_gpu == pytest.approx(576 / (8 * (192 + 128)))
    assert (latents.kv_heads, latents.latent_dim, latents.rope_dim) == (1, 512, 64)
    assert latents.compute_ms and keys.compute_ms and latents.compute_ms > 1.01 * keys.compute_ms
    assert latents.mfu and latents.step_ms_median and keys.mfu and keys.step_ms_median
    assert latents.mfu * latents.step_ms_median == pytest.approx(keys.mfu * keys.step_ms_median)
    assert "8:1:192:128:latent512+64" in workload_id(latents.to_dict())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("kv_heads=8", "latent_dim=512, kv_heads=8: all heads have their keys of one latent.*; kv_heads=1 would work"),
        ("rope_dim=192", "rope_dim=192: must be 0 to 191: .*; rope_dim=64 would work"),
        ("latent_dim=null rope_dim=64", "rope_dim=64: .* none travels; latent_dim=512, or rope_dim=null, would work"),
        ("workload=decode method=helix kv_seqlen=64k seqlen=1", "latent_dim=512, workload=decode: "),
        ("cuda_graph=true", "latent_dim=512 cuda_graph=true: blocks add to gradients"),
        ("dtype=float16", "dtype=float16: .* so that no making of keys is simulated; dtype=bfloat16 would work"),
        ("workload=train model=tiny", "latent_dim=512, workload=train: the layers of model=tiny have .*minicpm3_4b"),
        (
            "model=tiny_mla dtype=float32 cluster=local gpus=2",
            "latent_dim=512: the layers of model=tiny_mla make latents of 32",
        ),
        ("workload=prefill model=llama3_8b", "latent_dim=512, workload=prefill: the layers of .* have projections"),
    ],
)
def test_latents_that_no_block_can_make_keys_of_are_refused(asked: str, message: str, tmp_path: Path) -> None:
    words = asked.split()
    with pytest.raises(RequestError, match=message):
        run_points(
            [point("gpus=8", *_but(words, "seqlen=64k", "method=ring", *LATENT), *words)], folder=tmp_path, reuse=False
        )


def _but(words: list[str], *usual: str) -> list[str]:
    """The usual keys that aren't among the words."""
    given = {word.partition("=")[0] for word in words}
    return [word for word in usual if word.partition("=")[0] not in given]


def test_measured_latents_of_windows_and_padded_heads(tmp_path: Path) -> None:
    """The gate's sequence and the timed one are compared with fp64."""
    latents = (*SMALL[:3], *SMALL[4:], "v_head_dim=8", "latent_dim=12")
    padded = ("method=ulysses", "method.pad_heads=true", "heads=3")
    asked = [point(*latents, "method=group_cast", "heads=2", "mask=window", "window=[9,0]"), point(*latents, *padded)]
    for outcome in run_points(asked, folder=tmp_path, reuse=False):
        record = outcome.record
        assert record.status == "ok", record.error
        assert record.err_dk is not None and max(record.err_dk, record.err_timed_dq or 1) < 2e-6
        assert record.comm_bytes_per_gpu == record.comm_bytes_expected
        assert (record.padded_heads, record.padded_kv_heads) == ((None, None) if record.mask == "window" else (4, 1))


@pytest.mark.parametrize("method", ["ring", "mesh", "helix"])
def test_the_shape_of_a_decode_step_makes_no_keys(method: str) -> None:
    """Whatever the method: what is wrong is that it is asked of such a step."""
    message = (
        "latent_dim=512, workload=decode: a step makes no keys .* model=deepseek_v2_lite, or latent_dim=null decode"
    )
    with pytest.raises(RequestError, match=message):
        point("model=deepseek_v3", "latent_dim=512", "gpus=8", f"method={method}")
    for workload in ("attention", "prefill"):
        with pytest.raises(RequestError, match="decode.latent=true: blocks make .*; model=deepseek_v3_latents, or"):
            point("model=deepseek_v3", "latent_dim=512", "gpus=8", f"method={method}", f"workload={workload}")


def test_deepseek_v3_in_training_and_prefill() -> None:
    """DeepSeek-AI 2024, section 4.2: heads of 128 + 64 elements, values of 128, a latent of 512."""
    shape = ("heads=128", "head_dim=192", "v_head_dim=128", "latent_dim=512", "rope_dim=64")
    usual = ("gpus=8", "seqlen=64k", "cluster=h200_ndr400", "method=ring")
    alone = point(*shape, *usual).problem
    for workload in ("attention", "prefill", "train"):
        asked = point("model=deepseek_v3_latents", *usual, f"workload={workload}")
        assert asked.problem == alone
        said = "model=deepseek_v3_latents leaves out experts that a token doesn't have"
        assert any(said in note for note in asked.notes) == (workload != "attention")


MLA = ("model=tiny_mla", "gpus=2", "method=ring", "seqlen=64", "cluster=local", "dtype=float32")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "latent_dim=16",
            "latent_dim=16: the layers of model=tiny_mla make latents of 32 . 8 .*; latent_dim=32, or lat",
        ),
        ("rope_dim=4", "rope_dim=4: .*; rope_dim=8, or latent_dim=null rope_dim=null kv_heads=4, would work"),
        (
            "latent_dim=null rope_dim=null kv_heads=2",
            "kv_heads=2: .* keys of every head .*; kv_heads=4, or latent_dim=32",
        ),
        ("head_dim=8 v_head_dim=8 latent_dim=null rope_dim=null kv_heads=4", "head_dim=8: .* head_dim=10 would work"),
        ("model.kv_latent=null model.kv_rope=0", "q_latent=48: is of layers .*; .*kv_latent=512 would work"),
        ("model.kv_rope=7", "model.kv_rope=7: RoPE turns pairs .*; model.kv_rope=8 would work"),
        (
            "train.tensor_parallel=2 mode=simulate",
            "train.tensor_parallel=2: every GPU has whole latents.*; 1 would work",
        ),
        ("workload=decode seqlen=1 kv_seqlen=1k method=helix", "model=tiny_mla: is simulated only"),
    ],
)
def test_what_layers_with_latents_refuse(asked: str, message: str) -> None:
    words = asked.split()
    with pytest.raises(RequestError, match=message):
        point(*_but(words, *MLA), *words)


def test_a_step_with_latents_sends_less_and_makes_more_than_one_with_keys(tmp_path: Path) -> None:
    """The model is one, and has as many parameters and FLOPs either way."""
    base = ("model=deepseek_v2_lite", "gpus=64", "seqlen=256k", "method=ring", "cluster=h200_ndr400")
    forms = [("latent_dim=null", "rope_dim=null", "kv_heads=16"), ()]
    asked = [point(*base, *form) for form in forms]
    keys, latents = (outcome.record for outcome in run_points(asked, folder=tmp_path, reuse=False))
    assert keys.parameters == latents.parameters and keys.mfu and latents.mfu
    assert keys.step_ms_median and latents.step_ms_median
    assert keys.mfu * keys.step_ms_median == pytest.approx(latents.mfu * latents.step_ms_median)
    assert keys.comm_bytes_per_gpu and latents.comm_bytes_per_gpu and keys.update_ms_median == latents.update_ms_median
    fewer = 16 * (192 + 128) - 576  # elements of a token, which all ranks get forward and backward, with gradients
    sent = keys.comm_bytes_per_gpu - latents.comm_bytes_per_gpu
    assert sent == pytest.approx(27 * 3 * 2 * 2**18 * fewer, rel=0.02)
    assert keys.activations_bytes and latents.activations_bytes
    more = keys.activations_bytes - latents.activations_bytes  # keys and values of 16 heads in place of latents
    assert more == 27 * 2**12 * 2 * fewer
    assert latents.bound_ms and latents.bound_ms <= latents.step_ms_median


def test_a_prompt_through_layers_with_latents(tmp_path: Path) -> None:
    """GPUs that share heads hold whole latents each, and the cache is of these."""
    base = ("model=deepseek_v3_latents", "workload=prefill", "seqlen=64k", "method=ring", "cluster=h200_ndr400")
    asked = [point(*base, f"gpus={8 * degree}", f"prefill.tensor_parallel={degree}") for degree in (1, 4)]
    one, four = (outcome.record for outcome in run_points(asked, folder=tmp_path, reuse=False))
    assert one.kv_cache_bytes == four.kv_cache_bytes == 61 * 2 * 576 * 2**16 // 8
    assert one.parameters == four.parameters and one.attention_bytes and four.attention_bytes
    assert four.attention_bytes < one.attention_bytes
    assert one.ttft_s and four.ttft_s and one.ttft_s / 4 < four.ttft_s < one.ttft_s
