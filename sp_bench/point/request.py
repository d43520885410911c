"""A request for one benchmark point: its config, resolved and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sp_bench import methods, records
from sp_bench.cluster import Cluster
from sp_bench.cluster.emulation import refuse_hosts
from sp_bench.cluster.implementation import OURS, Implementation
from sp_bench.cluster.stragglers import Stragglers
from sp_bench.errors import RequestError
from sp_bench.extras import require
from sp_bench.launch import Launch
from sp_bench.lower import TransportKind
from sp_bench.machine import Devices, cores_here
from sp_bench.peers.peer import Peer
from sp_bench.plan.method import CollectiveMethod, Method
from sp_bench.plan.patterns import divisors
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV, Q
from sp_bench.point import unread
from sp_bench.point.given import SHAPE, Given
from sp_bench.point.mode import Mode, resolve_mode
from sp_bench.point.refusals import (
    refuse_latents_twice,
    refuse_others,
    refuse_replays,
    refuse_sinks,
    refuse_what_does_not_fit,
)
from sp_bench.point.transport import transport_of
from sp_bench.reading import Count, Natural, Section, read
from sp_bench.records import MODES, Record
from sp_bench.records.quantities import Asked, Setup
from sp_bench.records.record import Part, fields_of
from sp_bench.workload import Workload, workload_named

LEAST_STEP = 128
"""seqlen=max is found to so many tokens of a rank, and refused if not even these fit."""


class KernelSection(Section, frozen=True, kw_only=True):
    """The content of a conf/kernel file."""

    name: str
    sm_margin: Natural | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A benchmark point whose values are valid together."""

    given: Given = field(repr=False)
    """The config that asked for it."""
    method: Method | Peer
    """One of our methods, or a peer: another package's code, which has no plans."""
    problem: Problem
    cluster: Cluster
    mode: str
    """measure, alone or simulate."""
    why: str
    """The reason for the mode."""
    workload: Workload
    """The step that is timed."""
    phase: str
    """One of the workload's phase_choices."""
    notes: list[str]
    """Remarks that a reader of the numbers must know."""
    kernel: str
    sm_margin: int | None
    """SMs of a GPU that persistent block kernels leave free; None: as many as lanes take."""
    iters: int
    warmup: int
    verify: bool
    parts: bool
    """Whether blocks alone and transfers alone are timed in turn with the step."""
    seed: int
    trace: int
    """The number of ranks whose simulated timelines are written."""
    every_variant: bool
    """Whether variants are simulated that bounds rule out."""
    timeout_s: float
    run_id: str
    """Empty for a launch in the future, on whose machines it depends."""
    devices: Devices
    """The devices of a measured point's ranks."""
    alone: tuple[int, ...] = ()
    """The ranks that mode=alone executes, one after the other."""
    launch: Launch | None = None
    """The launch that has started a measured point's ranks; None: they are started on this machine."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved config."""
        return self.given.config

    @property
    def ours(self) -> Method:
        """The method, which is one of ours: a peer has no plans to choose among."""
        assert isinstance(self.method, Method), "a peer has no plans"
        return self.method

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that are timed or simulated, in order."""
        return self.workload.phases

    def asked(self) -> Asked:
        """The part of the record that has the request."""
        return replace(
            self.given.asked(),
            method=self.method.name,
            impl=self.method.impl if isinstance(self.method, Peer) else None,
            seed=self.seed,
            stragglers=self.cluster.stragglers.as_record(),
        )

    def setup(self) -> Setup:
        """The part of the record that has the setup, as far as the request determines it."""
        on_cpu = self.cluster.cores is not None if self.mode == "simulate" else self.devices.kind == "cpu"
        transport = self.cluster.transport_options.described(on_cpu=on_cpu)
        return Setup(
            layout=self.problem.layout.name,
            nodes=self.cluster.nodes(self.problem.n * self.workload.groups),
            device_name=self.cluster.device.name,
            transport=None if isinstance(self.method, Peer) else transport,
        )

    def record(
        self,
        status: str,
        error: str | None = None,
        *parts: Part,
        notes: Sequence[str] = (),
        provenance: Mapping[str, Any] | None = None,
    ) -> Record:
        """The record of this point. Without `parts` it has only the request."""
        return Record(
            **fields_of((*(parts or (self.asked(), self.setup())), self.workload.decoded(self.problem))),
            run_id=self.run_id,
            status=status,
            mode=self.mode,
            error=error,
            notes=list(notes) or None,
            provenance=dict(provenance or records.provenance()),
        )


def resolve(config: Mapping[str, Any], launch: Launch | None = None) -> Request:
    """The request of a composed config. Raises RequestError for the first invalid value.

    With a launch in the future nothing is asked of this machine, not its packages either, and there is no run_id.
    `config` has the keys of conf/config.yaml and its groups: method, cluster, kernel, logger. `launch` has the ranks
    that the point is measured on; None: they are started on this machine.
    """
    given = Given.of(config)
    kind, values = given.workload, given.values
    phases = kind.phases_of(str(config["phase"]))
    at_once = not (launch and launch.future)
    refuse_latents_twice(given)
    method = _method(given, here=at_once)
    peer = method if isinstance(method, Peer) else None
    problem = _problem(given, method)
    section = read(KernelSection, config["kernel"], "kernel")
    kernel, margin = section.name, None if section.sm_margin == "auto" else section.sm_margin
    workload = kind.build(config, phases)
    cluster = replace(Cluster.build(config["cluster"]), stragglers=Stragglers.build(config["stragglers"], values.seed))
    implementation = read(Implementation, config.get("implementation") or {"name": OURS.name}, "implementation")
    cluster.refuse(values.gpus)
    refuse_sinks(config, kind)
    refuse_replays(config, problem)
    mode = resolve_mode(config, values.gpus, cluster, launch, of_a_peer=peer is not None)
    workload.refuse(problem, mode.name, peer)
    for attention in workload.attentions(problem):
        method.refuse(attention)
    transport, notes = transport_of(config, mode, cluster, of_a_peer=peer is not None)
    notes += cluster.warnings
    cluster = replace(cluster, transport_options=transport)
    method = _with_collectives(method, cluster.transport)
    notes += (peer.notes(mode.devices.kind) if peer and at_once else []) + unread.notes(config, mode)
    notes += workload.notes
    if peer:
        peer.refuse_run(mode=mode.name, kernel=kernel, device=mode.devices.kind, here=at_once)
    if mode.name == "simulate":
        cluster = replace(cluster, device=cluster.device.with_kernel(kernel).used_by(implementation))
        problem = replace(problem, whole_chunks=implementation.sends_whole_chunks)
        cluster.device.refuse(problem)
    workload, cluster = workload.on(cluster.device, problem), workload.cluster_of(cluster, values.gpus)
    if mode.name != "simulate":
        refuse_others(implementation)
        notes += _refuse_measuring(config, workload, problem, cluster, mode, launch) if at_once else []
    return Request(
        given=given,
        method=method,
        problem=problem,
        cluster=cluster,
        mode=mode.name,
        why=mode.why,
        workload=workload,
        phase=config["phase"],
        kernel=kernel,
        sm_margin=margin,
        iters=values.iters,
        warmup=values.warmup,
        verify=values.verify and not mode.alone,
        parts=values.parts and peer is None,
        seed=values.seed,
        trace=values.trace,
        every_variant=values.every_variant,
        timeout_s=values.timeout_s,
        notes=notes,
        run_id=given.run_id(mode.name, cluster.cores, peer.version if peer else None, launch, mode.devices)
        if at_once
        else "",
        devices=mode.devices,
        alone=mode.alone,
        launch=launch if mode.name == "measure" else None,
    )


def _method(given: Given, *, here: bool) -> Method | Peer:
    """The method or peer with its options. `here`: a peer's package must be installed."""
    options = {key: value for key, value in given.config["method"].items() if key != "name"}
    if given.of_a_peer:
        from sp_bench.peers import registry as peers

        return peers.build(given.impl, options, mask=given.mask, here=here)
    return methods.build(given.method, options)


def _with_collectives(method: Method | Peer, transport: TransportKind) -> Method | Peer:
    """The method on that transport: where it would leave its collectives to gloo by default, they are messages.

    gloo's all-to-alls take a third longer (docs/explanation/shaped_hosts.md), and its other collectives as long.
    """
    if isinstance(method, CollectiveMethod) and method.collectives == "auto" and not transport.adds:
        return replace(method, collectives="messages")
    return method


def _problem(given: Given, method: Method | Peer) -> Problem:
    """The problem in the method's layout, with the heads of one of the GPUs that share a rank's tokens.

    Raises RequestError if the method refuses it, or the GPUs can't share the heads.
    """
    values, mask = given.values, given.mask
    tensor_parallel, data_parallel = (
        given.workload.tensor_parallel(given.config),
        given.workload.data_parallel(given.config),
    )
    shape = {key: getattr(values, key) for key in SHAPE}
    split = ("heads",) if values.latent_dim else ("heads", "kv_heads")  # each GPU has whole latents
    for key in ("gpus", *split):
        if getattr(values, key) % tensor_parallel:
            rule = f"must divide {key}={getattr(values, key)}"
            degree = given.workload.degree_key
            raise RequestError(f"{degree}={tensor_parallel}", rule, f"{degree}=1 would work")
    n, rest = divmod(values.gpus // tensor_parallel, data_parallel)
    if rest:
        groups = values.gpus // tensor_parallel
        beside = f" / train.tensor_parallel={tensor_parallel}" if tensor_parallel > 1 else ""
        choices = ", ".join(map(str, divisors(groups)))
        rule = f"must divide gpus={values.gpus}{beside}"
        raise RequestError(f"train.data_parallel={data_parallel}", rule, f"{choices} would work")
    shape |= {key: shape[key] // tensor_parallel for key in split}
    given.workload.refuse_method(method)
    shape, mask = given.workload.attention_of(given.config, shape, mask, n)
    layout = method.layout_of(given.workload.mask_of_layout(given.config, mask), n)
    dtype = str(given.config["dtype"])
    wire_dtype = str(given.config["wire_dtype"] or "")
    problem = Problem(n=n, **shape, mask=mask, dtype=dtype, wire_dtype=wire_dtype, layout=layout)
    method.refuse(problem)
    return method.assigned(problem) if isinstance(method, Peer) else problem


def _refuse_measuring(
    config: Mapping[str, Any], workload: Workload, problem: Problem, cluster: Cluster, mode: Mode, launch: Launch | None
) -> list[str]:
    """The notes of a measured point. Raises RequestError for a point that can't be measured."""
    require("run", f"measuring on cluster={cluster.name}")
    if cluster.stragglers:
        raise RequestError("stragglers", "can be simulated, not made", "mode=simulate would work")
    local_ranks, cores = (launch.ranks_here, launch.cores_here) if launch else (problem.n, cores_here())
    local_ranks = 1 if mode.alone else local_ranks
    on_cpu = mode.devices.kind == "cpu"
    workload.refuse_device(mode.devices.kind)
    inputs = problem.chunk_bytes(Q, wire=False) + problem.chunk_bytes(KV, wire=False) if on_cpu else 0
    held = workload.held_bytes(cluster.device, problem) if on_cpu else {}
    refuse_what_does_not_fit(local_ranks, {"attention": inputs, **held}, config)
    if cluster.hosts and not mode.alone:
        refuse_hosts(cluster.hosts)
    crowded = on_cpu and local_ranks > cores
    return [f"{local_ranks} ranks share {cores} cores: their compute time includes waiting for one"] if crowded else []


def unsupported(config: Mapping[str, Any], error: RequestError) -> Record:
    """The record of a point that `resolve` refused. Raises RequestError if its numbers are invalid.

    With seqlen=max it has the shortest sequence that was tried.
    """
    if config["seqlen"] == "max":
        kind = workload_named(str(config["workload"]))
        if config["train"].get("data_parallel") == "auto":
            config = {**config, "train": {**config["train"], "data_parallel": 1}}
        ranks = read(Count, config["gpus"], "gpus") // (kind.tensor_parallel(config) * kind.data_parallel(config))
        config = {**config, "seqlen": LEAST_STEP * max(ranks, 1)}
    measured = config["mode"] == "auto" and config["cluster"].get("this_machine") is True
    mode = config["mode"] if config["mode"] in MODES else "measure" if measured else "simulate"
    given = Given.of(config)
    return Record(
        **vars(given.asked()),
        run_id=given.run_id(mode),
        status="unsupported",
        mode=mode,
        error=str(error),
        provenance=records.provenance(),
    )


def setting_of(config: Mapping[str, Any]) -> str:
    """A text that is equal for points which differ only in their methods."""
    kept = {key: value for key, value in config.items() if key not in ("method", "impl")}
    return json.dumps(kept, sort_keys=True, default=str)
