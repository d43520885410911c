"""A composed config, read once: its numbers, its workload and its mask. Documents are drawn here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from msgspec import structs

from sp_bench import records
from sp_bench.errors import RequestError
from sp_bench.launch import Launch
from sp_bench.machine import Devices
from sp_bench.peers.peer import PEER
from sp_bench.plan.documents import Packed
from sp_bench.plan.mask import Mask
from sp_bench.point.masks import described, identified, mask_of
from sp_bench.reading import Count, Natural, Seconds, Section, Tokens, read
from sp_bench.records.quantities import Asked
from sp_bench.workload import WORKLOADS, Workload, workload_named
from sp_bench.workload.base import SINKS

NOT_IN_THE_RESULT = ("results_dir", "logger", "baseline", "reuse", "timeout_s", "trace")
"""Keys that don't affect a point's numbers, and so are left out of its run_id."""
SHAPE = ("seqlen", "kv_seqlen", "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "latent_dim", "rope_dim")
"""Fields of a problem that have the same names in a config and in a record."""


class Values(Section, frozen=True, kw_only=True):
    """The numbers and booleans of conf/config.yaml."""

    gpus: Count
    seqlen: Tokens
    kv_seqlen: Tokens | None
    batch: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    v_head_dim: Count | None
    latent_dim: Count | None
    rope_dim: Natural | None
    trace: Natural
    every_variant: bool
    iters: Count
    warmup: Natural
    verify: bool
    parts: bool
    seed: Natural
    timeout_s: Seconds

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Those of a config, with kv_heads and rope_dim filled in: all heads or, of latents, one; as many elements as
        values have fewer than keys. A kv_seqlen or v_head_dim that says nothing new is left out.

        Raises RequestError for an invalid one.
        """
        given = {key: config[key] for key in cls.__struct_fields__}
        kv_heads = given["kv_heads"]
        if kv_heads is None:
            kv_heads = given["heads"] if given["latent_dim"] is None else 1
        values = read(cls, given | {"kv_heads": kv_heads})
        if values.latent_dim is None and values.rope_dim is not None:
            rule = "are elements of keys that are not made of a latent, and none travels"
            raise RequestError(f"rope_dim={values.rope_dim}", rule, "latent_dim=512, or rope_dim=null, would work")
        if values.latent_dim and values.rope_dim is None:
            values = structs.replace(values, rope_dim=values.head_dim - (values.v_head_dim or values.head_dim))
        alike = {"kv_seqlen": values.seqlen, "v_head_dim": values.head_dim}
        return structs.replace(values, **{key: None for key, usual in alike.items() if getattr(values, key) == usual})


@dataclass(frozen=True, kw_only=True)
class Given:
    """The keys of a config that every workload and method has. The values need not go together."""

    config: Mapping[str, Any] = field(repr=False)
    """The resolved config."""
    workload: type[Workload]
    values: Values
    mask: Mask

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a config with the keys of conf/config.yaml. Raises RequestError for the first invalid value."""
        workload, values = workload_named(str(config["workload"])), Values.of(config)
        values = structs.replace(values, kv_seqlen=workload.kv_seqlen(config, values.seqlen, values.kv_seqlen))
        mask = mask_of(config, values.seed, *workload.mask_tokens(values))
        if isinstance(mask, Packed) and mask.new and values.kv_seqlen is None:
            values = structs.replace(values, kv_seqlen=mask.seqlen + mask.cached_tokens)
        return cls(config=config, workload=workload, values=values, mask=mask)

    @property
    def method(self) -> str:
        """The name of the method, or `peer`."""
        return self.config["method"]["name"]

    @property
    def of_a_peer(self) -> bool:
        """Whether another package's attention is asked for."""
        return self.method == PEER

    @property
    def impl(self) -> str | None:
        """The name of a peer's implementation; None for a method of the suite. A sweep may set the key for others."""
        return self.config["impl"] if self.of_a_peer else None

    @property
    def wire_dtype(self) -> str:
        """The dtype of partial results on the wire."""
        return str(self.config["wire_dtype"] or self.config["dtype"])

    def asked(self) -> Asked:
        """The part of a record that has the request."""
        return Asked(
            workload=self.workload.name,
            method=self.impl or self.method,
            gpus=self.values.gpus,
            **{key: getattr(self.values, key) for key in SHAPE},
            **described(self.mask),
            sinks=self.config.get(SINKS) is True or None,
            dtype=str(self.config["dtype"]),
            wire_dtype=self.wire_dtype,
            phase=str(self.config["phase"]),
            cluster=self.config["cluster"]["name"],
            config=dict(self.config),
        )

    def run_id(
        self,
        mode: str,
        cores: int | None = None,
        version: str | None = None,
        launch: Launch | None = None,
        devices: Devices | None = None,
    ) -> str:
        """The run_id of the point in a mode. Equivalent configs have the same.

        `cores` is that of the cluster; `version` is that of a peer's package.
        """
        others = {key for kind in WORKLOADS.values() if kind is not self.workload for key in kind.keys}
        left_out = {*NOT_IN_THE_RESULT, *(others - {*self.workload.keys})}
        given = {**self.config, **structs.asdict(self.values)}
        kept = {key: value for key, value in given.items() if key not in left_out}
        kept |= {"wire_dtype": self.wire_dtype, "mode": mode, "cores": cores} | identified(self.mask)
        if mode == "measure" and launch and len(launch.ranks_by_node) > 1:
            kept["ranks_by_node"] = launch.ranks_by_node
        if mode == "simulate":
            kept |= {"device": None, "nccl": None}
        elif devices:
            kept |= {"device": devices.kind, "nccl": dict(devices.nccl)}
        kept |= {"alone": self.config["alone"] if mode == "alone" else None, "impl": self.impl, "version": version}
        return records.run_id(kept, measured=mode != "simulate", gpu_packages=_gpu_packages(devices))


def _gpu_packages(devices: Devices | None) -> tuple[str, ...] | None:
    """The packages whose code a point on GPUs may run; None for any other, which imports nothing that measures."""
    if devices is None or devices.kind != "cuda":
        return None
    from sp_bench.measure.devices import gpu_packages

    return gpu_packages()
