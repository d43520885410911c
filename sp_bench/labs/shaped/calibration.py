"""Calibrate shaped hosts: fit a cluster file's figures to timed exchanges. They hold at other link rates too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from sp_bench.calibrating.cluster_file import rounded, scaled_device
from sp_bench.calibrating.setting import Setting
from sp_bench.labs.shaped.description import Hosts
from sp_bench.labs.shaped.hosts import make
from sp_bench.labs.shaped.samples import FULL, QUICK, SPREAD_BLOCKS, Exchanges, middle
from sp_bench.machine import cores_here
from sp_bench.measure.pool import RankPool

UNSHAPED_BYTES_PER_S = 1e11
"""A link rate above what any machine's cores can carry."""
SLOWER = 4
"""The links are measured at their rate, and at their rate divided by this."""

NORMAL_90 = 1.645
"""The number of standard deviations from the mean that hold 90% of normal numbers."""
MediansS = Mapping[tuple[float, float], float]
"""Median seconds of the slowest rank, by (a rank's share of its link's rate in bytes/s, bytes of a message, or of its
part after the burst)."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The time of a message: latency_s + bytes after the burst / (payload_share * the rate of its link)."""

    latency_s: float
    payload_share: float
    off: float
    """The largest relative error of this fit at a measured median."""


def calibrated(config: Mapping[str, Any], hosts: Hosts, setting: Setting, ranks: int, *, quick: bool) -> dict[str, Any]:
    """The content of the cluster file for `ranks` ranks on these hosts, from `config`, that for loopback."""
    return with_hosts(config, hosts, _measure(hosts, setting, ranks, quick=quick))


def _measure(described: Hosts, setting: Setting, ranks: int, *, quick: bool) -> dict[float, list[Exchanges]]:
    """Each rank's timed exchanges, by the rate of the links in bytes/s."""
    by_rate, pace = {}, QUICK if quick else FULL
    host_of = [rank // described.ranks_per_host for rank in range(ranks)]
    for rate in link_rates(described):
        print(f"links of {rate:g} bytes/s between hosts of {described.ranks_per_host}", flush=True)
        hosts = described.replace(link_bytes_per_s=rate, hosts_per_leaf=None, uplink_bytes_per_s=None)
        with RankPool(ranks, hosts=make(hosts, host_of)) as pool:
            job = "sp_bench.labs.shaped.exchanges:measure_exchanges"
            pause_s = hosts.burst_bytes / rate  # until an idle link has regained its burst
            limited = rate != UNSHAPED_BYTES_PER_S
            by_rate[rate] = pool.run(job, setting, pace, hosts.ranks_per_host, pause_s, limited)
    return by_rate


def link_rates(hosts: Hosts) -> tuple[float, float, float]:
    """The link rates at which to measure, in bytes/s."""
    return hosts.link_bytes_per_s, hosts.link_bytes_per_s / SLOWER, UNSHAPED_BYTES_PER_S


def fit(medians_s: MediansS, payload_share: float | None = None) -> Messages:
    """Fit the payload share, unless it is given, by least squares, and the latency to the rest."""
    (rate, size), seconds = np.array([*medians_s]).T, np.array([*medians_s.values()])
    ideal_s = size / rate
    slope = 1 / payload_share if payload_share else max(float(np.polyfit(ideal_s, seconds, 1)[0]), 1.0)
    latency_s = max(float(np.median(seconds - slope * ideal_s)), 0.0)
    off = np.abs((latency_s + slope * ideal_s) / seconds - 1).max()
    return Messages(latency_s=latency_s, payload_share=1 / slope, off=float(off))


class Figures(NamedTuple):
    """Some figures of a cluster file's hosts, and their sources, by key."""

    values: dict[str, float]
    sources: dict[str, str]


def with_hosts(
    config: Mapping[str, Any], hosts: Hosts, exchanges: Mapping[float, Sequence[Exchanges]]
) -> dict[str, Any]:
    """The content of a cluster file for hosts, from `config`, that for the same ranks on loopback.

    `exchanges` has each rank's timed exchanges, by the rate of the links in bytes/s.
    """
    at, unshaped = exchanges[hosts.link_bytes_per_s], exchanges[UNSHAPED_BYTES_PER_S]
    shaped = {rate: ranks for rate, ranks in exchanges.items() if rate != UNSHAPED_BYTES_PER_S}
    idle = fit(_later_s(shaped, hosts, "idle_s"))
    beside = fit(_later_s(shaped, hosts, "beside_s"), idle.payload_share)
    all_cores_per_s = min(cores_here(), len(at)) * np.array(at[0].alone_blocks_per_s)
    crowding = float(np.median(all_cores_per_s / _together(at, "crowded_blocks_per_s")))
    all_figures = (
        _of_links(shaped, idle, beside),
        Figures(
            {"flow_bytes_per_s": _most_bytes_per_s(_medians_s({1.0: unshaped}, hosts, "beside_s"))},
            {"hosts.flow_bytes_per_s": "the rate over unlimited links: what the cores carry beside blocks"},
        ),
        _of_crowds(shaped, beside.latency_s - idle.latency_s, crowding),
        _of_cores(shaped, hosts),
        _of_queues(shaped),
        _of_all_to_alls(shaped, hosts.replace(payload_share=idle.payload_share)),
    )
    kept = {key: value for key, value in config.items() if key not in ("gpus_per_node", "intra", "device", "sources")}
    sources = {key: value for key, value in config["sources"].items() if key != "transfer_slowdown"}
    crowded = (
        f"; then divided by {crowding:.3f}, the factor by which a block takes longer than its share of the cores "
        f"explains when {len(at)} ranks compute at once"
    )
    for figure in ("rates", "matmul_tflops", "elementwise_bytes_per_s, layer_launch_s"):
        sources[figure] += crowded
    values = {key: rounded(value) for figures in all_figures for key, value in figures.values.items()}
    return {
        **kept,
        "lab": hosts.lab,
        "hosts": structs.asdict(hosts.replace(**values)),
        "intra": config["intra"],
        "device": {
            **scaled_device(config["device"], 1 / crowding),
            "transfer_slowdown": 0.0,  # apart from the core time that transfers take
        },
        "sources": {**sources, **{key: source for figures in all_figures for key, source in figures.sources.items()}},
    }


def _of_links(shaped: Mapping[float, Sequence[Exchanges]], idle: Messages, beside: Messages) -> Figures:
    """The payload share and the latency of messages."""
    ranks = next(iter(shaped.values()))
    sizes = ", ".join(map(str, ranks[0].beside_s))
    source = (
        f"{len(ranks)} ranks, each to the next host at once, {sizes} bytes over idle links of "
        f"{' and '.join(f'{rate:g}' for rate in shaped)} bytes/s: medians of the slowest rank, fitted within "
        f"{idle.off:.0%}, and within {beside.off:.0%} while all ranks compute blocks"
    )
    values = {"payload_share": idle.payload_share, "latency_s": idle.latency_s}
    return Figures(values, {"hosts.payload_share, hosts.latency_s": source})


def _of_crowds(shaped: Mapping[float, Sequence[Exchanges]], longer_s: float, crowding: float) -> Figures:
    """The figures for more ranks than cores.

    While all ranks compute, messages take `longer_s` more, and blocks `crowding` times the work that they take alone.
    """
    at = next(iter(shaped.values()))
    more = len(at) / cores_here() - 1  # ranks on a core beyond its first
    keys = ("crowd_latency_s", "turn_s")
    if more <= 0:
        none = "none: each rank had its own core"
        return Figures(dict.fromkeys(keys, 0.0), {f"hosts.{key}": none for key in keys})
    spreads = [spread for ranks in shaped.values() for rank in ranks for spread in rank.beside_spread]
    row_s = SPREAD_BLOCKS * crowding / float(np.median(at[0].alone_blocks_per_s))
    turn_s = float(np.median(spreads)) * row_s if spreads else 0.0
    sources = {
        "hosts.crowd_latency_s": f"the added latency while all ranks compute blocks, {longer_s:.2g} s, divided by the "
        f"{more:g} ranks on a core beyond its first",
        "hosts.turn_s": f"the spread of the time of {SPREAD_BLOCKS} such blocks in a row beside these messages: "
        f"median of {len(spreads)} variances over the mean time's square, times their core time of {row_s:.2g} s",
    }
    return Figures({"crowd_latency_s": max(longer_s, 0.0) / more, "turn_s": turn_s}, sources)


def _of_cores(shaped: Mapping[float, Sequence[Exchanges]], hosts: Hosts) -> Figures:
    """The core time that messages take."""
    at = shaped[hosts.link_bytes_per_s]
    short, long = min(at[0].beside_blocks_per_s), max(at[0].beside_blocks_per_s)
    message_core_s = _message_core_s({size: _taken(at, hosts, size) for size in (short, long)})
    taken = [_taken(ranks, hosts, long) for ranks in shaped.values()]
    by_byte = [(rate, max(cores - message_core_s * rate / long, 0.0)) for rate, cores in taken]
    link_cores, byte_core_s = cores_of_links(by_byte)
    sources = {
        "hosts.byte_core_s, hosts.link_cores": "the cores that blocks on all ranks lose while all pass KV on over "
        f"these links: {' and '.join(f'{cores:.3f} for a link with {rate:.3g} bytes/s' for rate, cores in taken)}"
        + (", too few where cores were idle" if len(at) < cores_here() else ""),
        "hosts.message_core_s": f"the additional core time of a byte in messages of {short} bytes, compared with those "
        f"of {long}, which the other figures are from",
    }
    values = {"byte_core_s": byte_core_s, "link_cores": link_cores, "message_core_s": message_core_s}
    return Figures(values, sources)


def _of_queues(shaped: Mapping[float, Sequence[Exchanges]]) -> Figures:
    """The figure for uneven sharing of links by messages."""
    firsts = [first for ranks in shaped.values() for rank in ranks for first in rank.first_of_two]
    if not firsts:
        return Figures({}, {"hosts.ahead_bytes": "not measured: it needs three hosts"})
    size = middle(next(iter(shaped.values()))[0].beside_s)
    source = (
        f"how unevenly two concurrent messages of {size} bytes, to the next host and the one after it, shared these "
        f"links beside blocks: by the first arrival in {len(firsts)} pairs"
    )
    return Figures({"ahead_bytes": ahead_bytes(firsts, size)}, {"hosts.ahead_bytes": source})


def _of_all_to_alls(shaped: Mapping[float, Sequence[Exchanges]], hosts: Hosts) -> Figures:
    """The rate of the library's all-to-alls."""
    ranks = next(iter(shaped.values()))
    if not ranks[0].all_to_all_s:
        return Figures({}, {"hosts.all_to_all_share": "not measured: it needs two hosts"})
    others = len(ranks) / hosts.ranks_per_host - 1
    shares = [
        others * size / (hosts.payload_share * rate) / seconds
        for (rate, size), seconds in _medians_s(shaped, hosts, "all_to_all_s").items()
    ]
    source = (
        f"all-to-alls of {min(ranks[0].all_to_all_s)} bytes for each rank, two at a time, several in a row: the rate "
        "of messages over theirs, " + " and ".join(f"{1 / share:.2f}" for share in shares)
    )
    return Figures({"all_to_all_share": min(float(np.mean(shares)), 1.0)}, {"hosts.all_to_all_share": source})


def cores_of_links(taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(cores at any rate, core seconds per byte) of a link, fitted to the (bytes/s, cores taken) of two or more links.

    Neither is below 0, and the fit is exact for the fastest link. For equal rates all is per byte.
    """
    (low_bytes_per_s, low), *_, (bytes_per_s, cores) = sorted(taken)
    byte_core_s = cores / bytes_per_s
    if bytes_per_s > low_bytes_per_s:
        byte_core_s = min(max((cores - low) / (bytes_per_s - low_bytes_per_s), 0.0), byte_core_s)
    return max(cores - byte_core_s * bytes_per_s, 0.0), byte_core_s


def ahead_bytes(first_of_two: Sequence[float], size: int) -> float:
    """The bytes of messages times the standard deviation of the logarithm of their shares of a link.

    `first_of_two` has, for pairs of messages of that size on one link, the arrival of the first over the arrival of
    both, x. The first then had 1 / (2 x) of the link. The logarithm of the ratio of two such shares deviates sqrt(2)
    times as much. The 90th percentile counts: steps wait for the slower message, and a few pairs are disturbed.
    """
    share = 1 / (2 * np.clip(first_of_two, 0.51, 1.0))
    return size * float(np.percentile(np.log(share / (1 - share)), 90)) / NORMAL_90 / math.sqrt(2)


def _taken(ranks: Sequence[Exchanges], hosts: Hosts, size: int) -> tuple[float, float]:
    """(bytes/s that a link carried each way beside blocks, cores that blocks lost), for messages of that size."""
    links = len(ranks) / hosts.ranks_per_host
    bytes_per_s = hosts.ranks_per_host * float(np.median([rank.rounds_bytes_per_s[size] for rank in ranks]))
    beside_per_s = np.sum([rank.beside_blocks_per_s[size] for rank in ranks], axis=0)
    kept = float(np.median(beside_per_s / _together(ranks, "crowded_blocks_per_s")))
    return bytes_per_s, min(cores_here(), len(ranks)) * max(1 - kept, 0.0) / links


def _message_core_s(taken: Mapping[int, tuple[float, float]]) -> float:
    """Core seconds of each message, from the (bytes/s, cores taken) of short and of long messages over one link.

    It is at least 0, and at most the whole core time of a long message.
    """
    short, long = min(taken), max(taken)
    byte_core_s = {size: cores / bytes_per_s for size, (bytes_per_s, cores) in taken.items()}
    if short == long or byte_core_s[short] <= byte_core_s[long]:
        return 0.0
    more = (byte_core_s[short] - byte_core_s[long]) / (1 / short - 1 / long)
    return min(more, byte_core_s[long] * long)


def _medians_s(exchanges: Mapping[float, Sequence[Exchanges]], hosts: Hosts, name: str) -> MediansS:
    return {
        (rate / hosts.ranks_per_host, size): float(np.median(np.max([getattr(rank, name)[size] for rank in ranks], 0)))
        for rate, ranks in exchanges.items()
        for size in getattr(ranks[0], name)
    }


def _later_s(exchanges: Mapping[float, Sequence[Exchanges]], hosts: Hosts, name: str) -> MediansS:
    """Medians by the bytes of messages after the burst of an idle link."""
    return {
        (rate, size - hosts.at_once_bytes(size, hosts.ranks_per_host)): seconds
        for (rate, size), seconds in _medians_s(exchanges, hosts, name).items()
    }


def _most_bytes_per_s(medians_s: MediansS) -> float:
    """The rate of the part of a long message that a short one lacks; of all of it if the short one took as long."""
    (_, short), (_, long) = min(medians_s), max(medians_s)
    short_s, long_s = medians_s[min(medians_s)], medians_s[max(medians_s)]
    return (long - short) / (long_s - short_s) if long_s > short_s else long / long_s


def _together(ranks: Sequence[Exchanges], name: str) -> np.ndarray:
    """The rate of all ranks together, by repetition."""
    return np.sum([getattr(rank, name) for rank in ranks], axis=0)
