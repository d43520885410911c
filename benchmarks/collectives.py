"""The library's collectives against messages: `python -m benchmarks.collectives` writes docs/results/collectives.md.

Methods whose transfers are collectives run them as gloo's own (method.collectives=library) or as messages between pairs
of ranks (method.collectives=messages), with the same bytes. Blocks can use messages one chunk at a time; a collective
brings all of a slice of heads at once. The points of a table are timed in one set of processes, with their iterations
in turn, in a new order each time. Ratios are of medians, with a bootstrap interval that resamples the iterations of a
turn together. torch's all-gather form of context parallelism has a table of its own, since threads of transfers get no
priority beside a peer's code. Needs root, for the shaped links.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

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
    f"gpus={RANKS}", "seqlen=4k", "heads=8", "head_dim=64", f"iters={ITERATIONS}", "warmup=1", "parts=false",
    "logger=none", "timeout_s=180", "cluster=shaped", "cluster.hosts.link_bytes_per_s=25e6",
)  # fmt: skip
METHODS = {
    "all_gather stride 8, zigzag": ("method=all_gather", "method.layout=zigzag", "method.stride=8"),
    "all_gather stride 1": ("method=all_gather", "method.layout=contiguous", "method.stride=1"),
    "ulysses": ("method=ulysses",),
    "usp, zigzag": ("method=usp", "method.ulysses=2", "method.layout=zigzag"),
}
FORMS = ("library", "messages")
TORCH = ("method=peer", "impl=torch_context_parallel", "method.algorithm=all_gather")
"""It gathers all heads at once, in zigzag layout; backward it passes dKV round."""
BESIDE_TORCH = {"all_gather as it is by default": ("method=all_gather",)} | {
    f"all_gather stride {stride}, zigzag, {form}": (
        "method=all_gather", "method.layout=zigzag", f"method.stride={stride}", f"method.collectives={form}",
    )
    for stride, form in ((8, "library"), (8, "messages"), (2, "library"), (1, "library"))
}  # fmt: skip
"""Ours. With fewer heads at a time the library's collectives overlap with blocks, its reduce-scatter of dKV too."""


class Setting(NamedTuple):
    """What the points of a table compute. bfloat16 is timed forward only: CPUs without it are slow backward."""

    dtype: str
    phases: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return f"dtype={self.dtype}", f"phase={'_'.join(self.phases)}"

    def __str__(self) -> str:
        return f"{self.dtype}, {' and '.join(self.phases)}"


SETTINGS = (Setting("float32", ("forward", "backward")), Setting("bfloat16", ("forward",)))


def forms(common: tuple[str, ...], phases: tuple[str, ...], folder: Path) -> list[dict[str, str]]:
    """A row for each method: the library's collectives and messages."""
    points = [[*common, *keys, f"method.collectives={form}"] for keys in METHODS.values() for form in FORMS]
    found = run_ok(points, folder)
    pairs = zip(METHODS, found[::2], found[1::2], strict=True)
    return [_row(name, FORMS, pair, phases, folder) for name, *pair in pairs]


def beside_torch(common: tuple[str, ...], phases: tuple[str, ...], folder: Path) -> list[dict[str, str]]:
    """A row for each of ours beside torch's."""
    *ours, torch = run_ok([[*common, *keys] for keys in (*BESIDE_TORCH.values(), TORCH)], folder)
    pairs = zip(BESIDE_TORCH, ours, strict=True)
    return [_row(name, ("ours", "torch"), (record, torch), phases, folder) for name, record in pairs]


def _row(
    name: str, names: tuple[str, ...], records: list[Record] | tuple[Record, ...], phases: tuple[str, ...], folder: Path
) -> dict[str, str]:
    first, second = records
    found = {"method": name, "one": names[0], "other": names[1]}
    found |= {"one, ms [95%]": interval(first), "other, ms [95%]": interval(second)}
    times = [iterations(samples(record, folder / f"{record.run_id}.json")) for record in records]
    for phase in ("step", *phases) if len(phases) > 1 else phases:
        apart = of_medians(*(frame[phase].to_numpy() for frame in times), in_turn=in_turn(first, second))
        found[f"{phase}, other over one [95%]"] = ratio(apart, digits=2)
    sent = (f"{(record.comm_bytes_per_gpu or 0) / 1e6:.1f}" for record in records)
    return found | {"MB sent by a rank, one and other": ", ".join(sent)}


def main() -> None:
    folder = records_folder(__doc__, "collectives")
    parts = []
    for setting in SETTINGS:
        common = (*COMMON, *setting.keys)
        for title, rows, where in (
            ("Collectives and messages", forms, folder),
            ("Beside torch's all-gather form", beside_torch, folder / "torch"),
        ):
            parts.append(f"## {title}: {setting}\n\n{of_rows(rows(common, setting.phases, where))}")
            print(parts[-1], flush=True)
    text = f"""# Collectives and messages

Made by `python -m benchmarks.collectives` on {cores_here()} cores: {RANKS} ranks on hosts with links of 200 Mbit/s, 4k
tokens, 8 heads of 64, causal. A ratio above 1: the other is slower.

{about(__doc__)}

"""
    REPORT.write_text(text + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
