"""python -m sp_bench.validate published [out=FOLDER]

Simulates the published measurements of analysis/published (measurements.csv, and held_out.csv, which nothing is fitted
to) with implementation=published, and reports by source how far apart the two are, and how often two methods of a
setting are ordered alike. Beside each error is the one left out: that of a simulation without what was fitted to its
source (analysis/published/fits.yaml). Writes FOLDER/published.md, .csv and .svg, and what backs a simulated record
(sp_bench/point/backing.json).

  out=docs/results    the folder
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sp_bench import markdown
from sp_bench.cli.arguments import only_keys, run_command, writable_folder
from sp_bench.cli.compose import Composer
from sp_bench.cluster.implementation import OURS
from sp_bench.extras import require
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.plan.method import PHASES
from sp_bench.point import resolve
from sp_bench.point.backing import FILE, TELLING, Backing, Kind, figures_of, transfers_of, written
from sp_bench.point.choose import plans_of
from sp_bench.resources import PACKAGE, conf_files, place
from sp_bench.validate import machine
from sp_bench.validate.left_out import LeftOut, fits, simulation
from sp_bench.validate.machine import plot
from sp_bench.workload.attention import Attention

if TYPE_CHECKING:
    import pandas as pd

DATA = place("analysis/published")
CLUSTERS = {
    "A100": "a100_hdr200",
    "A800": "a800",
    "H800": "h800",
    "L20": "l20_pcie",
    "H100": "h100_ndr400",
    "4090": "rtx4090_pcie",
}
"""The cluster of each GPU that the measurements name."""
SHAPE = ("gpus", "seqlen", "batch", "heads", "kv_heads", "head_dim", "phase", "dtype", "kernel")
SETTING = ["source", "hardware", "gpus", "seqlen", "batch", "heads", "kv_heads", "head_dim", "causal", "phase"]
"""Columns that points must share to be compared."""
MEASURED = PACKAGE.parent / "docs" / "results" / "validation.csv"
HELD_OUT = (
    "Found when the figures stood (`analysis/published/held_out.csv`). What was chosen with them: that of two thread "
    "blocks on a multiprocessor one alone gets 0.6 of its rate, with the rows of one GPU and 5 heads "
    "(`sp_bench/cluster/waves.py`). On one machine of one model the times of others can differ by twice: the H800 of "
    "issue 55 run the code of the first row's README 1.5 times as long. Machines on PCIe differ by several times: the "
    "second one of 8 L20 carries all-to-alls at about 18 GB/s a GPU, the one that `l20_pcie` is fitted to at about 2: "
    "any one figure for both is at least three times off on one of them. What such a machine carries can't be told by "
    "its GPUs and its tree of switches: calibrate yours. Of the 60 rows of 8 RTX 4090, 12 are among those above: the "
    "uplinks are fitted to them."
)

UNEXPLAINED = 0.1
"""Methods of a source with a larger error are listed."""
NOT_EXPLAINED = (
    "Methods of a source of which a point is more than 10% off. The last column is the longest of its repetitions over "
    "the shortest. Rings of all 8 A100 of long-context-attention take longer than simulated in every layout. The same "
    "source's hybrids with balanced rings of 2 and 4 ranks agree, and so do ring-flash-attention's rings of 8 A100: "
    "neither kernels nor merges nor the rate of a link account for it. On the RTX 4090, all-to-alls of 16k tokens and "
    "fewer get about twice the rate of longer ones, and rings of 4k tokens take nearly as long as of 8k."
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command("sp_bench.validate published", __doc__ or "", _published, argv)


def _published(arguments: list[str]) -> int:
    require("analysis", "validating")
    out = writable_folder("out", only_keys(arguments, {"out": "docs/results"}).get("out", "docs/results"))
    found = both()
    found.to_csv(out / "published.csv", index=False)
    plot(found, out / "published.svg")
    rows = [*backing(found), *measured_here()]
    FILE.write_text(written(rows))
    (out / "published.md").write_text(report(found))
    print((out / "published.md").read_text())
    return 0


def measurements() -> list[dict[str, str]]:
    """The published measurements, as the columns of their file."""
    with (DATA / "measurements.csv").open() as file:
        return list(csv.DictReader(file))


def held_out() -> list[dict[str, str]]:
    """Published measurements that no figure was fitted to, as the columns of their file."""
    with (DATA / "held_out.csv").open() as file:
        return list(csv.DictReader(file))


def cluster_of(hardware: str) -> str:
    """The cluster file of a machine, by the GPU in its name."""
    return next(cluster for gpu, cluster in CLUSTERS.items() if gpu in hardware)


def overrides(row: Mapping[str, str]) -> list[str]:
    """The point of a measurement, as arguments of `python -m sp_bench`."""
    shape = [f"{key}={row[key]}" for key in SHAPE]
    return [
        f"method={row['method']}", *row["variant"].split(), *shape, f"causal={row['causal'].lower()}",
        f"cluster={cluster_of(row['hardware'])}", "implementation=published", "mode=simulate", "logger=none",
    ]  # fmt: skip


def both() -> pd.DataFrame:
    """All published measurements with their simulation; the column `set` is given or held_out."""
    import pandas as pd

    sets = {"given": measurements(), "held_out": held_out()}
    return pd.concat([simulated(rows).assign(set=name) for name, rows in sets.items()], ignore_index=True)


def simulated(rows: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """A row for each measurement: what it is of, measured and simulated milliseconds, and their errors.

    What was fitted to the source of a measurement is left out of the errors `left_out`. Refitting it takes the other
    sources from measurements().
    """
    import pandas as pd

    found = []
    with Composer() as composer:
        configs = [composer.compose(overrides(row)) for row in rows]
        left_out = LeftOut([(row, composer.compose(overrides(row))) for row in measurements()])
    for row, config in zip(rows, configs, strict=True):
        here, without = simulation(config), simulation(left_out.without(row, config))
        about = {name: row[name] for name in ("source", "hardware", "method", "variant", *SHAPE, "causal")}
        times_ms = {"simulated": here.step_s * 1e3, "left_out": without.step_s * 1e3}
        measured_ms = float(row["measured_ms"])
        about |= {
            "cluster": config["cluster"]["name"],
            "transfers": here.kind.transfers,
            "links": here.kind.links,
            "step_measured_ms": measured_ms,
            **{f"step_{name}_ms": time for name, time in times_ms.items()},
            "error": times_ms["simulated"] / measured_ms - 1,
            "error_left_out": times_ms["left_out"] / measured_ms - 1,
        }
        found.append(about)
    return pd.DataFrame(found)


def pairs(found: pd.DataFrame, column: str = "step_simulated_ms") -> tuple[int, int, list[str]]:
    """(pairs ordered alike, pairs, the others in words): of one setting, with times that differ by TELLING or more."""
    alike, count, wrong = 0, 0, []
    for _, group in found.groupby(SETTING):
        for one, other in itertools.combinations(group.to_dict("records"), 2):
            same = (one["method"], one["variant"]) == (other["method"], other["variant"])
            if same or abs(one["step_measured_ms"] / other["step_measured_ms"] - 1) < TELLING:
                continue
            count += 1
            if (one["step_measured_ms"] < other["step_measured_ms"]) == (one[column] < other[column]):
                alike += 1
            else:
                wrong.append(f"{point_name(one)} and {point_name(other)} ({one['hardware']}, {one['phase']})")
    return alike, count, wrong


def backing(found: pd.DataFrame) -> list[Backing]:
    """What backs simulated records: errors by kind of transfers and of links, without what was fitted to them."""
    return _backing(found, "error_left_out", "published")


def measured_here() -> list[Backing]:
    """What backs records on emulated hosts: the points that sp_bench.validate measured on them (docs/results)."""
    import pandas as pd

    found = pd.read_csv(MEASURED, keep_default_na=False).query("status == 'ok'")
    with Composer() as composer:
        kinds = [_transfers_of(composer, row) for row in found.to_dict("records")]
    return _backing(found.assign(transfers=kinds, links="emulated hosts"), "step_error", OURS.name)


def _transfers_of(composer: Composer, row: Mapping[str, Any]) -> str:
    """What a measured point of sp_bench.validate sends."""
    options = next((line.split()[1:] for line in machine.METHODS if row["method"] in line.split()[0]), [])
    if row["method"] == "mesh":
        options = [f"method.tile=[{row['variant'].replace('x', ',')}]"]
    shape = [f"{key}={row[key]}" for key in ("method", "gpus", "seqlen", "causal", "heads")]
    keys = [*shape, *options, "cluster=shaped", "dtype=float32", "head_dim=64", "mode=simulate", "logger=none"]
    request = resolve(composer.compose(keys))
    return transfers_of(plans_of(request).values())


def _backing(found: pd.DataFrame, column: str, implementation: str) -> list[Backing]:
    """A row for each kind of points, from the errors in a column."""
    masks = [(CAUSAL if str(causal) == "True" else FULL).measured_as for causal in found["causal"]]
    rows = []
    for kinds, group in found.assign(mask=masks).groupby(["mask", "transfers", "links"]):
        mask, transfers, links = map(str, cast(tuple, kinds))
        off = np.abs(np.array(group[column], float))
        median, two_of_three = (round(float(np.quantile(off, part)), 4) for part in (0.5, 2 / 3))
        clusters = {str(name): _figures(str(name), rows, links) for name, rows in group.groupby("cluster")}
        kind = Kind(Attention.name, mask, transfers, links)
        rows.append(Backing(kind, median, two_of_three, off.size, implementation, clusters))
    return rows


def _figures(cluster: str, rows: pd.DataFrame, links: str) -> str | None:
    """figures_of a cluster of the suite's with the kernel that was measured; None for hosts of one machine."""
    if cluster not in conf_files("cluster"):
        return None
    (kernel,), dtype = rows["kernel"].unique(), rows["dtype"].iloc[0]
    return _figures_with(cluster, kernel, dtype, links)


@cache
def _figures_with(cluster: str, kernel: str, dtype: str, links: str) -> str:
    keys = [f"cluster={cluster}", f"kernel={kernel}", f"dtype={dtype}", "gpus=8", "seqlen=64k", "mode=simulate"]
    with Composer() as composer:
        request = resolve(composer.compose([*keys, "method=all_gather", "logger=none"]))
    return figures_of(request.config["cluster"], links, request.cluster.device.figures(request.problem))


def report(found: pd.DataFrame) -> str:
    """The Markdown page: errors by source, links and method, order of pairs, what is fitted, every point."""
    given, held = (found.query("set == @name") for name in ("given", "held_out"))
    alike, count, wrong = pairs(given)
    left_alike, _, _ = pairs(given, "step_left_out_ms")
    held_alike, held_count, _ = pairs(held)
    parts = [
        "# Simulated against published",
        "Made by `python -m sp_bench.validate published`. The error is simulated / measured - 1, with "
        "`implementation=published`. *Left out* is without what was fitted to the point's own source: fitted again to "
        "the other sources of its cluster where they measured the same, else as it would be without any measurement.",
        "![simulated over measured](published.svg)",
        "## Errors",
        "Of the measurements that some figures of the cluster files were fitted to (listed below):",
        *_all_errors(given),
        f"Ordered alike: {alike} of {count} pairs of a setting whose measured times differ by {TELLING:.0%} or more "
        f"({alike / count:.0%}); left out, {left_alike} ({left_alike / count:.0%}). Not: "
        f"{'; '.join(f'{pair}, {n} times' if n > 1 else pair for pair, n in _counted(wrong)) or 'none'}.",
        "## Measurements that nothing was fitted to",
        HELD_OUT,
        *_all_errors(held),
        f"Ordered alike: {held_alike} of {held_count} pairs ({held_alike / held_count:.0%}).",
        "Mesh, StarTrail and TokenRing send Q and outputs, of which nobody has published times on GPUs with their "
        "shapes: nothing here backs them there. On emulated hosts they were measured "
        "([Simulated against measured](validation.md)).",
        "## What is not explained",
        NOT_EXPLAINED,
        _unexplained(given),
        "## What is fitted to what",
        _fitted(),
        "All else is counted or has a source of its own: kernel rates and links in the cluster files, and what public "
        "code's merges move in `conf/implementation/published.yaml`.",
        "## Every point",
        _points(given),
        "## Every point that nothing was fitted to",
        _points(held),
    ]
    return "\n\n".join(parts) + "\n"


def _all_errors(found: pd.DataFrame) -> list[str]:
    by_source = found.assign(source=found["source"].map(short_source))
    return [_errors(by_source, "source"), _errors(found, "links"), _errors(found, "transfers")]


def _errors(found: pd.DataFrame, by: str) -> str:
    rows = []
    for name, group in found.groupby(by, sort=False):
        off, left = group["error"].abs(), group["error_left_out"].abs()
        quantiles = [off.median(), np.percentile(off, 90), off.max(), left.median(), np.percentile(left, 90)]
        rows.append([str(name), str(len(group)), *(f"{x:.1%}" for x in quantiles)])
    return markdown.table([by, "points", "median", "90%", "largest", "median, left out", "90%, left out"], rows)


def _unexplained(found: pd.DataFrame) -> str:
    """The methods of a source and machine of which a point is further off than UNEXPLAINED."""
    rows = []
    about = ["source", "hardware", "seqlen", "heads", "phase", "causal", "method", "variant"]
    for _, group in found.groupby(about, sort=False):
        if np.abs(np.array(group["error"])).max() > UNEXPLAINED:
            point, measured = group.iloc[0].to_dict(), group["step_measured_ms"]
            errors = ", ".join(f"{error:+.1%}" for error in group["error"])
            names = [short_source(point["source"]), point["hardware"], point_name(point), point["phase"]]
            rows.append([*names, errors, f"{measured.max() / measured.min():.2f}"])
    return markdown.table(["source", "machine", "method", "phase", "errors", "repetitions"], rows)


def _fitted() -> str:
    with Composer() as composer:
        left_out = LeftOut([(row, composer.compose(overrides(row))) for row in measurements()])
    rows = []
    for index, fit in enumerate(fits()):
        figures = [f"{path} (without: {value:g})" for path, value in fit.get("points", {}).items()]
        figures += [f"{table} (without: x {factor:g})" for table, factor in fit.get("scale", {}).items()]
        again = [again for phase in PHASES if "scale" in fit and (again := _again(left_out, index, phase))]
        rows.append([", ".join(fit["clusters"]), f"`{fit['key']}`: {', '.join(figures)}", fit["source"], fit["why"]])
        rows[-1].append("; ".join(again) or "the figure without it: no other source has measured this")
    return markdown.table(["cluster", "figures", "fitted to", "what they are", "left out"], rows)


def _again(left_out: LeftOut, index: int, phase: str) -> str:
    """What a phase's rates are fitted to without their source, in words."""
    factor, others = left_out.refitted(index, phase), left_out.others(fits()[index], phase)
    names = ", ".join(sorted({short_source(row["source"]) for row, _ in others}))
    return f"{phase} fitted again to {len(others)} points of {names}: x {factor:.2f}" if factor else ""


def _points(found: pd.DataFrame) -> str:
    rows = [
        [
            short_source(p["source"]), p["hardware"], shape_name(p), p["phase"],
            "causal" if p["causal"] == "True" else "full", point_name(p), f"{p['step_measured_ms']:.2f}",
            f"{p['step_simulated_ms']:.2f}", f"{p['error']:+.1%}", f"{p['error_left_out']:+.1%}",
        ]
        for p in found.to_dict("records")
    ]  # fmt: skip
    head = [
        "source",
        "machine",
        "shape",
        "phase",
        "mask",
        "method",
        "measured, ms",
        "simulated, ms",
        "error",
        "left out",
    ]
    return markdown.table(head, rows)


def shape_name(point: Mapping[str, Any]) -> str:
    """The tokens, heads and batch of a measurement."""
    batch = f", batch {point['batch']}" if int(point["batch"]) > 1 else ""
    return f"{int(point['seqlen']) // 1024}k, {point['heads']} heads{batch}"


def short_source(source: str) -> str:
    """The repository of a source, without the file."""
    return source.split()[1] + (" (PCIe)" if "pcie" in source else "")


def point_name(point: Mapping[str, Any]) -> str:
    """The method of a measurement with its options."""
    options = " ".join(str(point["variant"]).replace("method.", "").split())
    return f"{point['method']} {options}".strip()


def _counted(texts: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for each in texts:
        counts[each] = counts.get(each, 0) + 1
    return list(counts.items())
