"""TokenRing (Wang et al. 2024): volumes, steps on 4 A10, both directions of links, topologies, and several nodes.

The paper has one profile: a forward pass on four GPUs. All our times are simulated.
"""

from __future__ import annotations

from itertools import product

from sp_bench.analysis.figure import VOLUME_BOUNDS
from sp_bench.analysis.number import Number, computed, count, least, most, of_record
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.ranking import payload
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.studies.tokenring.profile import figure6
from sp_bench.analysis.studies.tokenring.transformer import directions, dit, topologies
from sp_bench.analysis.table import Cell
from sp_bench.records import Record

COUNTED = (("ring", 32), ("ring", 8), ("ulysses", 32), ("ulysses", 8), ("tokenring", 32), ("tokenring", 8))
"""Methods with their number of KV heads."""
COUNTED_GPUS = (4, 16, 64)
WORDS = {"ring": "Ring Attention", "ulysses": "DeepSpeed-Ulysses", "tokenring": "TokenRing"}
NODE_GPUS = (16, 32, 64)
NODE_CLUSTERS = ("ascend_oam", "h100_ndr400")
NODE_METHODS = ("ring", "double_ring", "tokenring", "tokenring, hybrid")
CHUNK = source("tokenring.chunk")


def table1(runs: Runs) -> Section:
    """The paper's comparison of parallelisms, with the volume of a GPU counted beside its words."""
    keys = {"seqlen": "256k", "causal": False, "phase": "forward"}
    records = {
        (*counted, n): record
        for (counted, n), record in runs.grid(
            lambda counted, n: point(method=counted[0], kv_heads=counted[1], gpus=n, **keys), COUNTED, COUNTED_GPUS
        ).items()
    }
    sent = {key: payload(record).over(_chunk_bytes(record)) for key, record in records.items()}
    paper = {row["parallelism"]: row for row in rows("token_ring_table1")}
    tensor = paper["tensor parallelism"]
    about = [tensor["parallelism"], tensor["communication"], tensor["limitation"], ""]
    lines: list[list[Cell]] = [[*about, *["not in sp_bench"] * 3]]
    for method, kv_heads in COUNTED:
        row, counted = paper[WORDS[method]], [sent[method, kv_heads, gpus] for gpus in COUNTED_GPUS]
        lines.append([row["parallelism"], row["communication"], row["limitation"] or "none named", kv_heads])
        lines[-1] += [number if number.value is not None else "refused" for number in counted]
    for kv_heads, (field, (name, _)) in product(dict.fromkeys(kv for _, kv in COUNTED), VOLUME_BOUNDS.items()):
        rings = [records["ring", kv_heads, gpus] for gpus in COUNTED_GPUS]
        bounds = [of_record(record, field).over(_chunk_bytes(record)) for record in rings]
        lines.append([f"{name} (ours)", "", "", kv_heads, *bounds])
    n = COUNTED_GPUS[-1]
    ring, token, refused = sent["ring", 32, n], sent["tokenring", 32, n], records["ulysses", 32, n]
    refusal = f'sp_bench refuses it on {n} GPUs ("{refused.error}")'
    values = {"by_gpus": "; ".join(f"sent on {gpus} GPUs | chunks" for gpus in COUNTED_GPUS), "rows": lines}
    values |= {"token": token, "gpus": n, "ring": ring}
    values |= {"grouped": sent["ring", 8, n], "token_grouped": sent["tokenring", 8, n]}
    return section(
        "tokenring.table1",
        **values,
        same="the same volume, on other links" if token.known == ring.known else "not the same volume",
        times=sent["tokenring", 8, n].over(sent["ring", 8, n]),
        verdict=refusal if refused.status == "unsupported" else f"not seen on {n} GPUs",
    )


def _chunk_bytes(record: Record) -> Number:
    return computed(2.0 * record.seqlen / record.gpus * record.heads * record.head_dim, CHUNK)


def nodes(runs: Runs) -> Section:
    """The hybrid of case study III: TokenRing inside nodes, Ring between them."""
    records = runs.grid(_on_nodes, NODE_CLUSTERS, NODE_GPUS, NODE_METHODS)
    times = {place: of_record(record, "forward_ms_median") for place, record in records.items()}
    gains = {
        rival: [times[c, n, rival].over(times[c, n, "tokenring, hybrid"]) for c in NODE_CLUSTERS for n in NODE_GPUS]
        for rival in ("tokenring", "double_ring")
    }
    low, high = least(gains["tokenring"]), most(gains["tokenring"])
    values = {"low": low, "high": high}
    values |= {"slow": least(gains["double_ring"]), "fast": most(gains["double_ring"])}
    values |= {"better": count(gains["double_ring"], lambda gain: gain > 1.01), "all": count(gains["double_ring"])}
    return section(
        "tokenring.nodes",
        **values,
        verdict="holds" if low.known > 1 else "holds in part" if high.known > 1 else "does not hold",
        rows=[
            [*place, times[place], times[*place[:2], "ring"].over(times[place]), str(record.bound_by or record.error)]
            for place, record in records.items()
        ],
    )


def _on_nodes(cluster: str, gpus: int, method: str) -> Point:
    name, _, hybrid = method.partition(", ")
    options = {"nodes": gpus // 8} if hybrid else {}
    return point(method=name, gpus=gpus, cluster=cluster, seqlen="128k", phase="forward", layout="zigzag", **options)
