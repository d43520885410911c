"""Requests that are refused for what their keys say together, or for the memory of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sp_bench.cluster.implementation import OURS, Implementation
from sp_bench.errors import RequestError
from sp_bench.machine import cores_here, free_bytes
from sp_bench.plan.problem import Problem
from sp_bench.point.given import Given
from sp_bench.workload import WORKLOADS, Decode, Workload
from sp_bench.workload.base import SINKS
from sp_bench.workload.model import NONE

RANKS_PER_CORE = 64
RANK_OVERHEAD_BYTES = 150 * 2**20
"""Resident memory of a rank's process without the attention's own."""


def refuse_sinks(config: Mapping[str, Any], kind: type[Workload]) -> None:
    """Raise RequestError for sinks of a workload that has none, or of steps that are replayed."""
    if not config.get(SINKS):
        return
    if SINKS not in kind.keys:
        have = ", ".join(f"workload={name}" for name, each in WORKLOADS.items() if SINKS in each.keys)
        raise RequestError("sinks=true", f"are of {have}: workload={kind.name} has none", "sinks=false would work")
    if config["cuda_graph"] is True:
        rule = "are summed by the host's call, which a graph doesn't have"
        raise RequestError("sinks=true cuda_graph=true", rule, "cuda_graph=false would work")


def refuse_latents_twice(given: Given) -> None:
    """Raise RequestError for latents that blocks make keys of in the shape of a decode step, or in one that is not of
    a model, whose layers have both shapes.
    """
    if given.values.latent_dim is None or (given.workload is Decode and given.config["model"]["name"] != NONE):
        return
    asked, shape = f"latent_dim={given.values.latent_dim}", "model=deepseek_v3_latents"
    if given.workload is Decode:
        rule = "a step makes no keys of what is cached: its queries have absorbed the matrices"
        works = (
            "model=deepseek_v2_lite, or latent_dim=null decode.latent=true and the widths of the latents, would work"
        )
        raise RequestError(f"{asked}, workload={Decode.name}", rule, works)
    if given.config["decode"]["latent"] is True:
        rule = "blocks make keys of every head, and this is the shape of a decode step, whose keys are the latents"
        works = f"{shape}, or decode.latent=false with a shape like it, would work"
        raise RequestError(f"{asked}, decode.latent=true", rule, works)


def refuse_replays(config: Mapping[str, Any], problem: Problem) -> None:
    """Raise RequestError for steps that are replayed and add to gradients of matrices that no graph knows."""
    if problem.latent_dim and config["cuda_graph"] is True:
        rule = "blocks add to gradients of matrices that are not the replayed engine's"
        raise RequestError(f"latent_dim={problem.latent_dim} cuda_graph=true", rule, "cuda_graph=false would work")


def refuse_others(implementation: Implementation) -> None:
    """Raise RequestError for an implementation that can't be measured, as it is somebody else's."""
    if implementation.name != OURS.name:
        rule = "is simulated only; measured points run this suite's code or, with method=peer, another package's"
        raise RequestError(f"implementation={implementation.name}", rule, "mode=simulate would work")


def refuse_what_does_not_fit(n: int, rank_bytes: Mapping[str, int], config: Mapping[str, Any]) -> None:
    """Raise RequestError if this machine can't hold n ranks of `rank_bytes` each, which are by kind."""
    most = RANKS_PER_CORE * cores_here()
    if n > most:
        rule = f"{cores_here()} cores hold at most {most} ranks"
        raise RequestError(f"gpus={n}", rule, f"gpus={most}, or mode=simulate, would work")
    kinds = {**rank_bytes, "processes": RANK_OVERHEAD_BYTES}
    need, free = n * sum(kinds.values()), free_bytes()
    if need > free:
        largest = sorted(((n * size / 2**30, kind) for kind, size in kinds.items()), reverse=True)
        raise RequestError(
            f"gpus={n}, seqlen={config['seqlen']}",
            f"its ranks need about {need / 2**30:.1f} GiB and this machine has {free / 2**30:.1f} free: "
            f"{(need - free) / 2**30:.1f} are missing. In GiB: "
            + ", ".join(f"{kind} {size:.1f}" for size, kind in largest if size >= 0.05),
            "a shorter seqlen, fewer ranks, or mode=simulate, would work",
        )
