"""TokenRing (Wang et al. 2024): what it sends, its steps on 4 A10, both directions of links, topologies and nodes.

The paper has one profile, of a forward pass on four GPUs. All times of ours are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

from sp_bench.analysis.number import Number, derived, formula, of_record, record_source
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.tokenring_figure6 import figure6
from sp_bench.analysis.studies.tokenring_links import directions, topologies
from sp_bench.analysis.table import Cell, Column, Table
from sp_bench.records import Record

COUNTED = (("ring", 32), ("ring", 8), ("ulysses", 32), ("ulysses", 8), ("tokenring", 32), ("tokenring", 8))
"""Method and kv_heads."""
COUNTED_GPUS = (4, 16, 64)
WORDS = {"ring": "Ring Attention", "ulysses": "DeepSpeed-Ulysses", "tokenring": "TokenRing"}
NODE_GPUS = (16, 32, 64)
NODE_CLUSTERS = ("ascend_oam", "h100_ndr400")
NODE_METHODS = ("ring", "double_ring", "tokenring", "tokenring, hybrid")


def sections(runs: Runs) -> Iterator[Section]:
    """Table 1, figure 6, and what the paper argues without figures."""
    yield table1(runs)
    yield figure6(runs)
    yield directions(runs)
    yield topologies(runs)
    yield nodes(runs)


def table1(runs: Runs) -> Section:
    """The comparison of parallelisms, with what a GPU sends counted beside the words."""
    asked = {
        (method, kv_heads, gpus): point(
            method=method, gpus=gpus, kv_heads=kv_heads, seqlen="256k", causal=False, phase="forward"
        )
        for method, kv_heads in COUNTED
        for gpus in COUNTED_GPUS
    }
    found = dict(zip(asked, runs.ask(asked.values()), strict=True))
    words = {row["parallelism"]: row for row in rows("token_ring_table1")}
    tensor = words["tensor parallelism"]
    lines: list[list[Cell]] = [
        [tensor["parallelism"], tensor["communication"], tensor["limitation"], "", *["not in sp_bench"] * 3]
    ]
    for method, kv_heads in COUNTED:
        paper = words[WORDS[method]]
        counted = [_chunks_sent(found[method, kv_heads, gpus]) for gpus in COUNTED_GPUS]
        lines.append([paper["parallelism"], paper["communication"], paper["limitation"] or "none named", kv_heads])
        lines[-1] += [number if number.value is not None else "refused" for number in counted]
    columns = [Column("parallelism"), Column("communication"), Column("limitation"), Column("key heads")]
    columns += [Column(f"sent on {gpus} GPUs", "chunks", ".4g") for gpus in COUNTED_GPUS]
    most = COUNTED_GPUS[-1]
    ring, grouped = _chunks_sent(found["ring", 32, most]), _chunks_sent(found["ring", 8, most])
    token, token_grouped = _chunks_sent(found["tokenring", 32, most]), _chunks_sent(found["tokenring", 8, most])
    refused = found["ulysses", 32, most]
    return Section(
        "Table 1: parallelisms, and what a GPU sends",
        [
            text(
                "The words of the first three columns are the paper's. The others are counted from our plans: payload"
                " that a GPU sends forward, with full attention and 32 heads, in chunks of Q (a GPU's tokens times"
                " heads times head dim), the lse apart. No model of time is in them."
            ),
            Table("tokenring-table1", "Communication and limitation (paper), and volume (ours)", columns, lines),
            text(
                "With as many key heads as heads, TokenRing sends {token} chunks on {gpus} GPUs and Ring {ring}:"
                + (" the same volume, on other links." if token.known == ring.known else " not the same volume.")
                + " With {few} key heads Ring sends {grouped} and TokenRing still {token_grouped}, {times:.3g} times as"
                " much: Q and the outputs don't shrink with grouped queries, which table 1 doesn't say.",
                token=token,
                gpus=Number(most, "computed", ring.sources),
                ring=ring,
                few=Number(8, "computed", grouped.sources),
                grouped=grouped,
                token_grouped=token_grouped,
                times=token_grouped.over(grouped),
            ),
            text(
                "Ulysses' limit, the number of heads, holds: "
                + (
                    f'sp_bench refuses it on {{gpus}} GPUs ("{refused.error}").'
                    if refused.status == "unsupported"
                    else "not on {gpus} GPUs."
                ),
                gpus=Number(most, "computed", (record_source(refused),)),
            ),
        ],
    )


def _chunks_sent(record: Record) -> Number:
    """Payload of a GPU in units of its chunk of Q."""
    chunk = formula("tokenring-chunk", "bytes of a chunk of Q: seqlen / gpus * heads * head_dim * 2", "section 3.1")
    size = Number(2.0 * record.seqlen / record.gpus * record.heads * record.head_dim, "computed", (chunk,))
    sent, lse = of_record(record, "comm_bytes_per_gpu"), of_record(record, "comm_bytes_statistics")
    return derived(lambda a, b, c: (a - b) / c, sent, lse, size)


def nodes(runs: Runs) -> Section:
    """The hybrid of case study III: TokenRing inside nodes, Ring between them."""
    asked = {(c, n, m): _on_nodes(c, n, m) for c in NODE_CLUSTERS for n in NODE_GPUS for m in NODE_METHODS}
    found = dict(zip(asked, runs.ask(asked.values()), strict=True))
    lines: list[list[Cell]] = []
    gains: list[Number] = []
    for (cluster, n, method), record in found.items():
        time, ring = (of_record(r, "forward_ms_median") for r in (record, found[cluster, n, "ring"]))
        lines.append([cluster, n, method, time, ring.over(time), str(record.bound_by or record.error)])
        if method == "tokenring, hybrid":
            gains.append(of_record(found[cluster, n, "tokenring"], "forward_ms_median").over(time))
    low, high = (derived(lambda *values, f=f: f(values), *gains) for f in (min, max))
    rivals = [
        of_record(found[c, n, "double_ring"], "forward_ms_median").over(
            of_record(found[c, n, "tokenring, hybrid"], "forward_ms_median")
        )
        for c in NODE_CLUSTERS
        for n in NODE_GPUS
    ]
    better = sum(rival.known > 1.01 for rival in rivals)
    least, most = (derived(lambda *values, f=f: f(values), *rivals) for f in (min, max))
    columns = [Column("cluster"), Column("GPUs"), Column("method"), Column("forward", "ms", ".4g")]
    columns += [Column("times as fast as ring", "", ".2f"), Column("bound by")]
    verdict = "holds" if low.known > 1 else "holds in part" if high.known > 1 else "does not hold"
    return Section(
        "Case study III: TokenRing across nodes",
        [
            text(
                "The paper proposes TokenRing inside nodes and Ring between them, and has no times of it. Simulated,"
                " forward, causal, zigzag, 128k tokens, 8 GPUs to a node: TokenRing among all GPUs, the hybrid, Ring,"
                " and Double Ring, which splits its ring the same way but moves KV in both."
            ),
            Table("tokenring-nodes", "Hybrid and plain TokenRing on several nodes", columns, lines),
            text(
                f"The hybrid is {{low:.2f}} to {{high:.2f}} times as fast as TokenRing among all GPUs: that several"
                f" nodes need it {verdict}. It is {{least:.2f}} to {{most:.2f}} times as fast as Double Ring, and more"
                f" than 1% faster in {{better:.0f}} of {{all:.0f}} points.",
                low=low,
                high=high,
                least=least,
                most=most,
                better=derived(lambda *_: better, *rivals),
                all=derived(lambda *_: len(rivals), *rivals),
            ),
        ],
    )


def _on_nodes(cluster: str, gpus: int, method: str) -> Point:
    name, _, hybrid = method.partition(", ")
    options = {"nodes": gpus // 8} if hybrid else {}
    return point(method=name, gpus=gpus, cluster=cluster, seqlen="128k", phase="forward", layout="zigzag", **options)
