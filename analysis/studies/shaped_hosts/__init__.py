"""Methods over links slower than the kernels. Needs root."""

from __future__ import annotations

from sp_bench.analysis.measured import interval, known
from sp_bench.analysis.runs import Runs
from sp_bench.markdown import of_rows

COMMON = ("cluster=shaped", "heads=8", "head_dim=64", "dtype=float32", "causal=false", "warmup=1")
TILES = ("[1,16]", "[2,8]", "[4,4]", "[8,2]", "[16,1]")
SLOW = ("gpus=16", "seqlen=2k", "cluster.hosts.link_bytes_per_s=3.125e6", "iters=3", "timeout_s=120")
"""At 25 Mbit/s, 16 ranks on two cores compute their blocks in a small part of the transfers' time."""


def communication_bound(phase: str, runs: Runs) -> str:
    """Mesh's tiles beside Ring: the ratio of times, and the ratio of bytes, which limits it."""
    common = [*COMMON, *SLOW, f"phase={phase}"]
    points = [(*common, "method=ring"), *((*common, "method=mesh", f"method.tile={tile}") for tile in TILES)]
    points.append((*common, "method=mesh", "method.tile=[4,4]", "method.schedule=searched"))
    ring, *meshes = runs.ok(points)
    rows = []
    for record in (ring, *meshes):
        sent = known(record.comm_bytes_per_gpu)
        allowed = known(ring.comm_bytes_per_gpu) / sent
        faster = known(ring.step_ms_median) / known(record.step_ms_median)
        rows.append({
            "method": f"{record.method} {record.variant or ''}",
            "step, ms [95%]": interval(record),
            "blocks alone": f"{record.compute_only_ms_median:.0f}",
            "transfers alone": f"{record.communication_only_ms_median:.0f}",
            "sent by a rank": f"{sent / 1e6:.2f} MB",
            "link counters / sent": f"{known(record.interface_bytes_per_gpu) / sent:.3f}",
            "Ring's bytes / these": f"{allowed:.2f}",
            "Ring's time / this": f"{faster:.2f}",
            "reached": f"{faster / allowed:.0%}",
        })  # fmt: skip
    greedy = meshes[: len(TILES)]
    by_bytes = [str(r.variant) for r in sorted(greedy, key=lambda r: known(r.comm_bytes_per_gpu))]
    by_time = [str(r.variant) for r in sorted(greedy, key=lambda r: known(r.step_ms_median))]
    return f"{of_rows(rows)}\n\nTiles by counted bytes: {', '.join(by_bytes)}; by time: {', '.join(by_time)}."


def forward(runs: Runs) -> str:
    """The forward alone."""
    return communication_bound("forward", runs)


def both_phases(runs: Runs) -> str:
    """Forward and backward."""
    return communication_bound("forward_backward", runs)
