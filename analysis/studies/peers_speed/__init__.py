"""Public implementations beside ours, in turn. Needs `pip install "sp-bench[peers]"` and, for shaped links, root."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from sp_bench.analysis.measured import interval, other_over_one, ratio
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.verdict import FASTER, Ratio
from sp_bench.records import Record

RANKS, ITERATIONS = 4, 9
COMMON = (
    f"gpus={RANKS}", "seqlen=4k", "heads=8", "head_dim=64", f"iters={ITERATIONS}", "warmup=1", "parts=false",
    "timeout_s=180",
)  # fmt: skip
LINKS = {
    "this machine's loopback": ("cluster=local",),
    "links of 200 Mbit/s": ("cluster=shaped", "cluster.hosts.link_bytes_per_s=25e6"),
}
OURS = {
    "ring": ("method=ring", "method.layout=contiguous"),
    "zigzag": ("method=zigzag",),
    "striped": ("method=striped",),
    # torch gathers all heads at once.
    "all_gather stride 8, zigzag": ("method=all_gather", "method.layout=zigzag", "method.stride=8"),
    # llama3 gathers one KV head at a time.
    "all_gather stride 1": ("method=all_gather", "method.layout=contiguous", "method.stride=1"),
    "ulysses": ("method=ulysses",),
    "usp, zigzag": ("method=usp", "method.ulysses=2", "method.layout=zigzag"),
}


class Peer(NamedTuple):
    """A public implementation, and the method of ours with the same algorithm."""

    ours: str
    impl: str
    algorithm: str


PEERS = (
    Peer("ring", "ring_flash_attn", "ring"),
    Peer("zigzag", "ring_flash_attn", "zigzag"),
    Peer("zigzag", "torch_context_parallel", "all_to_all"),
    Peer("striped", "ring_flash_attn", "stripe"),
    Peer("all_gather stride 8, zigzag", "torch_context_parallel", "all_gather"),
    Peer("all_gather stride 1", "ring_flash_attn", "llama3"),
    Peer("ulysses", "yunchang", "ulysses"),
    Peer("ulysses", "deepspeed_ulysses", "ulysses"),
    Peer("usp, zigzag", "yunchang", "zigzag"),
)


def rows(runs: Runs, dtype: str, links: str) -> list[dict[str, str]]:
    """A row for each peer; all peers and ours are measured in turn."""
    common = (*COMMON, *LINKS[links], f"dtype={dtype}")
    points = [(*common, *ours) for ours in OURS.values()]
    points += [(*common, "method=peer", f"impl={p.impl}", f"method.algorithm={p.algorithm}") for p in PEERS]
    records = runs.ask(points)
    ours = dict(zip(OURS, records, strict=False))
    theirs = zip(PEERS, records[len(OURS) :], strict=True)
    return [_row(ours[peer.ours], record, peer, runs) for peer, record in theirs]


def _row(ours: Record, peer: Record, names: Peer, runs: Runs) -> dict[str, str]:
    row = {"ours": names.ours, "peer": f"{names.impl} {names.algorithm}"}
    row |= {"ours, ms [95%]": _outcome(ours), "peer, ms [95%]": _outcome(peer)}
    for phase in ("step", "forward", "backward"):
        apart = other_over_one(ours, peer, runs.folder, phase)
        row[f"{phase}, peer over ours [95%]"] = _written(apart) if apart else "-"
    row["sent, ours and peer"] = f"{_megabytes(ours)}, {_megabytes(peer)}"
    return row | {"errors, ours": _errors(ours), "errors, peer": _errors(peer)}


def _written(found: Ratio) -> str:
    """The ratio with its interval, in bold where ours is slower with certainty."""
    text = ratio(found, digits=2)
    return f"**{text}**" if found.verdict(same=0) == FASTER else text


def _outcome(record: Record) -> str:
    if record.status != "ok":
        return record.status if record.status == "incorrect" else f"{record.status}: {record.error}"
    return interval(record)


def _megabytes(record: Record) -> str:
    return "-" if record.comm_bytes_per_gpu is None else f"{record.comm_bytes_per_gpu / 1e6:.1f} MB"


def _errors(record: Record) -> str:
    errors = [record.err_out, record.err_dq, record.err_dk, record.err_dv]
    return ", ".join(f"{error:.0e}" for error in errors if error is not None) or "-"


float32, bfloat16 = (partial(rows, dtype=dtype, links="this machine's loopback") for dtype in ("float32", "bfloat16"))
shaped = partial(rows, dtype="bfloat16", links="links of 200 Mbit/s")
