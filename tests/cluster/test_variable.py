"""Calls for variable lengths: against measured packs, against the calls that they join, and what idle blocks take."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from sp_bench.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.cluster.kernel_table import KernelTable
from sp_bench.cluster.variable import Kernel, blocks_s, joined_s
from sp_bench.packing import documents, lengths_of
from sp_bench.plan import Problem
from sp_bench.plan.documents import Window
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import flops_per_pair
from sp_bench.plan.region_table import sizes_of
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.resources import conf_content, conf_files, place

MEASURED = list(csv.DictReader(place("analysis/published/kernel_documents.csv").open()))
KERNELS = {"fa2": "flash_attn", "fa3": "flash_attn_3", "cudnn": "cudnn"}
PHASES = {"fwd": "forward", "bwd": "backward"}
OFF = {"fa2": 0.12, "fa3": 0.16, "cudnn": 0.18}
"""How far the simulated rate of a pack of at least 4k tokens is from a measured one, at most."""


def device() -> DeviceCosts:
    files = conf_files("cluster")
    return Cluster.build(conf_content(files["h100_ndr400"], files)).device


def packs(tokens: int) -> list[tuple[int, ...]]:
    files = conf_files("data")
    return [lengths_of(conf_content(files["magi_attention"], files), tokens, seed) for seed in range(8)]


def a_problem(lengths: tuple[int, ...], n: int = 4, layout: str = "contiguous", *, causal: bool = True) -> Problem:
    mask = documents(lengths, causal=causal)
    shape = {"heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    return Problem(n=n, seqlen=sum(lengths), mask=mask, layout=mask.layout(layout, n), **shape)


def kernel(p: Problem, phase: str, of: DeviceCosts | None = None) -> Kernel:
    return (of or device())._kernel(p, phase)


@pytest.mark.parametrize("name", KERNELS)
def test_packs_take_as_long_as_they_were_measured_to(name: str) -> None:
    """MagiAttention's benchmark of kernels, 64 heads: the mean rate over packs, and the shortest calls."""
    costs = device().with_kernel(KERNELS[name])
    for row in (row for row in MEASURED if row["kernel"] == name):
        tokens, phase, mask = int(row["pack_tokens"]), PHASES[row["phase"]], row["mask"].split()[1]
        if tokens == 2048:
            continue
        rates = []
        for lengths in packs(tokens):
            kind = RegionKind.CAUSAL if mask == "causal" else RegionKind.FULL
            ends = np.cumsum((0, *lengths)).tolist()
            regions = [Region(kind, range(a, b), range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]
            p = replace(a_problem(lengths, 1), heads=64, kv_heads=8)
            flops = flops_per_pair(phase, 128, 128) * 64 * sum(region.pairs for region in regions)
            rates.append(flops / costs.pieces_s(p, phase, [sizes_of(regions)])[0] / 1e12)
        off = float(row["tflops"]) / float(np.mean(rates)) - 1
        assert abs(off) < (OFF[name] if tokens >= 4096 else 0.2), (row["mask"], phase, tokens, off)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pack_of_one_document_takes_as_long_as_a_plain_block(phase: str) -> None:
    p = a_problem((65536,), causal=False)
    found = blocks_s(kernel(p, phase), p.blocks)  # pyright: ignore[reportArgumentType]
    plain = device().regions_s(p, phase, [Region(RegionKind.FULL, range(16384), range(16384))]) - device().launch_s
    assert found == pytest.approx(np.full(16, plain), rel=1e-9)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag_documents", "balanced"])
def test_blocks_are_as_their_regions_taken_together(layout: str) -> None:
    """By documents of about the same length, where the regions are known one by one."""
    p = a_problem((5000, 700, 12000, 300, 9000, 2000, 3768), 4, layout, causal=False)
    blocks, costs = p.blocks, device()
    assert isinstance(blocks, PackBlocks)
    found = blocks_s(kernel(p, "forward"), blocks)
    for kind in range(blocks.classes):
        regions = blocks.regions_of(kind)
        if not regions:
            assert found[kind] == 0
            continue
        (pieces_s,) = costs.pieces_s(p, "forward", [sizes_of(regions)])
        assert found[kind] == pytest.approx(pieces_s - costs.launch_s, rel=0.15)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_calls_make_the_keys_that_they_see_of_latents(phase: str) -> None:
    """A window's queries see but a part of the chunk before theirs, and blocks without work make none."""
    costs, mask = device(), Window((32768,), causal=True, left=1023)
    shape = {"n": 4, "seqlen": 32768, "heads": 16, "kv_heads": 1, "head_dim": 128, "dtype": "bfloat16"}
    keys = Problem(mask=mask, layout=mask.layout("contiguous", 4), **shape)
    latents = replace(keys, latent_dim=512, rope_dim=64)
    more = (costs.block_s(latents, phase) - costs.block_s(keys, phase)).reshape(4, 4)
    every, before = (costs.keys_s(latents, phase, tokens, several=True) for tokens in (8192, 1023))
    assert more == pytest.approx(np.diag([every] * 4) + np.diag([before] * 3, -1))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag_documents"])
def test_one_call_over_all_keys_takes_no_longer_than_a_call_for_each_chunk(layout: str) -> None:
    p = a_problem(packs(32768)[0], 8, layout)
    blocks, ranks = p.blocks, np.arange(8)
    assert isinstance(blocks, PackBlocks)
    for phase in ("forward", "backward"):
        apart = blocks_s(kernel(p, phase), blocks).reshape(8, 8)
        every = joined_s(kernel(p, phase), blocks, ranks, np.repeat(ranks[:, None], 8, axis=1))
        assert np.all(every < 1.05 * apart.sum(axis=1)) and np.all(every >= apart.max(axis=1) * 0.9)
        alone = joined_s(kernel(p, phase), blocks, ranks, ranks[None, :])
        assert alone == pytest.approx(apart.diagonal(), rel=0.1)
        if layout == "zigzag_documents":
            assert np.all(every < 0.8 * apart.sum(axis=1))
    nothing = joined_s(kernel(p, "forward"), blocks, ranks[:1], np.array([[7]]))
    assert (nothing == 0).all() == (blocks.pairs.reshape(8, 8)[0, 7] == 0)


def test_thread_blocks_without_work_take_their_time() -> None:
    """A grid of 3 x 8 tiles of 128 keys for pieces of 1024, 128 and 128: 14 have nothing, less half a tile a piece."""
    p = a_problem((1024, 128, 128), 1, causal=False)
    found = kernel(p, "backward")
    assert isinstance(found.table, KernelTable)
    each_s = found.table.variable_block_s["backward"]
    idle = 24 - (10 + 1.5)
    assert found.idle_s(3.0, np.array(1280.0), np.array(1024.0)) == pytest.approx(each_s * idle * 16 / 132)
    assert kernel(p, "forward").idle_s(3.0, np.array(1280.0), np.array(1024.0)) == 0


def test_what_is_shorter_than_all_that_was_measured_is_slower() -> None:
    costs, p = device(), a_problem((1024,), 1)
    sizes = np.array([16.0, 64.0, 128.0, 256.0, 512.0])
    for phase in ("forward", "backward"):
        for name in ("flash_attn_3", "cudnn"):
            table = kernel(p, phase, costs.with_kernel(name)).table
            long = np.full(5, 4096.0)
            q, kv = (long, sizes) if phase == "forward" else (sizes, long)
            rates = table.flops_per_s_of(phase, "full", q, kv, batch_heads=np.full(5, 64), dtype="bfloat16")
            assert np.all(np.diff(rates) > 0) and rates[0] < rates[-1] / 4
            shape = {"batch_heads": 64, "dtype": "bfloat16"}
            assert rates[-1] == pytest.approx(table.flops_per_s(phase, "full", int(q[-1]), int(kv[-1]), **shape))  # pyright: ignore[reportAttributeAccessIssue]
