"""Methods over links slower than the kernels: `python -m benchmarks.shaped_hosts` writes docs/shaped_hosts.md.

Ranks live in network namespaces of this machine, joined by links that are shaped in both directions (docs/shaped.md).
All points of a table are measured in turn, iteration by iteration, in one set of processes, behind the correctness
gate. Needs root.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.reports import about, interval, run_ok, table
from sp_bench.machine import cores_here

REPORT = Path(__file__).resolve().parent.parent / "docs" / "shaped_hosts.md"
COMMON = ("cluster=shaped", "heads=8", "head_dim=64", "dtype=float32", "causal=false", "warmup=1", "logger=none")
TILES = ("[1,16]", "[2,8]", "[4,4]", "[8,2]", "[16,1]")
SLOW = ("gpus=16", "seqlen=2k", "cluster.hosts.link_bytes_per_s=3.125e6", "iters=3", "timeout_s=120")
"""25 Mbit/s: 16 ranks on two cores compute their blocks in a small part of what transfers take."""
BALANCED = ("warmup=0", "iters=3", "timeout_s=200", "cluster.hosts.burst_bytes=75000")
LONG, SHORT = ("seqlen=16k", "kv_heads=2"), ("seqlen=8k", "kv_heads=8")
SEARCHED = ("method=mesh", "method.schedule=searched")
SLICED = (*SEARCHED, "method.slices=2")
BALANCED_POINTS = (
    ("8", "2.4e6", (*LONG, "method=ring")),
    ("8", "2.5e6", (*LONG, *SEARCHED, "method.tile=[2,4]")),
    ("8", "2.5e6", (*LONG, *SLICED, "method.tile=[2,4]")),
    ("16", "2.8e6", (*LONG, "method=ring")),
    ("16", "2.7e6", (*LONG, *SLICED, "method.tile=[4,4]")),
    ("8", "25e6", (*SHORT, "method=ring")),
    ("8", "12.5e6", (*SHORT, *SEARCHED, "method.tile=[4,2]")),
    ("8", "12.5e6", (*SHORT, *SLICED, "method.tile=[4,2]")),
    ("16", "9.4e6", (*SHORT, *SEARCHED, "method.tile=[4,4]")),
    ("16", "9.4e6", (*SHORT, *SLICED, "method.tile=[4,4]")),
)
"""Each method at rates at which its blocks and its transfers take about as long."""


def communication_bound(phase: str, folder: Path) -> str:
    """Mesh's tiles beside Ring: what the times' ratio is, and what the bytes' ratio allows."""
    common = [*COMMON, *SLOW, f"phase={phase}"]
    points = [[*common, "method=ring"], *([*common, "method=mesh", f"method.tile={tile}"] for tile in TILES)]
    points.append([*common, "method=mesh", "method.tile=[4,4]", "method.schedule=searched"])
    ring, *meshes = run_ok(points, folder)
    rows = []
    for record in (ring, *meshes):
        sent = _value(record.comm_bytes_per_gpu)
        allowed = _value(ring.comm_bytes_per_gpu) / sent
        faster = _value(ring.step_ms_median) / _value(record.step_ms_median)
        rows.append({
            "method": f"{record.method} {record.variant or ''}",
            "step, ms [95%]": interval(record),
            "blocks alone": f"{record.compute_only_ms_median:.0f}",
            "transfers alone": f"{record.communication_only_ms_median:.0f}",
            "sent by a rank": f"{sent / 1e6:.2f} MB",
            "link counters over that": f"{_value(record.interface_bytes_per_gpu) / sent:.3f}",
            "Ring's bytes over these": f"{allowed:.2f}",
            "Ring's time over this": f"{faster:.2f}",
            "reached": f"{faster / allowed:.0%}",
        })  # fmt: skip
    greedy = meshes[: len(TILES)]
    by_bytes = [str(r.variant) for r in sorted(greedy, key=lambda r: _value(r.comm_bytes_per_gpu))]
    by_time = [str(r.variant) for r in sorted(greedy, key=lambda r: _value(r.step_ms_median))]
    return f"{table(rows)}\n\nTiles by counted bytes: {', '.join(by_bytes)}; by time: {', '.join(by_time)}."


def overlap(folder: Path) -> str:
    """How close the step comes to the longer of its two parts."""
    points = [
        [*COMMON, *BALANCED, f"gpus={gpus}", f"cluster.hosts.link_bytes_per_s={rate}", *keys]
        for gpus, rate, keys in BALANCED_POINTS
    ]
    rows = []
    for (gpus, rate, _), record in zip(BALANCED_POINTS, run_ok(points, folder), strict=True):
        blocks, transfers = _value(record.compute_only_ms_median), _value(record.communication_only_ms_median)
        rows.append({
            "ranks": gpus,
            "tokens": f"{record.seqlen // 1024}k",
            "key heads": str(record.kv_heads),
            "link": f"{float(rate) * 8e-6:.3g} Mbit/s",
            "method": f"{record.method} {record.variant or ''}",
            "step, ms [95%]": interval(record),
            "blocks alone": f"{blocks:.0f}",
            "transfers alone": f"{transfers:.0f}",
            "shorter over longer": f"{min(blocks, transfers) / max(blocks, transfers):.2f}",
            "step over the longer": f"{_value(record.step_ms_median) / max(blocks, transfers):.2f}",
        })  # fmt: skip
    return table(rows)


def _value(number: float | None) -> float:
    assert number is not None, "a measured point that is ok has it"
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("results/shaped_hosts"))
    folder = parser.parse_args().records
    text = f"""# Over shaped links

Made by `python -m benchmarks.shaped_hosts` on {cores_here()} cores: 8 heads of 64, fp32, full attention.

{about(__doc__)}

## 16 ranks, 2k tokens, 25 Mbit/s, forward

{communication_bound("forward", folder)}

## 16 ranks, 2k tokens, 25 Mbit/s, forward + backward

{communication_bound("forward_backward", folder)}

## Overlap: forward + backward, at rates where the parts are about as long

Here transfers take cores from blocks. What a message costs them stays about the same, so that long sequences and few
key heads, whose bytes are few for their FLOPs, show more of the methods and less of this machine. Ranks that share a
core also wait for one another's blocks, and so do those that wait for them: the more so, the more there are.

{overlap(folder)}
"""
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
