"""TokenRing (Wang et al. 2024): volumes, steps on 4 A10, both directions of links, topologies, and several nodes.

The paper has one profile: a forward pass on four GPUs. All our times are simulated.
"""

from __future__ import annotations

from itertools import product

from sp_bench.analysis.figure import VOLUME_BOUNDS
from sp_bench.analysis.number import Number, computed, count, derived, formula, least, most, of_record
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.tokenring.links import directions, topologies
from sp_bench.analysis.studies.tokenring.profile import figure6
from sp_bench.analysis.studies.tokenring.transformer import dit
from sp_bench.analysis.table import Cell, Table, columns
from sp_bench.records import Record

COUNTED = (("ring", 32), ("ring", 8), ("ulysses", 32), ("ulysses", 8), ("tokenring", 32), ("tokenring", 8))
"""Methods with their number of KV heads."""
COUNTED_GPUS = (4, 16, 64)
WORDS = {"ring": "Ring Attention", "ulysses": "DeepSpeed-Ulysses", "tokenring": "TokenRing"}
NODE_GPUS = (16, 32, 64)
NODE_CLUSTERS = ("ascend_oam", "h100_ndr400")
NODE_METHODS = ("ring", "double_ring", "tokenring", "tokenring, hybrid")


def table1(runs: Runs) -> Section:
    """The paper's comparison of parallelisms, with the volume of a GPU counted beside its words."""
    keys = {"seqlen": "256k", "causal": False, "phase": "forward"}
    places = [(method, kv_heads, gpus) for method, kv_heads in COUNTED for gpus in COUNTED_GPUS]
    found = runs.by_key({(m, kv, n): point(method=m, kv_heads=kv, gpus=n, **keys) for m, kv, n in places})
    sent = {key: _chunks_sent(record) for key, record in found.items()}
    words = {row["parallelism"]: row for row in rows("token_ring_table1")}
    tensor = words["tensor parallelism"]
    lines: list[list[Cell]] = [
        [tensor["parallelism"], tensor["communication"], tensor["limitation"], "", *["not in sp_bench"] * 3]
    ]
    for method, kv_heads in COUNTED:
        paper, counted = words[WORDS[method]], [sent[method, kv_heads, gpus] for gpus in COUNTED_GPUS]
        lines.append([paper["parallelism"], paper["communication"], paper["limitation"] or "none named", kv_heads])
        lines[-1] += [number if number.value is not None else "refused" for number in counted]
    for kv_heads, (field, (name, _)) in product(dict.fromkeys(kv for _, kv in COUNTED), VOLUME_BOUNDS.items()):
        rings = [found["ring", kv_heads, gpus] for gpus in COUNTED_GPUS]
        lines.append([f"{name} (ours)", "", "", kv_heads])
        lines[-1] += [of_record(record, field).over(_chunk_bytes(record)) for record in rings]
    heads = columns(
        "parallelism; communication; limitation; KV heads; "
        + "; ".join(f"sent on {gpus} GPUs | chunks" for gpus in COUNTED_GPUS)
    )
    gpus = COUNTED_GPUS[-1]
    ring, token, refused = sent["ring", 32, gpus], sent["tokenring", 32, gpus], found["ulysses", 32, gpus]
    refusal = f'sp_bench refuses it on {gpus} GPUs ("{refused.error}")'
    return Section(
        "Table 1: parallelisms, and the volume of a GPU",
        text(
            "The words of the first three columns are the paper's. The other columns are counted from our plans: the"
            " payload that a GPU sends in the forward pass, with full attention and 32 heads, without the lse. The unit"
            " is a chunk of Q: a GPU's tokens times heads times head dim. Below are the least that any method sends"
            " with whole heads, and with any split of them."
        ),
        Table("tokenring-table1", "Communication and limitation (paper), and volume (ours)", heads, lines),
        text(
            "With 32 KV heads, TokenRing sends {token} chunks on {gpus} GPUs and Ring {ring}: {same}. With 8 KV heads"
            " Ring sends {grouped} and TokenRing still {token_grouped}, {times:.3g} times as much. Q and the outputs"
            " don't shrink with grouped queries, which table 1 doesn't say.",
            token=token,
            gpus=gpus,
            ring=ring,
            same="the same volume, on other links" if token.known == ring.known else "not the same volume",
            grouped=sent["ring", 8, gpus],
            token_grouped=sent["tokenring", 8, gpus],
            times=sent["tokenring", 8, gpus].over(sent["ring", 8, gpus]),
        ),
        text(
            "Ulysses can't use more GPUs than heads: {verdict}.",
            verdict=refusal if refused.status == "unsupported" else f"not seen on {gpus} GPUs",
        ),
    )


def _chunks_sent(record: Record) -> Number:
    """The payload of a GPU in chunks of Q."""
    sent, lse = of_record(record, "comm_bytes_per_gpu"), of_record(record, "comm_bytes_statistics")
    return derived(lambda a, b, c: (a - b) / c, sent, lse, _chunk_bytes(record))


def _chunk_bytes(record: Record) -> Number:
    chunk = formula("tokenring-chunk", "bytes of a chunk of Q: seqlen / gpus * heads * head_dim * 2", "section 3.1")
    return computed(2.0 * record.seqlen / record.gpus * record.heads * record.head_dim, chunk)


def nodes(runs: Runs) -> Section:
    """The hybrid of case study III: TokenRing inside nodes, Ring between them."""
    places = [(cluster, n, method) for cluster in NODE_CLUSTERS for n in NODE_GPUS for method in NODE_METHODS]
    found = runs.by_key({place: _on_nodes(*place) for place in places})
    times = {place: of_record(record, "forward_ms_median") for place, record in found.items()}
    lines: list[list[Cell]] = []
    for (cluster, n, method), record in found.items():
        time = times[cluster, n, method]
        faster = times[cluster, n, "ring"].over(time)
        lines.append([cluster, n, method, time, faster, str(record.bound_by or record.error)])
    hybrid, gains = "tokenring, hybrid", {}
    for rival in ("tokenring", "double_ring"):
        gains[rival] = [times[c, n, rival].over(times[c, n, hybrid]) for c in NODE_CLUSTERS for n in NODE_GPUS]
    low, high = least(gains["tokenring"]), most(gains["tokenring"])
    heads = columns("cluster; GPUs; method; forward | ms; Ring / method || .2f; bound by")
    return Section(
        "Case study III: TokenRing across nodes",
        text(
            "The paper proposes TokenRing inside nodes and Ring between them, without times. Simulated, forward,"
            " causal, zigzag, 128k tokens, 8 GPUs in a node: TokenRing among all GPUs, the hybrid, Ring, and Double"
            " Ring, which splits its ring as the hybrid does but sends KV in both."
        ),
        Table("tokenring-nodes", "Hybrid and plain TokenRing on several nodes", heads, lines),
        text(
            "The hybrid is {low:.2f} to {high:.2f} times as fast as TokenRing among all GPUs: the claim that several"
            " nodes need it {verdict}. It is {slow:.2f} to {fast:.2f} times as fast as Double Ring, and more than 1%"
            " faster in {better:.0f} of {all:.0f} points.",
            low=low,
            high=high,
            verdict="holds" if low.known > 1 else "holds in part" if high.known > 1 else "does not hold",
            slow=least(gains["double_ring"]),
            fast=most(gains["double_ring"]),
            better=count(gains["double_ring"], lambda gain: gain > 1.01),
            all=count(gains["double_ring"]),
        ),
    )


def _on_nodes(cluster: str, gpus: int, method: str) -> Point:
    name, _, hybrid = method.partition(", ")
    options = {"nodes": gpus // 8} if hybrid else {}
    return point(method=name, gpus=gpus, cluster=cluster, seqlen="128k", phase="forward", layout="zigzag", **options)
