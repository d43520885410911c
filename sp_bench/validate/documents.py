"""python -m sp_bench.validate documents [out=FOLDER]

Simulates MagiAttention's published bars of packed documents (analysis/published/document_bars.csv) with
implementation=published, and writes FOLDER/published_documents.csv. A bar is the mean over packs that its authors drew,
so that it is simulated for DRAWS packs of the same distribution: those at even steps of the work among many draws.
`low` and `high` are the slowest and the fastest of them. The errors back simulated points of packs
(sp_bench/point/backing.json), by what is sent over which links.

One figure was fitted to these bars: the time of thread blocks without work (variable_block_s of flash_attn_3's rates).
`error_left_out` is without the bars of the same number of GPUs, `error_unfitted` without that figure.

  out=docs/results    the folder
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sp_bench.cli.compose import Composer
from sp_bench.packing import lengths_of
from sp_bench.plan.problem import flops_per_pair
from sp_bench.point import resolve
from sp_bench.point.backing import FILE, PACKS, TELLING, Backing, Kind, kind_of, known, written
from sp_bench.point.choose import choose
from sp_bench.resources import conf_content, conf_files
from sp_bench.validate.common import Row, by_kind, count_in_order, published_rows
from sp_bench.validate.published import figures_with
from sp_bench.workload.attention import Attention

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "github SandAI-org/MagiAttention@2c641357 assets/magi_attn/exp/distributed/h100/varlen_full_mask, digitised"
TOKENS_A_GPU = 8192
CLUSTER, KERNEL = "h100_ndr400", "flash_attn_3"
SETTING = (
    "gpus=8 seqlen=64k heads=64 kv_heads=8 head_dim=128 mask=document data=magi_attention causal=false dtype=bfloat16 "
    f"cluster={CLUSTER} kernel={KERNEL} mode=simulate logger=none"
)
BY_DOCUMENTS = "method.layout=zigzag_documents implementation=published"
POINTS = {
    "ulysses": "method=ulysses implementation=published",
    "ring_p2p": f"method=ring {BY_DOCUMENTS}",
    "ring_allgather": f"method=all_gather method.stride=8 {BY_DOCUMENTS}",
    "usp": f"method=usp method.ulysses=8 {BY_DOCUMENTS}",
    "loongtrain": f"method=loongtrain method.ulysses=8 method.inner=1 {BY_DOCUMENTS}",
    "hybrid_dcp": "method=hybrid_cp implementation=published",
    "magi_attn-a2av": "method=group_cast method.ulysses=1 method.layout=balanced implementation=ours",
    "magi_attn-native": "method=group_cast method.layout=balanced implementation=ours",
}
"""By the bars' names, the points. MagiAttention's kernel merges results itself, as this suite's fold does. Its native
form sends a row once to each node: so does a group cast with split heads, which stands for it."""
INNER = {8: 1, 16: 1, 32: 2, 64: 4}
"""LoongTrain's inner rings, by GPUs."""
OWN_KERNEL = "FFA"
"""MagiAttention's kernel: as fast as FlashAttention-3 on packs (analysis/published/kernel_documents.csv), but without
thread blocks that have no work."""
DRAWS, AMONG = 4, 100
"""So many packs are simulated, of so many that are drawn."""
STEPS = np.linspace(0, 2, 41)
"""The factors on the fitted figure that are tried."""


class Simulated(NamedTuple):
    """TFLOP/s a GPU of a bar's packs, (DRAWS,) each."""

    found: np.ndarray
    unfitted: np.ndarray
    kind: Kind | None = None
    """The kind of the points that were simulated."""

    def at(self, factor: float) -> np.ndarray:
        """With the fitted figure times a factor: times are linear in it."""
        return 1 / (1 / self.unfitted + factor * (1 / self.found - 1 / self.unfitted))


def write(out: Path) -> None:
    """Simulate all bars, write the table and what backs points of packs, and print how near they are."""
    frame = simulated(published_rows("document_bars"))
    frame.to_csv(out / "published_documents.csv", index=False)
    FILE.write_text(written([*(row for row in known() if row.kind.mask != PACKS), *backing(frame)]))
    alike, count, _ = pairs(frame)
    median = frame["error_left_out"].abs().median()
    print(f"{len(frame)} bars: median error left out {median:.1%}; {alike} of {count} pairs are in order")


def simulated(rows: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """A row for each bar: TFLOP/s a GPU, measured and simulated, its spread over packs, and errors."""
    import pandas as pd

    configs = _configs({row["method"] for row in rows})
    seen = [_of_packs(row, configs[row["method"]]) for row in rows]
    return pd.DataFrame([_row(row, each, _factor(row, rows, seen)) for row, each in zip(rows, seen, strict=True)])


def pairs(found: pd.DataFrame, column: str = "tflops_left_out") -> tuple[int, int, list[str]]:
    """(pairs ordered alike, pairs, the others in words): of one number of GPUs and phase, unlike by TELLING or more."""

    def tied(one: Row, other: Row) -> bool:
        return 1 - TELLING < one["tflops_measured"] / other["tflops_measured"] < 1 / (1 - TELLING)

    def words(one: Row, other: Row) -> str:
        return f"{one['method']} and {other['method']} ({one['gpus']} GPUs, {one['phase']})"

    groups = found.groupby(["gpus", "phase"])
    return count_in_order(groups, "tflops_measured", column, tied=tied, words=words, faster=operator.gt)


def backing(found: pd.DataFrame) -> list[Backing]:
    """The rows that back simulated records of packs: errors without the bars of the same number of GPUs, by kind of
    transfers and of links and by the implementation that bars are simulated with.
    """
    implementations = [POINTS[name].partition("implementation=")[2] for name in found["method"]]
    return [
        Backing.of(kind, rows["error_left_out"], name, {CLUSTER: figures_with(CLUSTER, KERNEL, "bfloat16", kind)})
        for kind, name, rows in by_kind(found.assign(mask=PACKS, implementation=implementations), Attention.name)
    ]


def _row(row: Mapping[str, str], seen: Simulated, factor: float) -> dict[str, Any]:
    measured, left_out = float(row["tflops_per_gpu"]), float(seen.at(factor).mean())
    rates = {"measured": measured, "simulated": float(seen.found.mean()), "left_out": left_out}
    return {
        "source": SOURCE,
        **{name: row[name] for name in ("method", "variant", "phase", "kernel")},
        "transfers": seen.kind.transfers if seen.kind else "",
        "links": seen.kind.links if seen.kind else "",
        "gpus": int(row["gpus"]),
        **{f"tflops_{name}": rate for name, rate in rates.items()},
        "low": float(seen.found.min()),
        "high": float(seen.found.max()),
        "error": measured / rates["simulated"] - 1,
        "error_left_out": measured / left_out - 1,
        "error_unfitted": measured / float(seen.unfitted.mean()) - 1,
    }


def _factor(row: Mapping[str, str], rows: Sequence[Mapping[str, str]], seen: Sequence[Simulated]) -> float:
    """The fitted figure without the bars of the row's number of GPUs, over the cluster file's."""
    others = [
        (float(other["tflops_per_gpu"]), each)
        for other, each in zip(rows, seen, strict=True)
        if other["gpus"] != row["gpus"] and not np.array_equal(each.found, each.unfitted)
    ]
    if not others:
        return 1.0
    off = [np.median([abs(rate / each.at(step).mean() - 1) for rate, each in others]) for step in STEPS]
    return float(STEPS[int(np.argmin(off))])


def _of_packs(row: Mapping[str, str], composed: Mapping[str, Any]) -> Simulated:
    gpus, phase = int(row["gpus"]), row["phase"]
    with_fit, unfitted, kinds = [], [], list[Kind]()
    for seed in draws(gpus * TOKENS_A_GPU):
        config = copy.deepcopy({**composed})
        config |= {"gpus": gpus, "seqlen": gpus * TOKENS_A_GPU, "phase": phase, "seed": seed}
        if row["method"] == "loongtrain":
            config["method"]["inner"] = INNER[gpus]
        fitted = row["kernel"] != OWN_KERNEL and phase == "backward"
        rate = _tflops(config)[0] if fitted else None
        config["cluster"]["device"]["rates"]["flash_attn_3"]["variable_block_s"] = {}
        alone, kind = _tflops(config)
        unfitted.append(alone)
        with_fit.append(alone if rate is None else rate)
        kinds.append(kind)
    return Simulated(np.array(with_fit), np.array(unfitted), max(kinds, key=kinds.count))


def _tflops(config: Mapping[str, Any]) -> tuple[float, Kind]:
    """TFLOP/s of each GPU, of the pairs that the mask leaves, and the kind of the point."""
    request = resolve(config)
    choice = choose(request)
    pairs = _work(request.problem.mask.lengths)  # pyright: ignore[reportAttributeAccessIssue]
    flops = config["heads"] * flops_per_pair(config["phase"], config["head_dim"], config["head_dim"]) * pairs
    return flops / config["gpus"] / choice.total_s / 1e12, kind_of(request, choice.plans.values())


@cache
def draws(seqlen: int) -> list[int]:
    """The seeds of DRAWS packs at even steps of the work among AMONG draws."""
    files = conf_files("data")
    data = conf_content(files["magi_attention"], files)
    order = np.argsort([_work(lengths_of(data, seqlen, seed)) for seed in range(AMONG)], kind="stable")
    return [int(order[AMONG * (2 * place + 1) // (2 * DRAWS)]) for place in range(DRAWS)]


def _work(lengths: Iterable[int]) -> int:
    """(query, key) pairs of full documents."""
    return sum(length**2 for length in lengths)


def _configs(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By bar, the config of its points."""
    with Composer() as composer:
        return {name: composer.compose([*POINTS[name].split(), *SETTING.split()]) for name in sorted(names)}
