"""The library's collectives against messages, and beside torch's all-gather form of context parallelism. Needs root."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from sp_bench.analysis.measured import interval, other_over_one, ratio
from sp_bench.analysis.runs import Runs
from sp_bench.records import Record

RANKS, ITERATIONS = 4, 9
COMMON = (
    f"gpus={RANKS}", "seqlen=4k", "heads=8", "head_dim=64", f"iters={ITERATIONS}", "warmup=1", "parts=false",
    "timeout_s=180", "cluster=shaped", "cluster.hosts.link_bytes_per_s=25e6",
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
    """The dtype and phases of a table. bfloat16 is timed forward only: CPUs without it are slow backward."""

    dtype: str
    phases: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return f"dtype={self.dtype}", f"phase={'_'.join(self.phases)}"


Row = dict[str, str]


def forms(runs: Runs, setting: Setting) -> list[Row]:
    """A row for each method: the library's collectives and messages."""
    points = [
        (*COMMON, *setting.keys, *keys, f"method.collectives={form}") for keys in METHODS.values() for form in FORMS
    ]
    records = runs.ok(points)
    pairs = zip(METHODS, records[::2], records[1::2], strict=True)
    return [_row(name, FORMS, pair, setting, runs) for name, *pair in pairs]


def beside_torch(runs: Runs, setting: Setting) -> list[Row]:
    """A row for each of ours beside torch's."""
    own = Runs(runs.folder / "torch")
    *ours, torch = own.ok([(*COMMON, *setting.keys, *keys) for keys in (*BESIDE_TORCH.values(), TORCH)])
    pairs = zip(BESIDE_TORCH, ours, strict=True)
    return [_row(name, ("ours", "torch"), [record, torch], setting, own) for name, record in pairs]


def _row(name: str, names: tuple[str, ...], both: list[Record], setting: Setting, runs: Runs) -> Row:
    one, other = both
    row = {"method": name, "one": names[0], "other": names[1]}
    row |= {"one, ms [95%]": interval(one), "other, ms [95%]": interval(other)}
    for phase in ("step", *setting.phases) if len(setting.phases) > 1 else setting.phases:
        apart = other_over_one(one, other, runs.folder, phase)
        assert apart
        row[f"{phase}, other over one [95%]"] = ratio(apart, digits=2)
    sent = (f"{(record.comm_bytes_per_gpu or 0) / 1e6:.1f}" for record in both)
    return row | {"MB sent by a rank, one and other": ", ".join(sent)}


FLOAT32, BFLOAT16 = Setting("float32", ("forward", "backward")), Setting("bfloat16", ("forward",))
forms_float32, torch_float32 = (partial(made, setting=FLOAT32) for made in (forms, beside_torch))
forms_bfloat16, torch_bfloat16 = (partial(made, setting=BFLOAT16) for made in (forms, beside_torch))
