"""python -m sp_bench.validate published [out=FOLDER]

Simulates the published measurements of analysis/published (measurements.csv; held_out.csv, which nothing is fitted to;
second.csv, tiles and larger machines) with the implementation that was measured. Writes FOLDER/published.csv, with the
error of each, and what backs a simulated record (sp_bench/point/backing.json). Beside each error is the one left out:
that of a simulation without what was fitted to its source (analysis/published/fits.yaml). `python -m
analysis.reproduce study=published` makes the page.

  out=docs/results    the folder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_bench.cli.compose import Composer
from sp_bench.cluster.implementation import OURS
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.point import resolve
from sp_bench.point.backing import FILE, PACKS, TELLING, Backing, Kind, figures_of, known, transfers_of, written
from sp_bench.point.variants import plans_of
from sp_bench.resources import PACKAGE, conf_files
from sp_bench.validate import machine, steps
from sp_bench.validate.common import Row, by_kind, count_in_order, most_measured, published_rows
from sp_bench.validate.left_out import LeftOut, simulation
from sp_bench.workload.attention import Attention

if TYPE_CHECKING:
    import pandas as pd

CLUSTERS = {
    "A100": "a100_hdr200",
    "A800": "a800",
    "H800": "h800",
    "L20": "l20_pcie",
    "H100": "h100_ndr400",
    "B200": "b200",
    "4090": "rtx4090_pcie",
}
"""The cluster of each GPU that the measurements name."""
SHAPE = ("gpus", "seqlen", "batch", "heads", "kv_heads", "head_dim", "phase", "dtype", "kernel")
SETTING = ["source", "hardware", "gpus", "seqlen", "batch", "heads", "kv_heads", "head_dim", "causal", "phase"]
"""Columns that points must share to be compared."""
MEASURED = PACKAGE.parent / "docs" / "results" / "validation.csv"


def write(out: Path) -> None:
    """Simulate all measurements, and write the table and what backs simulated records."""
    frame = both()
    frame.to_csv(out / "published.csv", index=False)
    of_packs = [row for row in known() if row.kind.mask == PACKS]
    rows = [*backing(frame), *steps.backing(steps.simulated(published_rows("steps"))), *measured_here(), *of_packs]
    FILE.write_text(written(rows))
    print(f"{out / 'published.csv'}: {len(frame)} points; {FILE}: {len(rows)} kinds of points")


def implementation_of(row: Mapping[str, str]) -> str:
    """The implementation that was measured, a name of conf/implementation."""
    return row.get("implementation") or "published"


def cluster_of(hardware: str) -> str:
    """The cluster file of a machine, by the GPU in its name."""
    return next(cluster for gpu, cluster in CLUSTERS.items() if gpu in hardware)


def overrides(row: Mapping[str, str]) -> list[str]:
    """The point of a measurement, as arguments of `python -m sp_bench`."""
    shape = [f"{key}={row[key]}" for key in SHAPE]
    return [
        f"method={row['method']}", *row["variant"].split(), *shape, f"causal={row['causal'].lower()}",
        f"cluster={cluster_of(row['hardware'])}", f"implementation={implementation_of(row)}", "mode=simulate",
        "logger=none",
    ]  # fmt: skip


def both() -> pd.DataFrame:
    """All published measurements with their simulation; the column `set` is given, held_out or second."""
    import pandas as pd

    files = {"given": "measurements", "held_out": "held_out", "second": "second"}
    sets = [simulated(published_rows(file)).assign(set=name) for name, file in files.items()]
    return pd.concat(sets, ignore_index=True)


def simulated(rows: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """A row for each measurement: what it is of, measured and simulated milliseconds, and their errors.

    What was fitted to the source of a measurement is left out of the errors `left_out`. Refitting it takes the other
    sources from measurements.csv.
    """
    import pandas as pd

    table = []
    with Composer() as composer:
        configs = [composer.compose(overrides(row)) for row in rows]
        left_out = LeftOut([(row, composer.compose(overrides(row))) for row in published_rows("measurements")])
    for row, config in zip(rows, configs, strict=True):
        run, without = simulation(config), simulation(left_out.without(row, config))
        about = {name: row[name] for name in ("source", "hardware", "method", "variant", *SHAPE, "causal")}
        times_ms = {"simulated": run.step_s * 1e3, "left_out": without.step_s * 1e3}
        measured_ms = float(row["measured_ms"])
        about |= {
            "implementation": implementation_of(row),
            "cluster": config["cluster"]["name"],
            "transfers": run.kind.transfers,
            "links": run.kind.links,
            "step_measured_ms": measured_ms,
            **{f"step_{name}_ms": time for name, time in times_ms.items()},
            "error": times_ms["simulated"] / measured_ms - 1,
            "error_left_out": times_ms["left_out"] / measured_ms - 1,
        }
        table.append(about)
    return pd.DataFrame(table)


def pairs(found: pd.DataFrame, column: str = "step_simulated_ms") -> tuple[int, int, list[str]]:
    """(pairs ordered alike, pairs, the others in words): of one setting, with times that differ by TELLING or more."""

    def tied(one: Row, other: Row) -> bool:
        same = (one["method"], one["variant"]) == (other["method"], other["variant"])
        return same or abs(one["step_measured_ms"] / other["step_measured_ms"] - 1) < TELLING

    def words(one: Row, other: Row) -> str:
        return f"{point_name(one)} and {point_name(other)} ({one['hardware']}, {one['phase']})"

    return count_in_order(found.groupby(SETTING), "step_measured_ms", column, tied=tied, words=words)


def backing(found: pd.DataFrame) -> list[Backing]:
    """The rows that back simulated records: errors by kind of transfers and of links, with their fits left out.

    Where several implementations were measured, the one with the most points backs a kind.
    """
    return most_measured(_backing(found, "error_left_out"))


def measured_here() -> list[Backing]:
    """The rows that back records on emulated hosts: points that sp_bench.validate measured there (docs/results)."""
    import pandas as pd

    frame = pd.read_csv(MEASURED, keep_default_na=False).query("status == 'ok'")
    with Composer() as composer:
        kinds = [_transfers_of(composer, row) for row in frame.to_dict("records")]
    about = {"transfers": kinds, "links": "emulated hosts", "implementation": OURS.name}
    return _backing(frame.assign(**about), "step_error")


def _transfers_of(composer: Composer, row: Mapping[str, Any]) -> str:
    """The kind of transfers of a measured point of sp_bench.validate."""
    options = next((line.split()[1:] for line in machine.METHODS if row["method"] in line.split()[0]), [])
    if row["method"] == "mesh":
        options = [f"method.tile=[{row['variant'].replace('x', ',')}]"]
    shape = [f"{key}={row[key]}" for key in ("method", "gpus", "seqlen", "causal", "heads")]
    keys = [*shape, *options, "cluster=shaped", "dtype=float32", "head_dim=64", "mode=simulate", "logger=none"]
    request = resolve(composer.compose(keys))
    return transfers_of(plans_of(request).values())


def _backing(found: pd.DataFrame, column: str) -> list[Backing]:
    """A row for each kind of points and each implementation, from the errors in a column."""
    masks = [(CAUSAL if str(causal) == "True" else FULL).measured_as for causal in found["causal"]]
    rows = []
    for kind, implementation, group in by_kind(found.assign(mask=masks), Attention.name):
        clusters = {str(name): _figures(str(name), rows, kind) for name, rows in group.groupby("cluster")}
        rows.append(Backing.of(kind, group[column], implementation, clusters))
    return rows


def _figures(cluster: str, rows: pd.DataFrame, kind: Kind) -> str | None:
    """figures_of a cluster of the suite's with the kernel that was measured; None for hosts of one machine."""
    if cluster not in conf_files("cluster"):
        return None
    kernel, dtype = rows["kernel"].iloc[0], rows["dtype"].iloc[0]
    assert (rows["kernel"] == kernel).all(), f"several kernels were measured on {cluster}"
    return figures_with(cluster, kernel, dtype, kind)


@cache
def figures_with(cluster: str, kernel: str, dtype: str, kind: Kind) -> str:
    """figures_of a cluster of the suite's with a kernel."""
    keys = [f"cluster={cluster}", f"kernel={kernel}", f"dtype={dtype}", "gpus=8", "seqlen=64k", "mode=simulate"]
    with Composer() as composer:
        request = resolve(composer.compose([*keys, "method=all_gather", "logger=none"]))
    return figures_of(request.config["cluster"], kind, request.cluster.device.figures(request.problem))[0]


def point_name(point: Mapping[str, Any]) -> str:
    """The method of a measurement with its options."""
    options = " ".join(str(point["variant"]).replace("method.", "").split())
    return f"{point['method']} {options}".strip()
