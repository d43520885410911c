"""The settings of a cluster's jobs, from conf/slurm/*.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
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
    """A container image for pyxis."""

    image: str
    mounts: Lines = ()


class Settings(Section, frozen=True, kw_only=True):
    """The settings of scripts that depend on the cluster, not on the points."""

    gpus_per_node: Count
    time: Annotated[str, Meta(description="hours:minutes:seconds, as a text", examples=["01:00:00"])]
    """The time limit of an array task."""
    account: Word | None = None
    partition: Word | None = None
    most_at_once: Count | None = None
    """The most tasks of an array that run at a time."""
    cpus_per_task: Count | None = None
    """The cores of each rank. sbatch and srun are both told: srun gives one core if it isn't."""
    mem: Word | None = None
    """sbatch's --mem; 0 is all of a node's memory."""
    cache: str | None = None
    """A folder on the nodes' own disks for compiled kernels (Triton's, FlashAttention-4's); shell variables work."""
    sbatch: Lines = ()
    """Additional options of sbatch."""
    srun: Lines = ()
    """Additional options of srun."""
    modules: Lines = ()
    environment: Lines = ()
    """Shell lines that set up the Python environment."""
    variables: dict[str, Word | float] = msgspec.field(default_factory=dict)
    """Environment variables of the jobs. SLURM_CONF, if set, selects the cluster that jobs are sent to."""
    container: Container | None = None
    python: str = "python"

    def nodes(self, gpus: int) -> int:
        """The number of nodes for that many GPUs."""
        return math.ceil(gpus / self.gpus_per_node)


def load(name: str, changes: Sequence[str] = (), own: Path | None = None) -> Settings:
    """The settings of conf/slurm/<name>.yaml, with changes such as time=00:10:00. Raises RequestError.

    `own` is a folder of the form of conf/.
    """
    known = conf_files("slurm", own)
    if name not in known:
        raise unknown("slurm", name, known)
    return changed(yaml.safe_load(known[name].read_text()), changes)


def changed(config: dict[str, Any], changes: Sequence[str]) -> Settings:
    """The settings of a file's content, or of settings as plain values, with changes. Raises RequestError."""
    for change in changes:
        path, _, text = change.partition("=")
        section, _, key = path.rpartition(".")
        if section and not isinstance(config.setdefault(section, {}), dict):
            raise RequestError(f"slurm.{change}", f"{section} has no keys", f"slurm.{section}=VALUE would work")
        (config[section] if section else config)[key] = _value(f"slurm.{path}", text)
    return read(Settings, config, "slurm")


def _value(key: str, text: str) -> Any:
    """A value as in YAML, but digits, dashes and colons stay a text, as in 30 or 00:10:00."""
    if re.fullmatch(r"[\d:-]+", text):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise RequestError(f"{key}={text}", "is not YAML", f"{key}='text' would work") from None
