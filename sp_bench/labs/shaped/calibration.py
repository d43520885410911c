"""Calibrate shaped hosts: from exchanges between them to a cluster file's figures, which hold at other rates too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from sp_bench.calibrating.cluster_file import rounded, scaled
from sp_bench.calibrating.setting import Setting
from sp_bench.labs.shaped.description import Hosts
from sp_bench.labs.shaped.hosts import make
from sp_bench.labs.shaped.samples import FULL, QUICK, SPREAD_BLOCKS, Exchanges, middle
from sp_bench.machine import cores_here
from sp_bench.measure.pool import RankPool

UNSHAPED_BYTES_PER_S = 1e11
"""More than any machine's cores can carry."""
SLOWER = 4
"""The links are measured at their rate and at this fraction of it."""

NORMAL_90 = 1.645
"""Standard deviations from the mean that nine of ten normal numbers keep within."""
MediansS = Mapping[tuple[float, float], float]
"""Seconds of the slowest rank, by what of its link's rate each rank had, bytes/s, and the bytes of the message, or of
what of it doesn't go at once."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What a message takes: latency_s + what doesn't go at once / (payload_share * the rate of its link)."""

    latency_s: float
    payload_share: float
    off: float
    """The largest relative difference to a median that this was fitted to."""


def calibrated(config: Mapping[str, Any], hosts: Hosts, setting: Setting, ranks: int, *, quick: bool) -> dict[str, Any]:
    """The cluster file for so many ranks on these hosts, from `config`, the one for the same ranks on loopback."""
    return with_hosts(config, hosts, _measure(hosts, setting, ranks, quick=quick))


def _measure(described: Hosts, setting: Setting, ranks: int, *, quick: bool) -> dict[float, list[Exchanges]]:
    """What each rank saw of the others on their hosts, by the rate of the links."""
    found, pace = {}, QUICK if quick else FULL
    host_of = [rank // described.ranks_per_host for rank in range(ranks)]
    for rate in link_rates(described):
        print(f"links of {rate:g} bytes/s between hosts of {described.ranks_per_host}", flush=True)
        hosts = described.replace(link_bytes_per_s=rate, hosts_per_leaf=None, uplink_bytes_per_s=None)
        with RankPool(ranks, hosts=make(hosts, host_of)) as pool:
            job = "sp_bench.labs.shaped.exchanges:measure_exchanges"
            pause_s = hosts.burst_bytes / rate  # until a link has saved all that it lets through at once
            limited = rate != UNSHAPED_BYTES_PER_S
            found[rate] = pool.run(job, setting, pace, hosts.ranks_per_host, pause_s, limited)
    return found


def link_rates(hosts: Hosts) -> tuple[float, float, float]:
    """The rates of links to measure at, bytes/s."""
    return hosts.link_bytes_per_s, hosts.link_bytes_per_s / SLOWER, UNSHAPED_BYTES_PER_S


def fit(medians_s: MediansS, payload_share: float | None = None) -> Messages:
    """The share by least squares, which long messages decide, if it isn't given; the latency by what is left."""
    (rate, size), seconds = np.array([*medians_s]).T, np.array([*medians_s.values()])
    ideal_s = size / rate
    slope = 1 / payload_share if payload_share else max(float(np.polyfit(ideal_s, seconds, 1)[0]), 1.0)
    latency_s = max(float(np.median(seconds - slope * ideal_s)), 0.0)
    off = np.abs((latency_s + slope * ideal_s) / seconds - 1).max()
    return Messages(latency_s=latency_s, payload_share=1 / slope, off=float(off))


class Figures(NamedTuple):
    """Some keys of a cluster file's hosts, and where they come from."""

    values: dict[str, float]
    sources: dict[str, str]


def with_hosts(
    config: Mapping[str, Any], hosts: Hosts, exchanges: Mapping[float, Sequence[Exchanges]]
) -> dict[str, Any]:
    """A cluster file for hosts, from the one for the same ranks on loopback.

    `exchanges` is what each rank saw, by the rate of the links.
    """
    at, unshaped = exchanges[hosts.link_bytes_per_s], exchanges[UNSHAPED_BYTES_PER_S]
    shaped = {rate: ranks for rate, ranks in exchanges.items() if rate != UNSHAPED_BYTES_PER_S}
    idle = fit(_later_s(shaped, hosts, "idle_s"))
    beside = fit(_later_s(shaped, hosts, "beside_s"), idle.payload_share)
    all_cores_per_s = min(cores_here(), len(at)) * np.array(at[0].alone_blocks_per_s)
    crowding = float(np.median(all_cores_per_s / _together(at, "crowded_blocks_per_s")))
    found = (
        _of_links(shaped, idle, beside),
        Figures(
            {"flow_bytes_per_s": _most_bytes_per_s(_medians_s({1.0: unshaped}, hosts, "beside_s"))},
            {"hosts.flow_bytes_per_s": "that between links which limit nothing: what the cores carry beside blocks"},
        ),
        _of_crowds(shaped, beside.latency_s - idle.latency_s, crowding),
        _of_cores(shaped, hosts),
        _of_queues(shaped),
    )
    kept = {key: value for key, value in config.items() if key not in ("gpus_per_node", "intra", "device", "sources")}
    sources = {key: value for key, value in config["sources"].items() if key != "transfer_slowdown"}
    sources["rates"] += (
        f"; then all divided by {crowding:.3f}, by which a block takes longer than its share of the cores explains "
        f"where {len(at)} ranks compute at once"
    )
    values = {key: rounded(value) for figures in found for key, value in figures.values.items()}
    return {
        **kept,
        "lab": hosts.lab,
        "hosts": structs.asdict(hosts.replace(**values)),
        "intra": config["intra"],
        "device": {
            **config["device"],
            "rates": {name: scaled(table, 1 / crowding) for name, table in config["device"]["rates"].items()},
            "transfer_slowdown": 0.0,  # but for what they take of the cores
        },
        "sources": {**sources, **{key: source for figures in found for key, source in figures.sources.items()}},
    }


def _of_links(shaped: Mapping[float, Sequence[Exchanges]], idle: Messages, beside: Messages) -> Figures:
    """What messages get of their links, and wait."""
    ranks = next(iter(shaped.values()))
    source = (
        f"{len(ranks)} ranks, each to the next host at once, {_sizes(ranks)} bytes over idle links of "
        f"{' and '.join(f'{rate:g}' for rate in shaped)} bytes/s: medians of the slowest rank, met within "
        f"{idle.off:.0%}, and within {beside.off:.0%} while all ranks compute blocks"
    )
    values = {"payload_share": idle.payload_share, "latency_s": idle.latency_s}
    return Figures(values, {"hosts.payload_share, hosts.latency_s": source})


def _of_crowds(shaped: Mapping[float, Sequence[Exchanges]], longer_s: float, crowding: float) -> Figures:
    """What comes of more ranks than cores.

    Messages take `longer_s` more while all ranks compute, and blocks `crowding` times the work that they are alone.
    """
    at = next(iter(shaped.values()))
    more = len(at) / cores_here() - 1  # to a core, beyond the first
    keys = ("crowd_latency_s", "turn_s")
    if more <= 0:
        none = "none: each rank had a core of its own"
        return Figures(dict.fromkeys(keys, 0.0), {f"hosts.{key}": none for key in keys})
    spreads = [spread for ranks in shaped.values() for rank in ranks for spread in rank.beside_spread]
    row_s = SPREAD_BLOCKS * crowding / float(np.median(at[0].alone_blocks_per_s))
    turn_s = float(np.median(spreads)) * row_s if spreads else 0.0
    sources = {
        "hosts.crowd_latency_s": f"the same while all ranks compute blocks takes {longer_s:.2g} s more: that by the "
        f"{more:g} ranks to a core beyond the first",
        "hosts.turn_s": f"how much the time of {SPREAD_BLOCKS} such blocks in a row spreads beside these messages: "
        f"median of {len(spreads)} variances over the mean time's square, times the {row_s:.2g} s of a core in them",
    }
    return Figures({"crowd_latency_s": max(longer_s, 0.0) / more, "turn_s": turn_s}, sources)


def _of_cores(shaped: Mapping[float, Sequence[Exchanges]], hosts: Hosts) -> Figures:
    """What messages take of the cores."""
    at = shaped[hosts.link_bytes_per_s]
    short, long = min(at[0].beside_blocks_per_s), max(at[0].beside_blocks_per_s)
    message_core_s = _message_core_s({size: _taken(at, hosts, size) for size in (short, long)})
    taken = [_taken(ranks, hosts, long) for ranks in shaped.values()]
    by_byte = [(rate, max(cores - message_core_s * rate / long, 0.0)) for rate, cores in taken]
    link_cores, byte_core_s = cores_of_links(by_byte)
    sources = {
        "hosts.byte_core_s, hosts.link_cores": "what blocks on all ranks lose of the cores while all pass KV on, "
        f"over these links: {' and '.join(f'{cores:.3f} for a link with {rate:.3g} bytes/s' for rate, cores in taken)}"
        + (", too few where cores were idle" if len(at) < cores_here() else ""),
        "hosts.message_core_s": f"how much more of the cores each byte takes so in messages of {short} bytes than in "
        f"those of {long}, which the others are from",
    }
    values = {"byte_core_s": byte_core_s, "link_cores": link_cores, "message_core_s": message_core_s}
    return Figures(values, sources)


def _of_queues(shaped: Mapping[float, Sequence[Exchanges]]) -> Figures:
    """How unevenly messages share links."""
    firsts = [first for ranks in shaped.values() for rank in ranks for first in rank.first_of_two]
    if not firsts:
        return Figures({}, {"hosts.ahead_bytes": "not measured: it takes three hosts"})
    size = middle(next(iter(shaped.values()))[0].beside_s)
    source = (
        f"how unevenly two messages of {size} bytes at once, to the next host and the one after it, shared these links "
        f"beside blocks: by when the first had come of {len(firsts)} pairs"
    )
    return Figures({"ahead_bytes": ahead_bytes(firsts, size)}, {"hosts.ahead_bytes": source})


def cores_of_links(taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(cores whatever the rate, seconds of a core for each byte) of a link, from (bytes/s, cores taken) of two or more.

    Neither is below 0, and the fastest link is met. Of equal rates, all is by byte.
    """
    (low_bytes_per_s, low), *_, (bytes_per_s, cores) = sorted(taken)
    byte_core_s = cores / bytes_per_s
    if bytes_per_s > low_bytes_per_s:
        byte_core_s = min(max((cores - low) / (bytes_per_s - low_bytes_per_s), 0.0), byte_core_s)
    return max(cores - byte_core_s * bytes_per_s, 0.0), byte_core_s


def ahead_bytes(first_of_two: Sequence[float], size: int) -> float:
    """The bytes of messages times the standard deviation of the logarithm of the shares that they get of a link.

    From pairs of messages of that size that shared one: when the first had come, over when both had. It then had
    1 / (2 x that) of the link, and of two such numbers' ratio the logarithm deviates sqrt(2) times as much. By what
    nine of ten pairs keep within, since steps wait for the slower message, and a few pairs meet something else.
    """
    share = 1 / (2 * np.clip(first_of_two, 0.51, 1.0))
    return size * float(np.percentile(np.log(share / (1 - share)), 90)) / NORMAL_90 / math.sqrt(2)


def _taken(ranks: Sequence[Exchanges], hosts: Hosts, size: int) -> tuple[float, float]:
    """(bytes/s that a link carried beside blocks each way, cores that blocks lost to it), in messages of that size."""
    links = len(ranks) / hosts.ranks_per_host
    bytes_per_s = hosts.ranks_per_host * float(np.median([rank.rounds_bytes_per_s[size] for rank in ranks]))
    beside_per_s = np.sum([rank.beside_blocks_per_s[size] for rank in ranks], axis=0)
    kept = float(np.median(beside_per_s / _together(ranks, "crowded_blocks_per_s")))
    return bytes_per_s, min(cores_here(), len(ranks)) * max(1 - kept, 0.0) / links


def _message_core_s(taken: Mapping[int, tuple[float, float]]) -> float:
    """Seconds of a core for each message, from (bytes/s, cores taken) of short and of long ones over one link.

    Never below 0, nor more than a long one takes in all.
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
    """What messages took, by what of them doesn't go at once through links that were idle."""
    return {
        (rate, size - hosts.at_once_bytes(size, hosts.ranks_per_host)): seconds
        for (rate, size), seconds in _medians_s(exchanges, hosts, name).items()
    }


def _most_bytes_per_s(medians_s: MediansS) -> float:
    """Of a long message, what comes after a short one's time; all of it where that is as long."""
    (_, short), (_, long) = min(medians_s), max(medians_s)
    short_s, long_s = medians_s[min(medians_s)], medians_s[max(medians_s)]
    return (long - short) / (long_s - short_s) if long_s > short_s else long / long_s


def _together(ranks: Sequence[Exchanges], name: str) -> np.ndarray:
    """What all ranks do a second, by repetition."""
    return np.sum([getattr(rank, name) for rank in ranks], axis=0)


def _sizes(ranks: Sequence[Exchanges]) -> str:
    return ", ".join(map(str, ranks[0].beside_s))
