"""NCCL's communicators, as read from the log that NCCL_DEBUG=INFO writes. Lines are as in NCCL 2.18 to 2.30."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sp_bench.diagnosing.findings import Finding, finding
from sp_bench.lower import ORDERED_FROM

_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_CHANNELS = re.compile(
    r"(\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels, (?:\d+ nvls tree channels, )?"
    r"(\d+) p2p channels, (\d+) p2p channels per peer"
)
_ROUTE = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")
_NETWORK = re.compile(r"Using network (.+?)\s*$", re.MULTILINE)
FAST_INSIDE = ("P2P",)
"""Transports by which GPUs of one host reach each other directly."""


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """One rank's log."""

    version: tuple[int, ...] = ()
    network: str = ""
    """The network plugin: IB, Socket, ..."""
    channels: tuple[tuple[int, int, int, int], ...] = ()
    """(collective, NVLS, p2p, p2p per peer) channels of each communicator."""
    routes: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    """Channels by (from, to, transport such as P2P/CUMEM, SHM/direct/direct, NET/IB/0/GDRDMA)."""


def read_log(text: str) -> NcclLog:
    """Read one rank's log."""
    version, network = _VERSION.search(text), _NETWORK.search(text)
    channels = tuple(tuple(map(int, match)) for match in _CHANNELS.findall(text))
    routes = Counter((int(a), int(b), how) for a, b, how in _ROUTE.findall(text))
    return NcclLog(
        version=tuple(map(int, version[1].split("."))) if version else (),
        network=network[1] if network else "",
        channels=channels,  # pyright: ignore[reportArgumentType]
        routes=routes,
    )


def judge_nccl(logs: Sequence[NcclLog], hosts: Sequence[str]) -> list[Finding]:
    """Findings on what NCCL chose. `hosts` has the host of each rank."""
    if not any(log.channels for log in logs):
        return []
    versions = sorted({log.version for log in logs if log.version})
    shown = ", ".join(".".join(map(str, version)) for version in versions) or "unknown"
    old = bool(versions) and versions[0] < ORDERED_FROM
    findings = [
        finding("NCCL", "version", shown, "fail" if len(versions) > 1 else "warn" if old else "ok",
                "the same NCCL on all hosts" if len(versions) > 1 else
                "NCCL 2.26 or later, which keeps several communicators in launch order; torch 2.8 brings one"),
        finding("NCCL", "network", next((log.network for log in logs if log.network), "none")),
    ]  # fmt: skip
    several = len(set(hosts)) > 1
    if several and any(log.network == "Socket" for log in logs):
        fix = (
            "load the network's plugin (IB, or libnccl-net.so of your provider), and unset NCCL_IB_DISABLE and NCCL_NET"
        )
        findings.append(finding("NCCL", "between hosts", "TCP sockets, not RDMA", "warn", fix))
    coll, nvls, p2p, per_peer = (min(x) for x in zip(*(c for log in logs for c in log.channels), strict=True))
    findings.append(
        finding("NCCL", "channels", f"{coll} collective, {nvls} NVLS, {p2p} p2p, {per_peer} p2p to each peer",
                "warn" if several and per_peer < 16 else "ok",
                "nccl={NCHANNELS_PER_NET_PEER: 16}: the channels to NICs limit those between GPUs of a host as well")
    )  # fmt: skip
    routes: Counter[tuple[int, int, str]] = sum((log.routes for log in logs), Counter())
    inside = _by_transport(routes, hosts, same=True)
    across = _by_transport(routes, hosts, same=False)
    if inside:
        slow = [how for how in inside if not how.startswith(FAST_INSIDE)]
        fix = "check nvidia-smi topo -m, ACS and IOMMU settings, NCCL_P2P_* and NCCL_SHM_*, and that ranks see all GPUs"
        findings.append(finding("NCCL", "inside hosts", _listed(inside), "warn" if slow else "ok", fix))
    if across:
        slow = [how for how in across if "/IB" in how and "GDRDMA" not in how]
        fix = "load nvidia-peermem, or use a driver and kernel with DMA-BUF, so that NICs read the GPUs' memory"
        findings.append(finding("NCCL", "across hosts", _listed(across), "warn" if slow else "ok", fix))
    return findings


def _by_transport(routes: Counter[tuple[int, int, str]], hosts: Sequence[str], *, same: bool) -> Counter[str]:
    """Channels by transport, of routes inside hosts or across them."""
    channels: Counter[str] = Counter()
    for (a, b, how), number in routes.items():
        if max(a, b) < len(hosts) and (hosts[a] == hosts[b]) == same:
            channels[re.sub(r"/\d+", "", how)] += number
    return channels


def _listed(by_transport: Counter[str]) -> str:
    return ", ".join(f"{how} ({number} channels)" for how, number in sorted(by_transport.items()))
