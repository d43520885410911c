"""Fits the cluster of the Mesh-Attention paper to some of the cells of its table 3.

python -m sp_bench.analysis.studies.mesh_paper.fit    # writes conf/cluster/mesh_paper.yaml, and fits.json here
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sp_bench import methods
from sp_bench.analysis.studies.mesh import paper as printed
from sp_bench.analysis.studies.mesh_paper.least_squares import fit
from sp_bench.cluster import Cluster
from sp_bench.plan.method import PHASES, Method
from sp_bench.simulate import simulate

CLUSTER_HEAD = """\
# The cluster of the Mesh-Attention paper, which names no hardware: fitted by analysis/studies/mesh_paper to 30 of
# the 48 cells of its table 3, and tested on the other 18 (docs/results/mesh_paper.md). Rates are in TFLOP/s, the
# same at all sizes (sp_bench/cluster/kernel_table.py).
"""
FITS = Path(__file__).with_name("fits.json")


@dataclass(frozen=True)
class Parameter:
    """A number of the cluster that may be fitted, with its first value and its bounds."""

    start: float
    low: float
    high: float
    meaning: str


PARAMETERS = {
    "flow_gb_per_s": Parameter(1.0, 0.1, 50, "GB/s that one transfer between two nodes gets at most"),
    "node_gb_per_s": Parameter(3.5, 0.1, 400, "GB/s out of, and into, each node, which its GPUs share"),
    "step_ms": Parameter(7.0, 0.01, 100, "ms before the first byte of each transfer, inside nodes too"),
    "tflops": Parameter(65.0, 20, 148, "TFLOP/s of the block kernels, forward and backward"),
    "causal_tflops": Parameter(60.0, 20, 148, "the same of blocks with a causal mask"),
    "intra_gb_per_s": Parameter(10.0, 0.5, 400, "GB/s of each GPU's port inside its node"),
    # Above 0.4, the most that has been published for NCCL, it would stand for something else.
    "transfer_slowdown": Parameter(0.2, 0.01, 0.4, "how much longer kernels take while their rank sends"),
}
FIXED = {"intra_gb_per_s": 100.0, "transfer_slowdown": 0.0, "node_gb_per_s": 1e4}
"""Values of parameters that are not fitted, fast enough not to matter."""
NODES, WORKERS = (8, 16, 32, 4), 2
BASE = ("flow_gb_per_s", "step_ms", "tflops")


@dataclass(frozen=True)
class Variant:
    """A set of parameters to fit, and the shape of the cluster that they are numbers of."""

    gpus_per_node: int
    free: tuple[str, ...]
    own_nics: bool = False
    """Whether flow_gb_per_s is the rate of a GPU, which concurrent transfers share, rather than of each transfer."""

    @property
    def name(self) -> str:
        """The variant in a few words."""
        wiring = ", flows of a GPU share its rate" if self.own_nics else ""
        return f"nodes of {self.gpus_per_node}{wiring}: {', '.join(self.free)}"

    def config(self, values: Mapping[str, float]) -> dict[str, Any]:
        """The cluster in the form of a file of conf/cluster."""
        v = {**FIXED, **values}
        g, step_s, flow, node = self.gpus_per_node, v["step_ms"] / 1e3, v["flow_gb_per_s"], v["node_gb_per_s"]
        inter: dict[str, Any] = {"bytes_per_s": node * 1e9, "latency_s": step_s, "nics_per_node": 1}
        fabric = None
        if self.own_nics:
            inter = {"bytes_per_s": flow * 1e9, "latency_s": step_s}
            # The node's shared link is a leaf switch of one node.
            fabric = {"nodes_per_leaf": 1, "oversubscription": max(1.0, g * flow / node), "latency_s": 0.0}
        else:
            inter["flow_bytes_per_s"] = flow * 1e9
        full, causal = v["tflops"], v.get("causal_tflops", v["tflops"])
        by_mask = {"full": full, "causal": causal}
        rates = {f"{phase}_{mask}": {1024: rate} for phase in PHASES for mask, rate in by_mask.items()}
        config = {
            "name": "mesh_paper",
            "gpus_per_node": g,
            "intra": {"bytes_per_s": v["intra_gb_per_s"] * 1e9, "latency_s": step_s},
            "inter": inter,
            "device": {
                "name": "the Mesh-Attention paper's GPU",
                "rates": {
                    "fitted": {"figures": "assumed", "head_dim": printed.HEAD_DIM, "dtypes": {"bfloat16": 1.0}, **rates}
                },
                "peak_tflops": {"bfloat16": printed.implied_peak_tflops(printed.fitted())},
                "memory_bytes_per_s": 3.2e12,
                "launch_s": 5e-6,
                "transfer_slowdown": v["transfer_slowdown"],
            },
        }
        return config | ({"fabric": fabric} if fabric else {})


@dataclass(frozen=True, eq=False)
class Prediction:
    """A cell simulated with every tile that its method can have."""

    cell: printed.Cell
    by_tile: Mapping[tuple[int, int], tuple[float, float]]
    """Seconds forward and backward, by tile."""

    @property
    def tile(self) -> tuple[int, int]:
        """The fastest tile, which tile=auto chooses."""
        return min(self.by_tile, key=lambda tile: sum(self.by_tile[tile]))

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, forward and backward."""
        return sum(self.by_tile[self.tile])


def predict(cluster: Cluster, cell: printed.Cell) -> Prediction:
    """Simulate a cell."""
    problem = cell.problem
    costs = cluster.profile(problem)

    def times(method: Method) -> tuple[float, float]:
        plans = (method.plan(problem, phase, costs) for phase in PHASES)
        forward_s, backward_s = (simulate(plan, problem, cluster).makespan_s for plan in plans)
        return forward_s, backward_s

    variants = methods.build(cell.method, {}).candidates(problem)
    return Prediction(cell, {method.tile_shape(cell.gpus) or (1, cell.gpus): times(method) for method in variants})


def fit_variant(variant: Variant) -> dict[str, Any]:
    """Fit log(ours / paper's) by least squares over the fitted cells; returns the row of the report."""
    paper = printed.paper_s()
    measured = np.log([paper[cell] for cell in printed.fitted()])

    def residuals(values: Mapping[str, float]) -> np.ndarray:
        cluster = Cluster.build(variant.config(values))
        return np.log([predict(cluster, cell).seconds for cell in printed.fitted()]) - measured

    start = {name: PARAMETERS[name].start for name in variant.free}
    bounds = {name: (PARAMETERS[name].low, PARAMETERS[name].high) for name in variant.free}
    solution = fit(residuals, start, bounds)
    # Computed last: held-out errors choose nothing.
    cluster = Cluster.build(variant.config(solution.values))
    unseen = printed.errors(predict(cluster, cell).seconds / paper[cell] for cell in printed.held_out())
    print(f"{variant.name}: {solution.aicc:.1f} {dict(solution.values)} {unseen}", file=sys.stderr, flush=True)
    return {
        "name": variant.name,
        "gpus_per_node": variant.gpus_per_node,
        "own_nics": variant.own_nics,
        "values": dict(solution.values),
        "spread": {name: value if np.isfinite(value) else None for name, value in solution.spread.items()},
        "correlation": solution.correlation.tolist(),
        "squares": solution.squares,
        "aicc": solution.aicc,
        "left_out_rms": solution.left_out_rms,
        "fitted": printed.errors(np.exp(solution.residuals)),
        "held_out": unseen,
    }


def fit_all() -> tuple[Variant, list[dict[str, Any]]]:
    """Fit variants step by step; returns the best on the fitted cells, and a row for each.

    First come the node sizes, then the best one with a parameter less or more, then the result with the second best
    node size. The best has the least AICc, where each additional parameter must lower it by 2: less says little.
    """
    with_node = (*BASE, "node_gb_per_s")
    rows: dict[Variant, dict[str, Any]] = {}
    with ProcessPoolExecutor(WORKERS) as pool:

        def ranked(variants: Iterable[Variant]) -> list[Variant]:
            new = [variant for variant in variants if variant not in rows]
            rows.update(zip(new, pool.map(fit_variant, new), strict=True))
            return sorted(rows, key=lambda variant: rows[variant]["aicc"] + 2 * len(variant.free))

        best, second, *_ = ranked(Variant(g, with_node) for g in NODES)
        extended = [replace(best, free=(*with_node, name)) for name in PARAMETERS if name not in with_node]
        best = ranked([replace(best, free=BASE), replace(best, own_nics=True), *extended])[0]
        best = ranked([replace(best, gpus_per_node=second.gpus_per_node)])[0]
    return best, list(rows.values())


def rounded(config: Any) -> Any:
    """A config with its numbers rounded to four digits."""
    if isinstance(config, dict):
        return {key: rounded(value) for key, value in config.items()}
    return float(f"{config:.4g}") if isinstance(config, float) else config


def cluster_file(config: Mapping[str, Any], on_fitted: tuple[float, float], on_held_out: tuple[float, float]) -> str:
    """The cluster's file. The errors are median and maximum of |ours / paper's - 1|."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rates = "the rates, transfer_slowdown" if config["device"]["transfer_slowdown"] else "the rates"
    (fit_median, fit_most), (median, most) = on_fitted, on_held_out
    sources = {
        "fitted": f"{today}, by least squares of the log of table 3's times over 30 cells (Ring, and Mesh on 32 GPUs):"
        f" both latency_s, inter.bytes_per_s and flow_bytes_per_s, {rates}; gpus_per_node of 4, 8, 16, 32",
        "errors_fitted": f"median {fit_median:.1%}, max {fit_most:.1%}",
        "errors_held_out": f"median {median:.1%}, max {most:.1%} on the 18 cells of Mesh on 64 GPUs and more",
        "peak_tflops": "what tables 3 and 4 imply together, median of the fitted cells",
        "intra.bytes_per_s, memory_bytes_per_s, launch_s": "an assumption; fast enough not to matter",
    }
    return CLUSTER_HEAD + yaml.safe_dump({**config, "sources": sources}, sort_keys=False, width=110)


def main() -> None:
    """Fit the cluster, and write its file and the fits."""
    best, rows = fit_all()
    FITS.write_text(json.dumps({"chosen": best.name, "fits": rows}, indent=1) + "\n")
    chosen = next(row for row in rows if row["name"] == best.name)
    config, paper = rounded(best.config(chosen["values"])), printed.paper_s()
    cluster = Cluster.build(config)
    over_paper = {cell: predict(cluster, cell).seconds / paper[cell] for cell in paper}
    by_set = [printed.errors(over_paper[cell] for cell in cells) for cells in (printed.fitted(), printed.held_out())]
    printed.CLUSTER.write_text(cluster_file(config, *by_set))
    print(printed.CLUSTER.read_text())


if __name__ == "__main__":
    main()
