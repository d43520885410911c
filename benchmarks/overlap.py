"""How much of the shorter part hides: `python -m benchmarks.overlap` writes docs/results/overlap.md.

Steps over shaped links (`cluster=shaped`) whose rates make transfers take about as long as blocks; the speed of the
cores is measured just before. The same plans are also timed without their transfers and without their blocks, each
phase by itself. A backward starts when all ranks have ended the forward, so one phase can't hide what the other has too
much of: a step takes at least the sum of the longer parts of both phases. Runs after the correctness gate; needs root.

On this machine transfers use the cores that compute blocks, unlike network cards and GPUs. So no step can be shorter
than the cores' work for its blocks and its transfers, each measured alone. If the cores are busy all the time, nothing
is left to overlap. The cores' work for a message is about constant. Long sequences and few KV heads have few bytes for
their FLOPs, and so show more of the methods and less of this machine. Ranks that share a core also wait for one
another's blocks, more so with more ranks and shorter hops.

The last two columns are simulated steps over the measured longer part, with cores of the measured speed. The last
column, the plan alone, assumes transfers that use no cores, and that ranks and messages share cores and links evenly.
Where all hops of a ring of n ranks take as long as all its blocks, its forward can come no closer than 1 + 1/n: the
last block waits for the last hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.reports import RESULTS, about, interval, known, records_folder, run_ok
from sp_bench.bench import Request, resolve
from sp_bench.bench.choose import choose
from sp_bench.calibrating.speed import cluster_at, speed_of
from sp_bench.labs.shaped.description import OF_CORES
from sp_bench.machine import cores_here
from sp_bench.markdown import of_rows
from sp_bench.records import Record
from sp_bench.simulate import simulate

REPORT = RESULTS / "overlap.md"
COMMON = ("cluster=shaped", "heads=8", "head_dim=64", "dtype=float32", "causal=false", "logger=none")
BALANCED = ("warmup=0", "iters=3", "timeout_s=600")
LONGEST, LONG, SHORT = ("seqlen=32k", "kv_heads=2"), ("seqlen=16k", "kv_heads=2"), ("seqlen=8k", "kv_heads=8")
SEARCHED = ("method=mesh", "method.schedule=searched")
SLICED = (*SEARCHED, "method.slices=2")
LONG_POINTS = (
    ("8", 3.25e6, (*LONG, "method=ring")),
    ("8", 3.25e6, (*LONG, *SLICED, "method.tile=[2,4]")),
    ("16", 1.74e6, (*LONGEST, "method=ring")),
    ("16", 1.74e6, (*LONGEST, *SLICED, "method.tile=[4,4]")),
)
"""Ranks, the balanced link rate in bytes/s for cores as fast as in conf/cluster/shaped.yaml, and other overrides."""
OTHER_POINTS = (
    ("8", 3.25e6, (*LONG, *SEARCHED, "method.tile=[2,4]")),
    ("8", 25.9e6, (*SHORT, "method=ring")),
    ("8", 14.9e6, (*SHORT, *SEARCHED, "method.tile=[4,2]")),
    ("8", 14.9e6, (*SHORT, *SLICED, "method.tile=[4,2]")),
    ("16", 9.9e6, (*SHORT, *SEARCHED, "method.tile=[4,4]")),
    ("16", 9.9e6, (*SHORT, *SLICED, "method.tile=[4,4]")),
)
"""Points in which blocks wait for hops on any machine, or hops are short."""
FREE: dict[str, float] = dict.fromkeys((*OF_CORES, "crowd_latency_s", "turn_s", "ahead_bytes"), 0.0)
"""Figures of hosts whose messages use no cores, and which share links and cores evenly."""
CLUSTERS = (
    ("h200_ndr400", "16", "256k"),
    ("h200_ndr400", "64", "256k"),
    ("a100_hdr200", "64", "128k"),
    ("b200", "32", "256k"),
)
MODEL = ("heads=32", "kv_heads=32", "head_dim=128", "causal=false", "logger=none")
SCHEDULES = {
    "the paper's": ("method=mesh",),
    "searched": SEARCHED,
    "2 slices": SLICED,
    "4 slices": (*SEARCHED, "method.slices=4"),
}


def speed_now(folder: Path) -> float:
    """The speed of the cores over the speed in the cluster's file, from the blocks of a short step."""
    (record,) = run_ok([[*COMMON, *SHORT, "warmup=1", "iters=2", "gpus=8", "method=ring"]], folder)
    return speed_of(_simulated_request(record), record)


def overlap(points: Sequence[tuple[str, float, tuple[str, ...]]], speed: float, folder: Path) -> str:
    """The step of each point over the longer of its two parts, on cores of the given speed (`speed_now`)."""
    rates = [float(f"{speed * rate:.3g}") for _, rate, _ in points]
    overrides = [
        [*COMMON, *BALANCED, f"gpus={gpus}", f"cluster.hosts.link_bytes_per_s={rate}", *keys]
        for (gpus, _, keys), rate in zip(points, rates, strict=True)
    ]
    rows = []
    for (gpus, *_), rate, record in zip(points, rates, run_ok(overrides, folder), strict=True):
        blocks, transfers = known(record.compute_only_ms_median), known(record.communication_only_ms_median)
        blocks_of = known(record.compute_only_forward_ms_median), known(record.compute_only_backward_ms_median)
        transfers_of = (
            known(record.communication_only_forward_ms_median),
            known(record.communication_only_backward_ms_median),
        )
        step, longer, cores = known(record.step_ms_median), max(blocks, transfers), cores_here()
        longer_of_each = sum(map(max, blocks_of, transfers_of))
        on_cores = known(record.compute_only_core_ms_mean) + known(record.communication_only_core_ms_mean)
        rows.append({
            "ranks": gpus,
            "tokens": f"{record.seqlen // 1024}k",
            "KV heads": str(record.kv_heads),
            "link": f"{rate * 8e-6:.3g} Mbit/s",
            "method": f"{record.method} {record.variant or ''}",
            "step, ms [95%]": interval(record),
            "blocks alone": "{:.0f} + {:.0f}".format(*blocks_of),
            "transfers alone": "{:.0f} + {:.0f}".format(*transfers_of),
            "shorter / longer": f"{min(blocks, transfers) / longer:.2f}",
            "**step / longer**": f"**{step / longer:.2f}**",
            "**step / longer of each phase**": f"**{step / longer_of_each:.2f}**",
            "cores' work for both": f"{on_cores / cores:.0f}",
            "step / longest of the three": f"{step / max(longer, on_cores / cores):.2f}",
            f"cores busy, of {cores}": f"{known(record.core_ms_mean) / step:.2f}",
            "simulated": f"{simulated_ms(record) / longer:.2f}",
            "simulated, plan alone": f"{simulated_ms(record, **FREE) / longer:.2f}",
        })  # fmt: skip
    return of_rows(rows)


def simulated_ms(record: Record, **hosts: float) -> float:
    """A measured step simulated in ms, with cores of the measured speed and these figures of hosts."""
    request = _simulated_request(record)
    choice, cluster = choose(request), cluster_at(request, speed_of(request, record), **hosts)
    return 1e3 * sum(simulate(plan, choice.problem, cluster).makespan_s for plan in choice.plans.values())


def _simulated_request(record: Record) -> Request:
    return resolve({**(record.config or {}), "mode": "simulate"})


def simulated(folder: Path) -> str:
    """Simulated steps in ms of Mesh's schedules and slices, on clusters with shorter blocks and hops."""
    rows = []
    for cluster, gpus, seqlen in CLUSTERS:
        common = ["mode=simulate", f"cluster={cluster}", f"gpus={gpus}", f"seqlen={seqlen}", *MODEL]
        found = run_ok([[*common, *keys] for keys in SCHEDULES.values()], folder)
        row = {"cluster": cluster, "GPUs": gpus, "tokens": seqlen, "compute": f"{known(found[0].compute_ms):.1f}"}
        for name, record in zip(SCHEDULES, found, strict=True):
            tile = (record.variant or "").split()[0]
            row[name] = f"{known(record.step_ms_median):.1f} ({tile})"
        rows.append(row)
    return of_rows(rows)


def main() -> None:
    folder = records_folder(__doc__, "overlap")
    speed = speed_now(folder)
    text = f"""# Overlap

Made by `python -m benchmarks.overlap` on {cores_here()} cores: 8 heads of 64, fp32, full attention, forward + backward,
in milliseconds. The cores were {speed:.2f} times as fast as conf/cluster/shaped.yaml says.

{about(__doc__)}

{overlap(LONG_POINTS, speed, folder)}

Steps come less close if their blocks wait for hops on any machine (Mesh in one slice: the last column says by how
much), and on short sequences. There the cores' work for transfers adds to the blocks, and waiting for a core to every
hop:

{overlap(OTHER_POINTS, speed, folder)}

## Simulated, on clusters of GPUs

32 heads of 128, bfloat16, full attention: milliseconds of a step, and the fastest tile. Nothing is measured here.
Slices of the heads have more and shorter hops, and blocks that fill a GPU less, so they lose where hops are short.

{simulated(folder)}
"""
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
