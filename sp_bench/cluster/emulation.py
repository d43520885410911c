"""Emulated hosts: the interface between a laboratory, which emulates them, and clusters and simulations.

A laboratory is a package in sp_bench/labs; a cluster file names it under `lab`. Its module `description` has the class
Hosts, which reads the file's section `hosts`; `hosts` sets the hosts up for the ranks of a pool (measure.homes);
`calibration` measures their figures (sp_bench.calibrate).
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from msgspec import StructMeta

from sp_bench.cluster.topology import Network
from sp_bench.errors import unknown
from sp_bench.plan.groups import Exchange, Group
from sp_bench.reading import Section, read

LABS, DEFAULT_LAB = "sp_bench.labs", "shaped"


def lab_module(name: str, module: str) -> Any:
    """A module of a laboratory. Raises RequestError for an unknown laboratory."""
    names = [lab.name for lab in pkgutil.iter_modules(importlib.import_module(LABS).__path__)]
    if name not in names:
        raise unknown("cluster.lab", name, names)
    return importlib.import_module(f"{LABS}.{name}.{module}")


def hosts_of(config: Mapping[str, Any]) -> EmulatedHosts | None:
    """The emulated hosts of a cluster file; None if it has none. Raises RequestError for an invalid key or value."""
    if config.get("hosts") is None:
        return None
    return read(lab_module(config.get("lab") or DEFAULT_LAB, "description").Hosts, config["hosts"], "cluster.hosts")


def refuse_hosts(hosts: EmulatedHosts) -> None:
    """Raise RequestError if this machine can't make these hosts."""
    lab_module(hosts.lab, "hosts").refuse(hosts)


class Message(NamedTuple):
    """One message of a transfer, for each of the q simulated ranks."""

    to: tuple[Group | Exchange, int]
    """(group, shift) of the receiver."""
    field_bytes: Mapping[str, Any]
    """Bytes of each field: one number for all ranks, or (q,)."""
    inter: np.ndarray
    """(q,) Whether the message leaves its node."""

    @property
    def bytes(self) -> Any:
        """Bytes of all fields: one number for all ranks, or (q,)."""
        return sum(self.field_bytes.values())


class Wire(NamedTuple):
    """A message on the wire. Each field is one number for all ranks, or (q,)."""

    weight: Any = 1.0
    """Its share of a shared link, relative to messages of weight 1."""
    later_bytes: Any = 0.0
    """Bytes that the receiver has at once, and that the links carry only after the message."""
    core_s_per_byte: Any = 0.0
    """Seconds of the shared cores that each byte takes."""
    most_bytes_per_s: Any = math.inf
    """The rate that it gets at most, whatever its links have."""


AS_IT_IS = Wire()
"""A message at the rate that its links give it."""


class Effects:
    """A machine's effects on blocks and messages beyond rates, latencies and fair shares. By default there are none."""

    defers: bool = False
    """Whether a message may have `later_bytes`."""

    def block_weights(self, work_s: np.ndarray) -> np.ndarray | float:
        """Each rank's relative share of crowded cores, (q,) or one number, for blocks of `work_s` seconds, (q,)."""
        return 1.0

    def on_wire(self, messages: Sequence[Message], *, by_library: bool = False) -> list[Wire]:
        """How the network carries each of the concurrent messages of one transfer, or of one of the library's."""
        return [AS_IT_IS] * len(messages)


class AbstractSection(StructMeta, ABCMeta):
    """The metaclass of sections with abstract methods."""


class EmulatedHosts(Section, frozen=True, metaclass=AbstractSection):
    """The section `hosts`: the hosts that a laboratory emulates, each a node of the topology."""

    lab: ClassVar[str]
    """The laboratory's name."""
    core_figures: ClassVar[tuple[str, ...]] = ()
    """Keys of the section in core seconds or cores: lower on faster cores."""

    @abstractmethod
    def network(self) -> Mapping[str, Any]:
        """The Topology keys that follow from the hosts."""

    @abstractmethod
    def crowd_latency_s_of(self, ranks_per_core: float) -> float:
        """Added latency in seconds of messages between hosts if more than one rank shares a core."""

    @property
    @abstractmethod
    def messages_take_cores(self) -> bool:
        """Whether messages between hosts take time of the shared cores."""

    @property
    @abstractmethod
    def even(self) -> Self:
        """These hosts without random differences between blocks or messages."""

    @abstractmethod
    def is_even(self, ranks: int, cores: int | None) -> bool:
        """Whether `ranks` ranks on `cores` shared cores have no random differences."""

    @abstractmethod
    def effects(self, network: Network, simulated: np.ndarray, cores: int | None, seed: int, phase: str) -> Effects:
        """The effects on the `simulated` ranks, (q,), in one phase."""

    @abstractmethod
    def least_wire_bytes(self, crossing: np.ndarray, lanes: int) -> np.ndarray:
        """The fewest bytes that links between hosts carry by the end, (L,), of the bytes that must cross them, (L,)."""
