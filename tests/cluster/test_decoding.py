"""A decode step's kernel by the bytes that it reads, beside published times of such kernels."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from sp_bench.cluster import Cluster
from sp_bench.plan.caches import Caches
from sp_bench.plan.problem import Problem
from tests.cluster.test_kernel_table import content

PUBLISHED = Path(__file__).parents[2] / "analysis" / "published" / "kernel_decode.csv"


def call_s(cluster: Cluster, row: dict[str, str]) -> float:
    """Simulated seconds of a published call without its launch: one GPU has all of every cache."""
    heads, kv_heads = int(row["heads"]), int(row["kv_heads"])
    mask = Caches((int(row["kv_seqlen"]),) * int(row["batch"]), int(row["new_tokens"]), heads // kv_heads)
    problem = Problem(
        n=1, seqlen=mask.seqlen, kv_seqlen=mask.kv_seqlen, heads=kv_heads, kv_heads=kv_heads,
        head_dim=int(row["head_dim"]), mask=mask, layout=mask.layout("auto"),
    )  # fmt: skip
    (seconds,) = cluster.device.caches_s(problem, [0])
    return float(seconds) - cluster.device.launch_s


def errors(head_dim: str, gpu: str = "NVIDIA H200", name: str = "h200_ndr400") -> np.ndarray:
    """Simulated over published seconds on a GPU, less one."""
    cluster = Cluster.build(content(name))
    rows = [row for row in csv.DictReader(PUBLISHED.open()) if (row["head_dim"], row["gpu"]) == (head_dim, gpu)]
    return np.array([1e3 * call_s(cluster, row) / float(row["ms"]) - 1 for row in rows])


def test_published_calls_come_out_by_their_bytes_alone() -> None:
    """Those of 64/8 and 16/2 heads, which the figures were read off, and of wider heads, which take longer."""
    found = errors("128")
    assert found.size == 32 and np.abs(found).max() < 0.035
    wider = errors("256")
    assert wider.size == 32 and -0.25 < np.median(wider) < -0.15


def test_calls_of_a_gb200_that_read_as_many_bytes_take_as_long() -> None:
    """Whether many sequences or few have them."""
    found = errors("128", "NVIDIA GB200", "gb200_nvl72")
    assert found.size == 16 and np.abs(found).max() < 0.02


def test_a_latent_cache_on_an_h100_takes_as_long_as_flashmla_took() -> None:
    """0.215 ms for 128 sequences of 4096 latents and 16 heads (ai-bot-pro/achatbot, pull request 123)."""
    cluster, mask = Cluster.build(content("h100_ndr400")), Caches((4096,) * 128, 1, 16)
    problem = Problem(
        n=1, seqlen=mask.seqlen, kv_seqlen=mask.kv_seqlen, heads=1, kv_heads=1, head_dim=576, v_head_dim=512,
        absorbed=True, mask=mask, layout=mask.layout("auto"),
    )  # fmt: skip
    (seconds,) = cluster.device.caches_s(problem, [0])
    assert seconds == pytest.approx(2.15e-4, rel=0.05)
