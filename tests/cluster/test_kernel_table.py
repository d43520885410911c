"""Kernel cost tables: their points, what lies between them, waves of thread blocks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import records
from sp_bench.__main__ import main as bench
from sp_bench.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.cluster.device_section import DeviceSection
from sp_bench.cluster.kernel_table import RATES, KernelTable, Rates, Surface
from sp_bench.cluster.waves import Waves, _makespan
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.plan import Problem
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import flops_per_pair
from sp_bench.plan.tensors import DQ, O
from sp_bench.reading import read
from sp_bench.resources import conf_content, conf_files
from sp_bench.simulate import simulate
from tests.support.problems import mask_of

PRESETS = set(
    "a10_pcie a100_hdr200 a800 ascend_oam b200 gb200_nvl72 h20 h100_ndr400 h200_ndr400 h800 l20_pcie rtx4090_pcie tpuv4"
    " tpuv5p".split()
)
SIZES = [512, 1024, 2048, 4096]
CURVE = dict(zip(SIZES, [300.0, 400.0, 480.0, 500.0], strict=True))
MASKS = ("full", "causal")


def content(name: str) -> dict[str, Any]:
    files = conf_files("cluster")
    return conf_content(files[name], files)


def table(**other: Any) -> dict[str, Any]:
    rates = {f"{phase}_{mask}": CURVE for phase in PHASES for mask in MASKS}
    configuration = {"heads": 16, "total_tokens": 16384, "tile_tokens": 128}
    return {
        "figures": "published", "head_dim": 128, "dtypes": {"bfloat16": 1.0, "float16": 0.5}, **configuration,
        **rates, **other,
    }  # fmt: skip


def device(rates: Any = None, **other: Any) -> DeviceCosts:
    base = {"name": "test", "peak_tflops": {}, "memory_bytes_per_s": 1e12, "launch_s": 0.0, "sms": 132}
    return DeviceCosts.of(read(DeviceSection, {**base, "rates": rates or {"fast": table()}, **other}, "cluster.device"))


def problem(tokens: int, *, batch: int = 1, heads: int = 16, causal: bool = False, **other: Any) -> Problem:
    layout = mask_of(causal).layout(other.pop("layout", "contiguous"))
    shape: dict[str, Any] = {"n": 1, "seqlen": tokens, "kv_heads": heads, "head_dim": 128, **other}
    return Problem(heads=heads, batch=batch, mask=mask_of(causal), layout=layout, **shape)


def full_s(costs: DeviceCosts, tokens: int, phase: str = "forward", **shape: Any) -> float:
    return own_block_s(costs, problem(tokens, **shape), phase)


def own_block_s(costs: DeviceCosts, p: Problem, phase: str) -> float:
    """Seconds of the block of rank 0's own queries and keys."""
    return float(costs.block_s(p, phase)[p.blocks.of(0, 0)])


def tflops(costs: DeviceCosts, p: Problem, phase: str, pairs: float) -> float:
    seconds = own_block_s(costs, p, phase)
    return flops_per_pair(phase, p.head_dim, p.value_dim) * pairs * p.batch * p.heads / seconds / 1e12


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("tokens", SIZES)
def test_published_points_come_out_in_their_own_configuration(tokens: int, phase: str) -> None:
    p = problem(tokens, batch=16384 // tokens)
    assert tflops(device(), p, phase, tokens**2) == pytest.approx(CURVE[tokens])
    p = problem(tokens, batch=16384 // tokens, causal=True)
    assert tflops(device(), p, phase, tokens * (tokens + 1) / 2) == pytest.approx(CURVE[tokens])


@pytest.mark.parametrize("name", sorted(PRESETS | {"local"}))
def test_every_preset_returns_its_own_points(name: str) -> None:
    config = content(name)["device"]
    for entry in config["rates"].values():
        section = {**config, "rates": {"kernel": entry}, "kernel": None, "launch_s": 0.0}
        costs = DeviceCosts.of(read(DeviceSection, section, "cluster.device"))
        dtype, factor = next(iter(entry["dtypes"].items()))
        heads, total = entry.get("heads", 8), entry.get("total_tokens")
        for tokens, rate in entry["forward_full"].items():
            if isinstance(tokens, int):
                batch = max(total // tokens, 1) if total else 1
                widths = {"head_dim": entry["head_dim"], "v_head_dim": entry.get("v_head_dim")}
                p = problem(tokens, batch=batch, heads=heads, dtype=dtype, **widths)
                assert tflops(costs, p, "forward", tokens**2) == pytest.approx(rate * factor)


GPUS = {"l20_pcie": 8, "rtx4090_pcie": 8}
"""That fill presets of one node; of others two nodes do."""


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_simulates(name: str) -> None:
    config = content(name)
    cluster, n = Cluster.build(config), GPUS.get(name, 16)
    assert cluster.name == name
    p = problem(n * 2048, n=n, heads=32, causal=True, layout="striped")
    cluster.refuse(n)
    cluster.device.refuse(p)
    assert cluster.device.figures(p).startswith(("published", "assumed"))
    total_s = 0.0
    for phase in PHASES:
        run = simulate(build("ring", {}).plan(p, phase, cluster.profile(p)), p, cluster)
        assert run.makespan_s >= run.busy_s.max() > 0
        total_s += run.makespan_s
    flops = flops_per_pair("forward_backward", p.head_dim, p.head_dim) * p.seqlen**2 / 2 * p.heads
    peak = cluster.device.peak_tflops.get("bfloat16", 400)
    assert 0.01 < flops / n / total_s / 1e12 / peak < 0.9
    for key in (
        "intra",
        "memory_bytes_per_s",
        "launch_s",
        *(["tile_tokens"] if config["device"].get("sms") else []),
        *(["inter"] if cluster.topology.inter else []),
    ):
        assert any(key in source for source in cluster.sources), f"{key} has no source"
    assert all(entry.get("source") for entry in config["device"]["rates"].values())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_choice_of_the_command_line(name: str, tmp_path: Path) -> None:
    point = f"cluster={name} method=ring gpus={GPUS.get(name, 16)} seqlen=64k logger=none results_dir={tmp_path}"
    assert bench(point.split()) == 0
    (record,) = records.read_all(tmp_path)
    assert (record.status, record.mode, record.cluster) == ("ok", "simulate", name)


@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from([None, 132]), st.sampled_from(PHASES))
def test_time_grows_with_tokens_and_heads(tokens: int, heads: int, sms: int | None, phase: str) -> None:
    costs = device(sms=sms)
    for causal in (False, True):
        here = full_s(costs, tokens, phase, heads=heads, causal=causal)
        assert 0 < here <= full_s(costs, tokens + 1, phase, heads=heads, causal=causal) * (1 + 1e-12)
        assert here <= full_s(costs, tokens, phase, heads=heads + 1, causal=causal) * (1 + 1e-12)


@given(st.integers(512, 4096), st.sampled_from(PHASES), st.booleans())
def test_rates_lie_between_those_of_their_neighbours(tokens: int, phase: str, causal: bool) -> None:
    below, above = max(s for s in SIZES if s <= tokens), min(s for s in SIZES if s >= tokens)
    pairs = tokens * (tokens + 1) / 2 if causal else tokens**2
    rate = tflops(device(sms=None), problem(tokens, causal=causal), phase, pairs)
    assert CURVE[below] * (1 - 1e-9) <= rate <= CURVE[above] * (1 + 1e-9)


def test_rates_are_flat_outside_the_table() -> None:
    costs = device(sms=None)
    assert tflops(costs, problem(64), "forward", 64**2) == pytest.approx(CURVE[512])
    assert tflops(costs, problem(65536), "forward", 65536**2) == pytest.approx(CURVE[4096])


def test_one_thread_block_more_than_a_wave_costs_a_whole_one() -> None:
    """132 heads of one tile fill a wave; one head more takes as long as 132 more."""
    costs = device()
    one, more, two = (full_s(costs, 128, heads=heads) for heads in (132, 133, 264))
    assert more == pytest.approx(2 * one)
    assert two == pytest.approx(more)
    assert full_s(costs, 128, heads=1) == pytest.approx(one)
    # The same by tokens: the wave takes no longer for a tile's last rows than for its first.
    by_rows = {tokens: full_s(costs, tokens, heads=132) / tokens for tokens in (129, 256)}
    assert by_rows[129] == pytest.approx(by_rows[256])


@given(st.integers(1, 500), st.integers(1, 300))
def test_waves_are_never_more_than_full(tokens: int, batch_heads: int) -> None:
    for rate in RATES:
        for per_sm in (1, 2):
            late = Waves(sms=7, tile_tokens=16, causal_order="ascending", per_sm=per_sm)
            assert 0 < late.fill(rate, tokens, batch_heads) <= 1
        assert 0 < Waves(sms=7, tile_tokens=16).fill(rate, tokens, batch_heads) <= 1


def test_few_causal_heads_wait_for_the_longest_thread_block() -> None:
    """The 64 tiles of one head on 132 multiprocessors take as long as the longest, twice the mean."""
    waves = Waves(sms=132, tile_tokens=128)
    assert waves.fill("forward_causal", 8192, 1) == pytest.approx(64 / 2 / 132, rel=1e-3)
    assert waves.fill("forward_causal", 8192, 132) == pytest.approx(64 / 65, rel=1e-3), (
        "half of a tile on the diagonal is masked"
    )
    assert full_s(device(), 4096, heads=1, causal=True) > 1.9 * full_s(device(), 4096, heads=132, causal=True) / 132


@pytest.mark.parametrize(
    ("per_sm", "phase", "ends"),
    [
        (1, "forward", 7),  # 1 to 4: the 3 of the first head, and beside it 1 and 2 of the second, whose 3 comes last
        (1, "backward", 6),
        (2, "forward", 2 + 2 + 2 / 0.6),  # the last 3 begins at 2, is beside a 2 until 4, and then alone
    ],
)
def test_heads_follow_one_another(per_sm: int, phase: str, ends: float) -> None:
    """Two heads of 3 thread blocks on 2 multiprocessors, in the order in which their kernel starts them."""
    late = Waves(sms=2, tile_tokens=1, causal_order="ascending", per_sm=per_sm)
    assert late.fill(f"{phase}_causal", 3, 2) * ends == pytest.approx(2 * 6 / 2)


def test_one_gpu_at_5_heads_is_as_slow_as_it_was_measured() -> None:
    """ring-flash-attention's single-GPU rows at 8k, 5 heads over 32: 0.62 and 0.74 on H800, 0.65 and 0.83 on A100."""
    for sms, forward, backward in ((132, 0.624, 0.742), (108, 0.648, 0.833)):
        late = Waves(sms=sms, tile_tokens=128, causal_order="ascending", per_sm=2)
        for rate, measured in (("forward_causal", forward), ("backward_causal", backward)):
            assert late.fill(rate, 8192, 5) / late.fill(rate, 8192, 32) == pytest.approx(measured, rel=0.06)


def test_the_first_heads_of_many_need_not_be_followed() -> None:
    every, last = (Waves(sms=6, tile_tokens=16, causal_order="ascending", per_sm=2) for _ in range(2))
    by_hand = _makespan([*range(1, 9)] * 100, 6, 2)
    assert every.fill("forward_causal", 128, 100) == pytest.approx(100 * 128 * 129 / 2 / 256 / 6 / by_hand, rel=0.01)
    assert last.fill("forward_causal", 128, 5000) > every.fill("forward_causal", 128, 100)


def test_a_block_that_is_not_square_goes_by_its_inner_loop() -> None:
    """Zigzag, causal: all queries by half the keys (above), or half the queries by all keys (below)."""
    costs = device(sms=None)
    below, _, above = costs.block_s(problem(4096, n=2, causal=True, layout="zigzag"), "forward")
    flops = 4 * 2048 * 1024 * 16 * 128
    assert below == pytest.approx(flops / (CURVE[2048] * 1e12))
    assert above == pytest.approx(flops / (CURVE[1024] * 1e12))
    below, _, above = costs.block_s(problem(4096, n=2, causal=True, layout="zigzag"), "backward")
    assert below == pytest.approx(2.5 * flops / (CURVE[1024] * 1e12))
    assert above == pytest.approx(2.5 * flops / (CURVE[2048] * 1e12))


def test_pairs_are_interpolated_in_both_directions() -> None:
    pairs = {"256x256": 10.0, "256x1024": 30.0, "1024x256": 20.0, 1024: 60.0}
    built = KernelTable.build("x", read(Rates, table(forward_full=pairs), "rates.x"), None)
    assert isinstance(built.rates["forward_full"], Surface)

    def rate(q_tokens: int, kv_tokens: int) -> float:
        found = built.flops_per_s("forward", "full", q_tokens, kv_tokens, batch_heads=1, dtype="bfloat16")
        return found / 1e12

    assert rate(256, 1024) == pytest.approx(30.0)
    assert rate(1024, 256) == pytest.approx(20.0)
    assert rate(512, 512) == pytest.approx((10 + 30 + 20 + 60) / 4)
    assert rate(2048, 512) == pytest.approx(40.0)


def test_dtypes_and_launches() -> None:
    slow = full_s(device(launch_s=1e-3), 1024, dtype="float16") - 1e-3
    assert slow == pytest.approx(2 * full_s(device(), 1024, dtype="bfloat16"))


def test_a_strict_block_of_one_token_is_no_kernel() -> None:
    below, equal, _ = device(launch_s=1e-3).block_s(problem(2, n=2, causal=True, layout="striped"), "forward")
    assert below == 0 < equal


def test_the_table_of_the_head_dim_and_dtype_is_taken() -> None:
    rates = {
        "d64": table(kernel="fast", head_dim=64, figures="measured"),
        "d128": table(kernel="fast"),
        "slow": table(dtypes={"bfloat16": 0.5, "float32": 0.1}, figures="assumed"),
    }
    costs = device(rates)
    assert costs.figures(problem(512, head_dim=64)) == "measured (fast)"
    assert costs.figures(problem(512)) == "published (fast)"
    assert costs.figures(problem(512, dtype="float32")) == "assumed (slow)"
    assert not costs.notes(problem(512))
    assert "are assumptions" in costs.notes(problem(512, dtype="float32"))[0]
    assert "below the smallest of the kernel figures (512)" in costs.notes(problem(256))[0]
    assert device(rates, kernel="slow").figures(problem(512)) == "assumed (slow)"
    costs.refuse(problem(512, head_dim=64))
    with pytest.raises(RequestError, match="head_dim=96: .* for head_dim 64 or 128, and rates differ by it"):
        costs.refuse(problem(512, head_dim=96))
    with pytest.raises(RequestError, match="head_dim=64: .* are for head_dim 128"):
        costs.refuse(problem(512, head_dim=64, dtype="float32"))
    with pytest.raises(RequestError, match="dtype=float64: .*; one of bfloat16, float16, float32 would work"):
        costs.refuse(problem(512, dtype="float64"))


def test_without_figures_the_nearest_table_ranks_variants() -> None:
    """The keys that a measured point needs."""
    assert full_s(device(), 1024, head_dim=64, dtype="float64") == pytest.approx(full_s(device(), 1024) / 2)


def test_merging_outputs_has_a_rate_of_its_own() -> None:
    p, costs = problem(1024), device(fold_bytes_per_s=1e11)
    rows = 1024 * 16
    assert costs.fold_s(p, O, first=False, arriving=False) == pytest.approx(rows * (128 * 10 + 12) / 1e11)
    assert costs.fold_s(p, DQ, first=False, arriving=False) == pytest.approx(rows * 128 * 10 / 1e12)
    assert costs.fold_s(p, O, first=True, arriving=False) == pytest.approx(rows * 128 * 6 / 1e12)
    assert costs.fold_s(p, O, first=True, summed=False) == 0
    assert costs.cast_s(p, O, wire=True) == pytest.approx(rows * 128 * 6 / 1e12)
    assert costs.cast_s(p, O, wire=True, summed=False) == costs.cast_s(p, O, wire=False, summed=False) == 0
    assert device().fold_bytes_per_s == device().memory_bytes_per_s


def test_transfer_slowdown_is_held() -> None:
    assert device().transfer_slowdown == 0
    assert device(transfer_slowdown=0.19).transfer_slowdown == 0.19


@pytest.mark.parametrize(
    ("rates", "other", "message"),
    [
        ({"x": table(figures="guessed")}, {}, "rates.x.figures=guessed: there is no such figures; .*published"),
        (
            {"x": table(forward_full={})},
            {},
            "rates.x.forward_full={}: must be a table of rates, with at least one",
        ),
        ({"x": table(forward_full={"512x": 1})}, {}, "rates.x.forward_full=512x: must be a whole number"),
        ({"x": table(forward_full={0: 1})}, {}, "rates.x.forward_full=0: must be a whole number of at least 1"),
        ({"x": table(forward_full={512: -1})}, {}, "rates.x.forward_full.512=-1: must be a finite number above 0"),
        ({"x": table(forward_causal={"512x256": 1})}, {}, "forward_causal.512x256: a causal block must be square"),
        ({"x": table(forward_full={"512x256": 1, 512: 1, 256: 1})}, {}, "forward_full.256x512: is missing"),
        ({"x": table(heads=None)}, {}, "rates.x.heads: is missing: a device with sms"),
        ({"x": table(tile_tokens=None)}, {}, "rates.x.tile_tokens: is missing: a device with sms"),
        ({"x": table(tokens=3)}, {}, "rates.x.tokens: there is no such key"),
        ({"x": {"figures": "measured"}}, {}, "rates.x.head_dim: is missing"),
        ({"x": 3}, {}, "rates.x=3: must be a section"),
        (3, {}, "rates=3: must be a section of tables"),
        (None, {"kernel": "quick"}, "device.kernel=quick: there is no such kernel; .*known: fast"),
        (None, {"sms": 1.5}, "device.sms=1.5: must be a whole number"),
        (None, {"transfer_slowdown": -0.1}, "device.transfer_slowdown=-0.1: must be a finite number of at least 0"),
        (None, {"fold_bytes_per_s": 0}, "device.fold_bytes_per_s=0: must be a finite number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(rates: Any, other: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        device(rates, **other)


def test_a_kernel_is_chosen_among_the_devices_own() -> None:
    slow = table(kernel="slow", forward_full=dict.fromkeys(SIZES, 100.0))
    costs = device({"fast": table(), "slow": slow, "slow_64": slow | {"head_dim": 64}}, kernel="slow")
    p, small = problem(2048, batch=8), problem(2048, batch=8, head_dim=64)
    assert [costs.with_kernel(name).figures(p) for name in ("auto", "slow", "fast")] == [
        "published (slow)", "published (slow)", "published (fast)",
    ]  # fmt: skip
    assert tflops(costs.with_kernel("slow"), p, "forward", 2048**2) == pytest.approx(100.0)
    costs.with_kernel("slow").refuse(small)
    with pytest.raises(RequestError, match="head_dim 128"):
        costs.with_kernel("fast").refuse(small)
    with pytest.raises(RequestError, match="kernel=cudnn: .* one of slow, fast, or auto, would work"):
        costs.with_kernel("cudnn")


def test_heads_without_figures_take_as_long_as_those_that_the_kernel_pads_them_to() -> None:
    """FlashAttention-2 is built for 64, 96 and 128."""
    flat = {f"{phase}_{mask}": dict.fromkeys(SIZES, 250.0) for phase in PHASES for mask in MASKS}
    own = table(kernel="flash_attn", **{key: dict.fromkeys(SIZES, 500.0) for key in flat})
    costs = device(
        {"a": own, "other": table(kernel="other", head_dim=32), "b": table(kernel="flash_attn", head_dim=64) | flat}
    )
    p = problem(2048, batch=8)
    as_long = {
        100: own_block_s(costs, p, "forward"),
        64: own_block_s(costs, problem(2048, batch=8, head_dim=64), "forward"),
    }
    assert own_block_s(costs, problem(2048, batch=8, head_dim=100), "forward") == pytest.approx(as_long[100])
    assert own_block_s(costs, problem(2048, batch=8, head_dim=40), "forward") == pytest.approx(as_long[64])
    for head_dim in (72, 96):
        unit = problem(2048, batch=8, head_dim=head_dim)
        assert tflops(costs, unit, "forward", 2048**2) == pytest.approx(head_dim / (64 / 250 / 2 + 128 / 500 / 2))
        costs.refuse(unit)
        assert costs.figures(unit) == "assumed (flash_attn)"
        assert "a time between those of the figures for 64 and 128" in costs.notes(unit)[0]
    assert "heads of 100 as heads of 128: the figures for 128" in costs.notes(problem(512, head_dim=100))[0]
    for head_dim in (16, 136):
        with pytest.raises(
            RequestError, match=f"head_dim={head_dim}: .* for head_dim 32 or 64 or 128, and rates differ"
        ):
            costs.refuse(problem(512, head_dim=head_dim))


def test_narrow_values_take_the_figures_of_a_kernel_that_takes_them_or_the_time_of_wide_ones() -> None:
    """Their rates count FLOPs of the narrow products. Of another width, values are padded to that of keys."""
    rates = {f"{phase}_{mask}": dict.fromkeys(SIZES, 400.0) for phase in PHASES for mask in MASKS}
    wide, narrow = table(**rates, head_dim=192), table(**rates, head_dim=192, v_head_dim=128)
    p, wider = problem(2048, head_dim=192, v_head_dim=128), problem(2048, head_dim=192, v_head_dim=160)
    for phase, share in (("forward", 320 / 384), ("backward", 832 / 960)):
        (alone_s,), (both_s,) = (costs.block_s(p, phase) for costs in (device({"a": wide}), device({"b": narrow})))
        assert both_s == pytest.approx(share * alone_s)
    costs = device({"b": narrow})
    assert not any("padded" in note for note in costs.notes(p))
    for refused in (wider, problem(2048, head_dim=192, v_head_dim=64), problem(2048, head_dim=192)):
        with pytest.raises(RequestError, match="head_dim=192: .* for head_dim 192 with v_head_dim=128, and rates"):
            costs.refuse(refused)
