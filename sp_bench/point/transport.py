"""The keys about what carries a point's transfers: transport, registered_buffers, cta_policy, cuda_graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError, unknown
from sp_bench.lower import DEFAULT_TRANSPORT, NCCL, SYMMETRIC, TransportOptions
from sp_bench.lower.transports import KINDS as TRANSPORTS
from sp_bench.point.mode import Mode
from sp_bench.reading import Section, read

KEYS = ("transport", "registered_buffers", "cta_policy", "cuda_graph")
_OF_NCCL = "is an option of NCCL between GPUs"
_NOTES = {
    "symmetric_memory": "copy engines are simulated with the cluster file's rate of NVLink: it has no other figure",
    "registered_buffers": "registered buffers are simulated as others: no cluster file has figures for them",
    "cta_policy": "cta_policy is not simulated: no cluster file has figures for it",
    "cuda_graph": "cuda_graph is not simulated: launch_s is that of single launches, and nothing is known of a graph's",
}


class TransportKeys(Section, frozen=True, kw_only=True):
    """The keys of conf/config.yaml about transports."""

    transport: str
    """auto, or a key of lower.transports.KINDS."""
    registered_buffers: bool
    cta_policy: Literal["default", "efficiency", "zero"] | None
    cuda_graph: bool | Literal["auto"]


def transport_of(
    config: Mapping[str, Any], mode: Mode, cluster: Cluster, *, of_a_peer: bool
) -> tuple[TransportOptions, list[str]]:
    """The transport of a point, and notes on it. Raises RequestError for one that can't carry the point."""
    keys = read(TransportKeys, {key: config[key] for key in KEYS})
    if keys.transport not in (known := ("auto", *TRANSPORTS)):
        raise unknown("transport", keys.transport, known)
    options = TransportOptions(
        name=keys.transport,
        registered_buffers=keys.registered_buffers,
        cta_policy=keys.cta_policy,
        cuda_graph=keys.cuda_graph,
    )
    simulated = mode.name == "simulate"
    on_cpu = cluster.cores is not None if simulated else mode.devices.kind == "cpu"
    workload, notes = str(config["workload"]), []
    if options.cuda_graph == "auto" and (why := _not_captured(on_cpu=on_cpu, workload=workload, of_a_peer=of_a_peer)):
        options, notes = replace(options, cuda_graph=False), [f"cuda_graph=auto: nothing is replayed, as {why}"]
    if options == DEFAULT_TRANSPORT:
        return options, notes
    value = _first_other(options)
    if of_a_peer:
        raise RequestError(value, "a peer's code has transfers of its own", f"{value.partition('=')[0]} left out works")
    if mode.alone and replace(options, cuda_graph=False) != DEFAULT_TRANSPORT:
        raise RequestError(value, "mode=alone transfers nothing", "mode=measure, or mode=simulate, would work")
    _refuse_kind(options, on_cpu=on_cpu, simulated=simulated, cluster=cluster)
    _refuse_options(options, on_cpu=on_cpu, workload=workload)
    return options, [*notes, *_notes(options)] if simulated else notes


def _first_other(options: TransportOptions) -> str:
    """The first key that is not at its default, with its value."""
    entries = zip(KEYS, vars(options).values(), vars(DEFAULT_TRANSPORT).values(), strict=True)
    key, value = next((key, value) for key, value, default in entries if value != default)
    return f"{key}={str(value).lower()}"


def _refuse_kind(options: TransportOptions, *, on_cpu: bool, simulated: bool, cluster: Cluster) -> None:
    """Raise RequestError for a transport that the ranks' devices don't have."""
    kind, value = options.kind(on_cpu=on_cpu), f"transport={options.name}"
    where = "cpu" if on_cpu else "cuda"
    if kind.between != where:
        words = {"cpu": "CPUs", "cuda": "GPUs"}
        others = " or ".join(f"transport={name}" for name, other in TRANSPORTS.items() if other.between == where)
        rule = f"is between {words[kind.between]}, and the point's ranks are on {words[where]}"
        raise RequestError(value, rule, f"{others} would work")
    if simulated and not kind.simulated:
        rule = f"there are no figures for it: those of cluster={cluster.name} are of gloo"
        raise RequestError(value, rule, "mode=measure, or transport=gloo, would work")
    if kind.of_one_machine and cluster.hosts:
        rule = f"the hosts of cluster={cluster.name} are emulated on one machine, and would share its memory"
        raise RequestError(value, rule, "transport=gloo would work")


def _refuse_options(options: TransportOptions, *, on_cpu: bool, workload: str) -> None:
    """Raise RequestError for options that don't go with the transport, or with each other."""
    registered, policy = "registered_buffers=true", f"cta_policy={options.cta_policy}"
    on_nccl = not on_cpu and options.kind(on_cpu=False) is NCCL
    for given, value in ((options.registered_buffers, registered), (options.cta_policy is not None, policy)):
        if given and not on_nccl:
            raise RequestError(value, _OF_NCCL, "transport=nccl on GPUs would work")
    if options.cta_policy == "zero" and not options.registered_buffers:
        rule = "NCCL leaves its collectives to copy engines only between registered buffers"
        raise RequestError(policy, rule, f"{policy} {registered} would work")
    if options.cuda_graph and (why := _not_captured(on_cpu=on_cpu, workload=workload)):
        other = "workload=attention, or " * (workload != "attention" and not on_cpu)
        raise RequestError("cuda_graph=true", why, f"{other}cuda_graph=false would work")


def _not_captured(*, on_cpu: bool, workload: str, of_a_peer: bool = False) -> str:
    """Why a point's steps can't be captured; empty if they may."""
    if on_cpu:
        return "only work on GPUs can be captured"
    if of_a_peer:
        return "a peer's code has transfers of its own"
    return "" if workload == "attention" else f"a step of workload={workload} waits for the host, which a graph can't"


def _notes(options: TransportOptions) -> list[str]:
    """Notes on options that the simulation doesn't know."""
    given = {**vars(options), "symmetric_memory": options.name == SYMMETRIC.name}
    return [note for name, note in _NOTES.items() if given[name]]
