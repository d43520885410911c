"""Writes docs/results/mesh_paper.md and conf/cluster/mesh_paper.yaml from what analysis.mesh_fit fits and predicts."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from sp_bench import markdown, methods
from sp_bench.analysis.mesh_fit import (
    HERE,
    PARAMETERS,
    TOKENS,
    Cell,
    Prediction,
    errors,
    fitted,
    held_out,
    implied_peak_tflops,
    paper_s,
    predict,
    table,
)
from sp_bench.cluster import Cluster
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import DTYPE_BYTES
from sp_bench.simulate import simulate

REPORT = HERE.resolve().parent / "docs" / "results" / "mesh_paper.md"
NOTES = HERE / "mesh_paper_notes.md"
"""What the residuals mean, by hand."""
NAMES = {tokens: name for name, tokens in TOKENS.items()}
Tile = tuple[int, int]
HELD = {"forward": (3, 2, 8), "backward": (5, 6, 26)}
"""Chunks that a rank holds for each row of its tile, for each column, and beside these (tile_held)."""
Found = Mapping[Cell, Prediction]


def cluster_file(config: Mapping[str, Any], on_fitted: tuple[float, float], on_held_out: tuple[float, float]) -> str:
    """The cluster's file, with where its numbers are from."""
    intra, inter, device = config["intra"], config["inter"], config["device"]
    lines = [
        "# The cluster of the Mesh-Attention paper, which names no hardware: fitted by analysis/mesh_paper.py to 30 of",
        "# the 48 cells of its table 3, and tested on the other 18 (docs/results/mesh_paper.md).",
        f"name: {config['name']}",
        f"gpus_per_node: {config['gpus_per_node']}",
        *_section("intra", intra),
        *_section("inter", inter),
        *(_section("fabric", config["fabric"]) if "fabric" in config else []),
        "device:",
        f"  name: {device['name']}",
        "  rates: # TFLOP/s, the same at all sizes (sp_bench/cluster/kernel_table.py)",
    ]
    for name, table_of in device["rates"].items():
        lines += [f"    {name}:", *(f"      {key}: {_flow(value)}" for key, value in table_of.items())]
    lines += [f"  {key}: {_flow(value)}" for key, value in device.items() if key not in ("name", "rates")]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rates = "the rates, transfer_slowdown" if device["transfer_slowdown"] else "the rates"
    (fit_median, fit_most), (median, most) = on_fitted, on_held_out
    return "\n".join(
        [
            *lines,
            "sources:",
            "  fitted: >-",
            f"    {today}, by least squares of the log of table 3's times over 30 cells (Ring, and Mesh on 32 GPUs):",
            f"    both latency_s, inter.bytes_per_s and flow_bytes_per_s, {rates}; gpus_per_node of 4, 8, 16, 32",
            f"  errors_fitted: median {fit_median:.1%}, max {fit_most:.1%}",
            f"  errors_held_out: median {median:.1%}, max {most:.1%} on the 18 cells of Mesh on 64 GPUs and more",
            "  peak_tflops: what tables 3 and 4 imply together, median of the fitted cells",
            "  intra.bytes_per_s, memory_bytes_per_s, launch_s: an assumption; fast enough not to matter",
            "",
        ]
    )


def _section(name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{name}:", *(f"  {key}: {_flow(value)}" for key, value in values.items())]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(entry)}" for key, entry in value.items()) + "}"
    if not isinstance(value, float):
        return str(value)
    # YAML 1.1 reads 1e+09 as a string.
    return f"{value:.4g}" if value == 0 or 1e-2 <= value < 1e4 else f"{value:.3e}"


def report(cluster: Cluster, found: Found, fits: Mapping[str, Any]) -> str:
    """The whole report."""
    chosen = next(row for row in fits["fits"] if row["name"] == fits["chosen"])
    parts = [
        "# The Mesh-Attention paper's cluster, fitted and tested",
        "Made by `python -m analysis.mesh_paper report` from `conf/cluster/mesh_paper.yaml`, which"
        " `python -m analysis.mesh_paper fit` writes. All times are simulated; the paper's are from its tables 3 to 5"
        " (`analysis/papers`).",
        _summary(found),
        "## Parameters",
        _parameters(chosen),
        "## What else was fitted",
        _fits(fits),
        "## Table 3: throughput, iterations in 100 s",
        _throughput(found),
        "## Table 4: MFU, %",
        _mfu(found, cluster.device.peak_tflops["bfloat16"]),
        "## Figure 8 and what the text says",
        _claims(cluster, found),
        "## Table 5: which tile the authors ran",
        _tiles(found),
        NOTES.read_text().strip(),
    ]
    paragraphs = "\n\n".join(parts).split("\n\n")
    return "\n\n".join(map(_wrapped, paragraphs)) + "\n"


def _wrapped(paragraph: str) -> str:
    """Prose in lines of 120."""
    if paragraph.startswith(("|", "#", "- ")):
        return paragraph
    return textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False, break_long_words=False)


def _summary(found: Found) -> str:
    paper = paper_s()
    rows = []
    sets = {"fitted: Ring, and Mesh on 32 GPUs": fitted(), "held out: Mesh on 64, 128, 256 GPUs": held_out()}
    sets |= {f"held out, {n} GPUs": [cell for cell in held_out() if cell.gpus == n] for n in (64, 128, 256)}
    for name, cells in sets.items():
        ratios = [found[cell].seconds / paper[cell] for cell in cells]
        median, most = errors(ratios)
        bias = math.exp(np.mean(np.log(ratios)))
        rows.append([name, len(cells), f"{median:.1%}", f"{most:.1%}", f"{bias:.2f}"])
    head = ["cells", "number", "median error", "max error", "geometric mean of ours / paper's time"]
    return f"{markdown.table(head, rows)}\n\nThe better method is right in {pairs_right(found)} of 24 pairs."


def pairs_right(found: Found) -> int:
    """In how many pairs of cells the faster method is the paper's."""
    paper = paper_s()
    pairs = [(cell, Cell(cell.causal, cell.seqlen, cell.gpus, "mesh")) for cell in paper if cell.method == "ring"]
    return sum((found[ring].seconds > found[mesh].seconds) == (paper[ring] > paper[mesh]) for ring, mesh in pairs)


def _parameters(chosen: Mapping[str, Any]) -> str:
    rows = []
    for name, value in chosen["values"].items():
        spread = chosen["spread"][name]
        known = "not determined" if spread is None else f"{spread:.0%}"
        rows.append([f"`{name}`", f"{value:.3g}", known, PARAMETERS[name].meaning])
    text = markdown.table(["parameter", "value", "standard error", "what it is"], rows)
    names, correlation = list(chosen["values"]), np.array(chosen["correlation"])
    pairs = [(abs(correlation[i, j]), i, j) for i in range(len(names)) for j in range(i)]
    _, i, j = max(pairs)
    return (
        f"{text}\n\nNodes have {chosen['gpus_per_node']} GPUs (chosen among 4, 8, 16 and 32). Standard errors are"
        f" relative, from the slopes at the minimum. The two that the fitted cells tell apart least are"
        f" `{names[i]}` and `{names[j]}`, with a correlation of {correlation[i, j]:.2f}."
    )


def _fits(fits: Mapping[str, Any]) -> str:
    rows = []
    for row in sorted(fits["fits"], key=lambda row: row["aicc"]):
        extra = ", ".join(f"{name} {value:.3g}" for name, value in row["values"].items())
        share = "a GPU" if row["own_nics"] else "a transfer"
        (median, most), (unseen, worst) = row["fitted"], row["held_out"]
        left_out = f"{row['left_out_rms']:.1%}" if row["left_out_rms"] < 1 else "one cell alone sets a parameter"
        numbers = [f"{row['squares']:.3f}", f"{row['aicc']:.1f}", left_out]
        shown = [f"{median:.1%}, {most:.0%}", f"{unseen:.1%}, {worst:.0%}"]
        mark = " (chosen)" if row["name"] == fits["chosen"] else ""
        rows.append([f"{row['gpus_per_node']}{mark}", share, extra, *numbers, *shown])
    head = ["GPUs of a node", "flow rate is of", "parameters", "sum of squares", "AICc", "left-out rms"]
    head += ["fitted: median, max", "held out: median, max"]
    return (
        "Chosen by AICc on the 30 fitted cells alone, where a parameter more must lower it by 2, since less says"
        " little; the last column chose nothing. The left-out error is each cell's if the others alone were fitted, to"
        " first order.\n\n" + markdown.table(head, rows)
    )


def _throughput(found: Found) -> str:
    paper, rows = paper_s(), []
    for cell, seconds in paper.items():
        ours, tile = found[cell].seconds, "x".join(map(str, found[cell].tile))
        kind = "fitted" if cell.fitted else "held out"
        rows.append([*_key(cell), tile, kind, f"{100 / ours:.1f}", f"{100 / seconds:.1f}", f"{seconds / ours:.2f}"])
    return markdown.table([*KEY, "tile", "", "ours", "paper's", "ours / paper's"], rows)


KEY = ("causal", "seqlen", "GPUs", "method")


def _key(cell: Cell) -> tuple[str, str, int, str]:
    return ("yes" if cell.causal else "no"), NAMES[cell.seqlen], cell.gpus, cell.method


def _mfu(found: Found, peak_tflops: float) -> str:
    paper, rows, ratios = table(4, "mfu"), [], {}
    seconds = paper_s()
    for cell, (percent,) in paper.items():
        ours = 100 * cell.flops_per_gpu / found[cell].seconds / (peak_tflops * 1e12)
        ratios[cell] = ours / percent
        kind = "fitted" if cell.fitted else "held out"
        implied = cell.flops_per_gpu / seconds[cell] / (percent / 100) / 1e12
        rows.append([*_key(cell), kind, f"{ours:.1f}", f"{percent:.1f}", f"{ratios[cell]:.2f}", f"{implied:.0f}"])
    sets = [("cells of fitted times", fitted()), ("held out", held_out())]
    lines = [f"{name}: median error {m:.1%}, max {w:.1%}" for name, cells in sets
             for m, w in [errors(ratios[cell] for cell in cells)]]  # fmt: skip
    return (
        f"Of a peak of {peak_tflops:.4g} TFLOP/s, the median that tables 3 and 4 imply on the fitted cells (on the"
        f" held-out cells it is {implied_peak_tflops(held_out()):.1f}). {'; '.join(lines)}. The last column is the peak"
        " that the two tables imply for the cell: where it is far off, one is wrong or the rounding is coarse.\n\n"
        + markdown.table([*KEY, "", "ours", "paper's", "ours / paper's", "implied peak"], rows)
    )


def _claims(cluster: Cluster, found: Found) -> str:
    """Figure 8's times and ratios, and the waiting that the text states."""
    long, gpus = TOKENS["1M"], (32, 64, 128, 256)
    best = {}
    rows = []
    for method, stated, at in (("ring", 37.5, 64), ("mesh", 11.9, 128)):
        ours = {n: found[Cell(True, long, n, method)].seconds for n in gpus}
        n = min(ours, key=lambda n: ours[n])
        best[method] = ours[n]
        rows.append([f"{method}, best time at 1M causal, s", f"{stated} at {at} GPUs", f"{ours[n]:.1f} at {n} GPUs"])
        rows.append([f"{method}, time at {at} GPUs, s", stated, f"{ours[at]:.1f}"])
    rows.append(["ring's best time over mesh's", 3.15, f"{best['ring'] / best['mesh']:.2f}"])
    # 1.414M tokens, a multiple of 256.
    widest = round(TOKENS["512k"] * 2**1.5 / 256) * 256
    for method, stated in (("ring", 3.74), ("mesh", 2.83)):
        start, end = found[Cell(True, TOKENS["512k"], 32, method)], predict(cluster, Cell(True, widest, 256, method))
        rows.append([f"{method}, weak scaling, 256 over 32 GPUs", stated, f"{end.seconds / start.seconds:.2f}"])
    waits = {(m, n): _waits(cluster, found[Cell(True, long, n, m)]) for m in ("ring", "mesh") for n in gpus}
    forward, busy = waits["ring", 128][0]
    rows.append(["ring, forward waiting, 128 GPUs, 1M causal", "91.5%", f"{forward / (forward + busy):.1%}"])
    waited, busy = map(sum, zip(*waits["mesh", 256], strict=True))
    rows.append(["mesh, waiting of an iteration, 256 GPUs, 1M causal", "86.6%", f"{waited / (waited + busy):.1%}"])
    totals = {key: sum(wait for wait, _ in phases) for key, phases in waits.items()}
    less = [1 - totals["mesh", n] / totals["ring", n] for n in gpus]
    rows.append(["mesh waits less than ring, 1M causal, most", "74.9%", f"{max(less):.1%}"])
    rows.append(["the same, average over GPU counts", "74.0%", f"{np.mean(less):.1%}"])
    return (
        "Nothing here was fitted, except that Ring's times at 1M, and both methods' on 32 GPUs, are among the fitted"
        " cells. Waiting is an iteration's time without the blocks, the mean over the ranks.\n\n"
        + markdown.table(["", "paper", "ours"], rows)
    )


def _waits(cluster: Cluster, found: Prediction) -> list[tuple[float, float]]:
    """Seconds that ranks wait and compute, forward and backward, the mean."""
    cell = found.cell
    problem = cell.problem
    options = {"tile": found.tile} if cell.method == "mesh" else {}
    method, costs = methods.build(cell.method, options), cluster.profile(problem)
    runs = [simulate(method.plan(problem, phase, costs), problem, cluster) for phase in PHASES]
    return [(run.makespan_s - float(run.busy_s.mean()), float(run.busy_s.mean())) for run in runs]


def held_chunks(cell: Cell, gigabytes: float) -> float:
    """Peak memory in bf16 chunks of seqlen / n tokens x hidden size."""
    problem = cell.problem
    return gigabytes * 1e9 / (problem.local_seqlen * problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype])


def tile_held(chunks: Mapping[str, float], n: int) -> Tile:
    """The tile whose chunks come nearest to the peaks of both phases.

    A row of the tile holds a q and an fp32 o (forward), an odoq and an fp32 dq (backward); a column a kv, and an fp32
    dkv. What is held beside them is taken from the cells at 256k on 32 GPUs, for 16x2.
    """

    def off(tile: Tile) -> float:
        expected = {phase: row * tile[0] + column * tile[1] + rest for phase, (row, column, rest) in HELD.items()}
        return sum(math.log(expected[phase] / chunks[phase]) ** 2 for phase in HELD)

    return min(((a, n // a) for a in range(1, n + 1) if n % a == 0), key=off)


def _tiles(found: Found) -> str:
    paper, rows = paper_s(), []
    as_held, apart, agreed = {}, {}, 0
    for cell, gigabytes in table(5, "peak_memory").items():
        if cell.method != "mesh":
            continue
        times = found[cell].by_tile
        chunks = {phase: held_chunks(cell, value) for phase, value in zip(PHASES, gigabytes, strict=True)}
        held = tile_held(chunks, cell.gpus)
        as_held[cell] = sum(times[held]) / paper[cell]
        apart[cell] = sum(min(both[i] for both in times.values()) for i in range(2)) / paper[cell]
        ratios = [f"{1 / ratio:.2f}" for ratio in (found[cell].seconds / paper[cell], as_held[cell])]
        seen = [f"{value:.0f}" for value in chunks.values()]
        agreed += held == found[cell].tile
        rows.append([*_key(cell)[:3], *seen, _name(held), _name(found[cell].tile), *ratios])
    lines = [
        f"{name}: median {m:.1%}, max {w:.1%}"
        for name, ratios in (("with its tiles", as_held), ("with the best tile of each phase", apart))
        for m, w in [errors(ratios[cell] for cell in held_out())]
    ]
    head = [*KEY[:3], "chunks forward", "backward", "its tile", "our tile", "throughput / paper's", "with its tile"]
    return (
        "Peak memory over the size of a chunk says roughly how many chunks a rank held, and so which tile it ran: a"
        " row holds 3 chunks forward (q, fp32 o) and 5 backward (odoq, fp32 dq), a column 2 (kv) and 6 (kv, fp32 dkv)."
        " The 8 and 26 chunks beside these are set by eye on the cells at 256k on 32 GPUs. The tile that comes nearest"
        f" is a guess, and no parameter uses it; it is our tile in {agreed} of {len(rows)} cells. Held-out errors,"
        f" {'; '.join(lines)}.\n\n" + markdown.table(head, rows)
    )


def _name(tile: Tile) -> str:
    return f"{tile[0]}x{tile[1]}"
