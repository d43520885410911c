"""Fit the cluster that the Mesh-Attention paper doesn't name, and test it on the cells that were not fitted.

python -m analysis.mesh_paper fit       # writes conf/cluster/mesh_paper.yaml and analysis/mesh_paper_fits.json
python -m analysis.mesh_paper report    # simulates every cell with that file; writes docs/results/mesh_paper.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sp_bench.analysis.mesh_fit import (
    CLUSTER,
    HERE,
    errors,
    fit_all,
    fitted,
    held_out,
    paper_s,
    predict,
    rounded,
)
from sp_bench.analysis.mesh_report import REPORT, cluster_file, report
from sp_bench.analysis.runs import Runs
from sp_bench.cluster import Cluster

FITS = HERE / "mesh_paper_fits.json"
RECORDS = Path("results/report/records")


def run_fit() -> None:
    """Fit the cluster, and write its file and the fits."""
    best, rows = fit_all()
    FITS.write_text(json.dumps({"chosen": best.name, "fits": rows}, indent=1) + "\n")
    chosen = next(row for row in rows if row["name"] == best.name)
    config, paper = rounded(best.config(chosen["values"])), paper_s()
    cluster = Cluster.build(config)
    found = {cell: predict(cluster, cell).seconds / paper[cell] for cell in paper}
    by_set = [errors(found[cell] for cell in cells) for cells in (fitted(), held_out())]
    CLUSTER.write_text(cluster_file(config, *by_set))
    print(CLUSTER.read_text())


def run_report() -> None:
    """Simulate all cells with the cluster's file, and write the report."""
    REPORT.write_text(report(Runs(RECORDS), json.loads(FITS.read_text())))
    print(REPORT.read_text())


if __name__ == "__main__":
    commands = {"fit": run_fit, "report": run_report}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit("usage: python -m analysis.mesh_paper fit, or report")
    commands[sys.argv[1]]()
