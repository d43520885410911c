"""Machines that aren't here: what nvidia-smi and NCCL print on them, in their formats, and the facts of their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sp_bench.diagnosing.nvidia_smi import FIELDS
from sp_bench.diagnosing.seen import HostFacts, RankFacts

H100 = {
    "name": "NVIDIA H100 80GB HBM3", "driver_version": "570.86.15", "memory.total": "81559", "memory.used": "4",
    "clocks.sm": "1980", "clocks.max.sm": "1980", "clocks.applications.graphics": "1980", "power.draw": "412.55",
    "power.limit": "700.00", "power.default_limit": "700.00", "temperature.gpu": "51", "compute_mode": "Default",
    "mig.mode.current": "Disabled", "ecc.errors.uncorrected.volatile.total": "0", "pcie.link.gen.current": "5",
    "pcie.link.gen.max": "5", "pcie.link.width.current": "16", "pcie.link.width.max": "16",
    "reasons": "0x0000000000000000",
}  # fmt: skip
"""The fields of a sound H100."""
NO_DEVICE = "device=cuda: torch finds no GPU on this host; device=cpu would work"


def gpus(count: int, **changes: str) -> list[dict[str, str]]:
    """So many H100s, of which the last has other values; a dot in a field's name is written as two underscores."""
    found = [{"index": str(i), **H100} for i in range(count)]
    found[-1] |= {name.replace("__", "."): value for name, value in changes.items()}
    return found


def csv(state: list[dict[str, str]]) -> str:
    """As nvidia-smi --format=csv,noheader,nounits prints it."""
    return "".join(", ".join(gpu[name] for name in (*FIELDS, "reasons")) + "\n" for gpu in state)


def fake_nvidia_smi(folder: Path, state: list[dict[str, str]], *, driver: int = 570) -> Path:
    """An nvidia-smi in a folder for PATH, of a driver that knows the reasons of clocks by the name of its time."""
    reasons = "clocks_event_reasons" if driver >= 535 else "clocks_throttle_reasons"
    (folder / "state.csv").write_text(csv(state))
    script = folder / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in *{reasons}.active*) cat {folder}/state.csv;;\n'
        '*) echo "Field is not a valid field to query." ; exit 2;; esac\n'
    )
    script.chmod(0o755)
    return folder


def nccl_log(
    rank: int, n: int, *, inside: str = "P2P/CUMEM", across: str = "NET/IB/0/GDRDMA", per_peer: int = 32,
    network: str = "IB", version: str = "2.27.3", node: int = 8,
) -> str:  # fmt: skip
    """The log of a rank with NCCL_DEBUG=INFO when it makes a communicator of n, with `node` ranks to a host."""
    peer = (rank + 1) % n
    how = inside if peer // node == rank // node else across
    said = [
        f"NCCL version {version}+cuda12.9",
        f"Using network {network}",
        f"{n} coll channels, {n} collnet channels, 16 nvls channels, 32 p2p channels, {per_peer} p2p channels per peer",
        *(f"Channel {c:02d}/0 : {rank}[{rank % node}] -> {peer}[{peer % node}] via {how}" for c in range(4)),
        f"ncclCommInitRankConfig comm 0x55a70789aa60 rank {rank} nranks {n} cudaDev {rank % node} - Init COMPLETE",
    ]
    return "".join(
        f"node{rank // node}:{1800 + rank}:{1900 + rank} [{rank % node}] NCCL INFO {line}\n" for line in said
    )


def rank_of(rank: int, *, node: int = 8, environment: Mapping[str, str] | None = None, **changes: Any) -> RankFacts:
    """A rank with a GPU, on hosts of `node`."""
    facts: dict[str, Any] = {
        "rank": rank, "host": f"node{rank // node}", "cores": 12, "gpus": node,
        "device": {"device": "NVIDIA H100 80GB HBM3", "cuda": "12.9", "nccl": "2.27.3"},
        "environment": environment or {},
    }  # fmt: skip
    return RankFacts(**facts | changes)


def host_of(name: str = "node0", **changes: Any) -> HostFacts:
    """A sound host of 8 GPUs."""
    facts: dict[str, Any] = {
        "host": name, "cpu": "Xeon", "cores": 96, "load": 1.0, "governor": "performance", "memory_bytes": 2**41,
        "free_bytes": 2**40, "shm_bytes": 2**36, "locked_bytes": None, "open_files": 2**20, "ports": (),
        "gpus": tuple(gpus(8)),
    }  # fmt: skip
    return HostFacts(**facts | changes)
