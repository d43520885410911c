"""Keys that a point's mode doesn't read. What somebody has set and nobody reads is a note of the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sp_bench.point.mode import Mode
from sp_bench.reading import as_yaml
from sp_bench.resources import point_keys
from sp_bench.workload import WORKLOADS

MEASURED = ("measure", "alone")
READ_BY: Mapping[str, tuple[str, ...]] = {
    "alone": ("alone",),
    **dict.fromkeys(("device", "nccl", "iters", "warmup", "verify", "parts", "timeout_s"), MEASURED),
    **dict.fromkeys(("kernel.sm_margin", "train.learning_rate", "train.task"), MEASURED),
}
"""The modes that read each key that not all modes read. What only simulated points read is refused on others."""
SAID = "doesn't read"
IN_WORDS = {"simulate": "a simulated point", "measure": "a measured point", "alone": "mode=alone"}


def notes(config: Mapping[str, Any], mode: Mode) -> list[str]:
    """A note on the keys that have other values than their defaults and aren't read; none if there are none."""
    workload = str(config["workload"])
    readers = {IN_WORDS[mode.name]: unread(mode.name), f"workload={workload}": _of_others(workload)}
    return [f"{who} {SAID} {said}" for who, keys in readers.items() if (said := _given(config, keys))]


def _given(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Those of the keys that have other values than their defaults, with these; empty if none has."""
    given = {key: value for key in keys if (value := _at(config, key)) != _default(key)}
    return ", ".join(f"{key}={as_yaml(value)}".replace("'", "") for key, value in given.items())


def _of_others(workload: str) -> list[str]:
    """The keys of sections that only other workloads read."""
    sections = {key for kind in WORKLOADS.values() for key in kind.keys} - {*WORKLOADS[workload].keys}
    sections_read = {name: content for name, content in point_keys().items() if name in sections}
    return [f"{name}.{key}" for name, content in sections_read.items() if isinstance(content, dict) for key in content]


def is_note(text: str) -> bool:
    """Whether a note is one of these. They are of the request: a point that is reused has those of its own."""
    return f" {SAID} " in text


def unread(mode: str) -> list[str]:
    """The keys that points of a mode don't read."""
    return [key for key, modes in READ_BY.items() if mode not in modes]


def _at(config: Mapping[str, Any], key: str) -> Any:
    group, _, name = key.rpartition(".")
    section = config.get(group) if group else config
    return section.get(name, _default(key)) if isinstance(section, Mapping) else _default(key)


def _default(key: str) -> Any:
    group, _, name = key.rpartition(".")
    defaults = point_keys()
    return "auto" if group == "kernel" else (defaults[group] if group else defaults)[name]
