"""How a cluster's jobs are asked for: conf/slurm/*.yaml, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from sp_bench.errors import RequestError, unknown
from sp_bench.reading import Count, Section, read
from sp_bench.resources import conf_files

Word = str | int
Lines = Annotated[tuple[str, ...], Meta(description="a list of texts", examples=["[...]"])]


class Container(Section, frozen=True, kw_only=True):
    """What pyxis runs."""

    image: str
    mounts: Lines = ()


class Settings(Section, frozen=True, kw_only=True):
    """What scripts say of a cluster, and nothing that depends on the points."""

    gpus_per_node: Count
    time: Annotated[str, Meta(description="hours:minutes:seconds, as a text", examples=["01:00:00"])]
    """Of one array task."""
    account: Word | None = None
    partition: Word | None = None
    most_at_once: Count | None = None
    """Array tasks that run at a time, of each array."""
    sbatch: Lines = ()
    """More options of sbatch."""
    srun: Lines = ()
    """More options of srun."""
    modules: Lines = ()
    environment: Lines = ()
    """Lines of shell that make the Python environment."""
    variables: dict[str, Word | float] = msgspec.field(default_factory=dict)
    """Environment variables, of NCCL and others. SLURM_CONF, where given, is the cluster that jobs are sent to."""
    container: Container | None = None
    python: str = "python"

    def as_json(self) -> dict[str, Any]:
        """What `Settings.build` takes."""
        return msgspec.to_builtins(self)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Settings:
        """The settings that a file describes. Raises RequestError for a key or value that makes no sense."""
        return read(cls, config, "slurm")

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
    """As YAML has it, except that what is digits, dashes and colons stays a text: 30, 00:10:00."""
    if re.fullmatch(r"[\d:-]+", text):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise RequestError(f"{key}={text}", "is not YAML", f"{key}='text' would work") from None
