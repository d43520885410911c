"""How a cluster's jobs are asked for: conf/slurm/*.yaml, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import yaml

from sp_bench.bench.values import whole
from sp_bench.errors import RequestError, unknown, unknown_key
from sp_bench.resources import conf_files


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What scripts say of a cluster, and nothing that depends on the points."""

    gpus_per_node: int
    time: str
    """Of one array task, as SLURM writes it: hours:minutes:seconds."""
    account: str | None = None
    partition: str | None = None
    most_at_once: int | None = None
    """Array tasks that run at a time, of each array."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch."""
    srun: tuple[str, ...] = ()
    """More options of srun."""
    modules: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Lines of shell that make the Python environment."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, of NCCL and others. SLURM_CONF, where given, is the cluster that jobs are sent to."""
    container: Mapping[str, Any] | None = None
    """image and mounts, for pyxis."""
    python: str = "python"

    def as_json(self) -> dict[str, Any]:
        """What `Settings.build` takes."""
        return asdict(self)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Settings:
        """The settings that a file describes. Raises RequestError for a key or value that makes no sense."""
        known = [f.name for f in fields(cls)]
        for key in config:
            if key not in known:
                raise unknown_key(f"slurm.{key}", [f"slurm.{name}" for name in known])
        for key in ("gpus_per_node", "time"):
            if config.get(key) is None:
                raise RequestError(f"slurm.{key}", "is needed", "slurm.gpus_per_node=8 slurm.time=01:00:00 would work")
        values = dict(config)
        values["gpus_per_node"] = whole("slurm.gpus_per_node", config["gpus_per_node"])
        for key in ("sbatch", "srun", "modules", "environment"):
            values[key] = _lines(f"slurm.{key}", config.get(key) or ())
        for key in ("time", "account", "partition", "python"):
            if isinstance(config.get(key), list | dict):
                raise RequestError(f"slurm.{key}={config[key]}", "must be one word", f"slurm.{key}=WORD would work")
        for key in ("variables", "container"):
            if not isinstance(config.get(key) or {}, Mapping):
                raise RequestError(f"slurm.{key}={config[key]}", "must be a section", "{name: value} would work")
        values["variables"] = {str(key): str(value) for key, value in (config.get("variables") or {}).items()}
        if values.get("container") and "image" not in values["container"]:
            raise RequestError("slurm.container", "has no image", "slurm.container.image=FILE_OR_URL would work")
        if values.get("most_at_once") is not None:
            values["most_at_once"] = whole("slurm.most_at_once", values["most_at_once"])
        return cls(**values)

    def nodes(self, gpus: int) -> int:
        """How many nodes that many GPUs are on."""
        return math.ceil(gpus / self.gpus_per_node)


def load(name: str, changes: Sequence[str] = ()) -> Settings:
    """conf/slurm/<name>.yaml, with changes such as time=00:10:00. Raises RequestError."""
    known = conf_files("slurm")
    if name not in known:
        raise unknown("slurm", name, known)
    config: dict[str, Any] = yaml.safe_load(known[name].read_text())
    for change in changes:
        path, _, text = change.partition("=")
        section, _, key = path.rpartition(".")
        if section and not isinstance(config.setdefault(section, {}), dict):
            raise RequestError(f"slurm.{change}", f"{section} has no keys", f"slurm.{section}=VALUE would work")
        (config[section] if section else config)[key] = _value(f"slurm.{path}", text)
    return Settings.build(config)


def _value(key: str, text: str) -> Any:
    """As YAML has it, except that 00:10:00 is no number."""
    if re.fullmatch(r"[\d-]+:[\d:]+", text):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise RequestError(f"{key}={text}", "is not YAML", f"{key}='text' would work") from None


def _lines(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"{key}={value}", "must be a list", f"{key}=[...] would work")
    return tuple(map(str, value))
