"""Public implementations beside ours: `python -m benchmarks.peers` writes docs/results/peers_speed.md.

Each pair runs the same algorithm on the same tokens, shapes and dtype, over the same links and, on a CPU, with the same
block kernel. All points of a table are timed in one set of processes, with their iterations in turn, in a new order
each time. Ratios are of medians, with a bootstrap interval that resamples the iterations of a turn together. A peer
that fails the correctness gate against fp64 is not timed; its row has its errors. Needs `pip install "sp-bench[peers]"`
and, for shaped links, root.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.reports import RESULTS, about, interval, ratio, records_folder, run
from sp_bench.analysis.frames import iterations, samples
from sp_bench.analysis.pairs import in_turn
from sp_bench.analysis.verdict import FASTER, Ratio, of_medians
from sp_bench.machine import cores_here
from sp_bench.markdown import of_rows
from sp_bench.records import Record

REPORT = RESULTS / "peers_speed.md"
RANKS, ITERATIONS = 4, 9
COMMON = (
    f"gpus={RANKS}", "seqlen=4k", "heads=8", "head_dim=64", f"iters={ITERATIONS}", "warmup=1", "parts=false",
    "logger=none", "timeout_s=180",
)  # fmt: skip
LINKS = {
    "this machine's loopback": ("cluster=local",),
    "links of 200 Mbit/s": ("cluster=shaped", "cluster.hosts.link_bytes_per_s=25e6"),
}
TABLES = (
    ("float32", "this machine's loopback"),
    ("bfloat16", "this machine's loopback"),
    ("bfloat16", "links of 200 Mbit/s"),
)
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


def rows(dtype: str, links: tuple[str, ...], folder: Path) -> list[dict[str, str]]:
    """A row for each peer; all peers and ours are measured in turn."""
    points = [[*COMMON, *links, f"dtype={dtype}", *ours] for ours in OURS.values()]
    points += [
        [*COMMON, *links, f"dtype={dtype}", "method=peer", f"impl={p.impl}", f"method.algorithm={p.algorithm}"]
        for p in PEERS
    ]
    records = run(points, folder)
    ours = dict(zip(OURS, records, strict=False))
    theirs = zip(PEERS, records[len(OURS) :], strict=True)
    return [_row(ours[peer.ours], record, peer, folder) for peer, record in theirs]


def _row(ours: Record, peer: Record, names: Peer, folder: Path) -> dict[str, str]:
    found = {"ours": names.ours, "peer": f"{names.impl} {names.algorithm}"}
    found |= {"ours, ms [95%]": _outcome(ours), "peer, ms [95%]": _outcome(peer)}
    both = [iterations(samples(record, folder / f"{record.run_id}.json")) for record in (ours, peer)]
    for phase in ("step", "forward", "backward"):
        name = f"{phase}, peer over ours [95%]"
        if any(frame.empty for frame in both):
            found[name] = "-"
        else:
            found[name] = _written(of_medians(*(x[phase].to_numpy() for x in both), in_turn=in_turn(ours, peer)))
    found["sent, ours and peer"] = f"{_megabytes(ours)}, {_megabytes(peer)}"
    return found | {"errors, ours": _errors(ours), "errors, peer": _errors(peer)}


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


def main() -> None:
    folder = records_folder(__doc__, "peers")
    parts = []
    for dtype, links in TABLES:
        parts.append(f"## {dtype} over {links}\n\n{of_rows(rows(dtype, LINKS[links], folder))}")
        print(parts[-1], flush=True)
    text = f"""# Peers and ours

Made by `python -m benchmarks.peers` on {cores_here()} cores: {RANKS} ranks, 4k tokens, 8 heads of 64, causal. Errors
are relative L2 against fp64: out, dq, dk, dv. docs/how-to/peers.md says what each peer is and what is wrong with it.

{about(__doc__)}

"""
    REPORT.write_text(text + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
