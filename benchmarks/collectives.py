"""The library's collectives against messages: `python -m benchmarks.collectives` writes docs/results/collectives.md.

Methods whose transfers are collectives run them as gloo's own (method.collectives=library) or as messages between pairs
of ranks (method.collectives=messages), with the same bytes. The last row is torch's all-gather form of context
parallelism beside ours. All points are timed in one set of processes, with their iterations in turn, in a new order
each time. Ratios are of medians, with a bootstrap interval that resamples the iterations of a turn together. Needs
root, for the shaped links.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.reports import RESULTS, about, interval, ratio, records_folder, run_ok
from sp_bench.analysis.frames import iterations, samples
from sp_bench.analysis.pairs import in_turn
from sp_bench.analysis.verdict import of_medians
from sp_bench.machine import cores_here
from sp_bench.markdown import of_rows
from sp_bench.records import Record

REPORT = RESULTS / "collectives.md"
RANKS, ITERATIONS = 4, 9
COMMON = (
    f"gpus={RANKS}", "seqlen=4k", "heads=8", "head_dim=64", "dtype=bfloat16", f"iters={ITERATIONS}", "warmup=1",
    "parts=false", "logger=none", "timeout_s=180", "cluster=shaped", "cluster.hosts.link_bytes_per_s=25e6",
)  # fmt: skip
METHODS = {
    "all_gather stride 8, zigzag": ("method=all_gather", "method.layout=zigzag", "method.stride=8"),
    "all_gather stride 1": ("method=all_gather", "method.layout=contiguous", "method.stride=1"),
    "ulysses": ("method=ulysses",),
    "usp, zigzag": ("method=usp", "method.ulysses=2", "method.layout=zigzag"),
}
FORMS = ("library", "messages")
TORCH = ("method=peer", "impl=torch_context_parallel", "method.algorithm=all_gather")
BESIDE_TORCH = "all_gather stride 8, zigzag"
"""The method of ours with the algorithm and layout of TORCH."""


def rows(common: tuple[str, ...], folder: Path) -> list[dict[str, str]]:
    """A row for each method, and one for torch's form."""
    points = [[*common, *keys, f"method.collectives={form}"] for keys in METHODS.values() for form in FORMS]
    *ours, torch = run_ok([*points, [*common, *TORCH]], folder)
    forms = {name: (ours[2 * i], ours[2 * i + 1]) for i, name in enumerate(METHODS)}
    found = [_row(name, "library", "messages", *pair, folder) for name, pair in forms.items()]
    return [*found, _row(BESIDE_TORCH, "library", "torch_context_parallel", forms[BESIDE_TORCH][0], torch, folder)]


def _row(name: str, one: str, other: str, first: Record, second: Record, folder: Path) -> dict[str, str]:
    found = {"method": name, "one": one, "other": other, "one, ms [95%]": interval(first)}
    found["other, ms [95%]"] = interval(second)
    times = [iterations(samples(record, folder / f"{record.run_id}.json")) for record in (first, second)]
    for phase in ("step", "forward", "backward"):
        apart = of_medians(*(frame[phase].to_numpy() for frame in times), in_turn=in_turn(first, second))
        found[f"{phase}, other over one [95%]"] = ratio(apart, digits=2)
    found["sent by a rank"] = ", ".join(f"{record.comm_bytes_per_gpu or 0:.4g} bytes" for record in (first, second))
    return found


def main() -> None:
    folder = records_folder(__doc__, "collectives")
    table = of_rows(rows(COMMON, folder))
    print(table)
    REPORT.write_text(f"""# Collectives and messages

Made by `python -m benchmarks.collectives` on {cores_here()} cores: {RANKS} ranks on hosts with links of 200 Mbit/s, 4k
tokens, 8 heads of 64 in bfloat16, causal, forward and backward. A ratio above 1: the other is slower.

{about(__doc__)}

{table}
""")


if __name__ == "__main__":
    main()
