"""Machines that a laboratory emulates: what a cluster and a simulation must know of them.

A laboratory is a package in sp_bench/labs, found by the name that a cluster file gives under `lab`. Of its modules,
`description` has the class Hosts, which reads the file's section `hosts`; `hosts` makes them for the ranks of a pool
(measure.homes); `calibration` measures their figures (sp_bench.calibrate).
"""

from __future__ import annotations

import importlib
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
    """That module of a laboratory. Raises RequestError where there is no such laboratory."""
    names = [lab.name for lab in pkgutil.iter_modules(importlib.import_module(LABS).__path__)]
    if name not in names:
        raise unknown("cluster.lab", name, names)
    return importlib.import_module(f"{LABS}.{name}.{module}")


def hosts_of(config: Mapping[str, Any]) -> EmulatedHosts | None:
    """The hosts that a cluster file describes; None where it has none. Raises RequestError."""
    if config.get("hosts") is None:
        return None
    return lab_module(config.get("lab") or DEFAULT_LAB, "description").Hosts.build(config["hosts"])


class Message(NamedTuple):
    """One message of a transfer, as each of the q simulated ranks sends it."""

    to: tuple[Group | Exchange, int]
    """The group and the shift to the receiver."""
    field_bytes: Mapping[str, Any]
    """By field, one number for all ranks or (q,)."""
    inter: np.ndarray
    """(q,) Whether it leaves its node."""

    @property
    def bytes(self) -> Any:
        """Of all fields."""
        return sum(self.field_bytes.values())


class Carried(NamedTuple):
    """How the network carries a message: one number for all ranks or (q,) each."""

    weight: Any = 1.0
    """Its share of a link that it is not alone on, beside messages of weight 1."""
    later_bytes: Any = 0.0
    """Those of its bytes that its receiver has at once, and its links carry only after the others."""
    core_s_per_byte: Any = 0.0
    """Seconds of the cores that ranks share, for each byte."""


class Effects:
    """What a machine does to blocks and messages, beyond rates, latencies and fair shares. A real one: nothing."""

    defers: bool = False
    """Whether a message may have `later_bytes`."""

    def block_weights(self, work_s: np.ndarray) -> np.ndarray | float:
        """The share of crowded cores that each rank's blocks get, from their seconds of work: (q,)."""
        return 1.0

    def carried(self, messages: Sequence[Message]) -> list[Carried]:
        """How each of the messages of one transfer, which begin together, is carried."""
        return [Carried()] * len(messages)


class AbstractSection(StructMeta, ABCMeta):
    """The metaclass of sections with abstract methods."""


class EmulatedHosts(Section, frozen=True, metaclass=AbstractSection):
    """The hosts that a laboratory emulates, each a node of the simulated topology: the section `hosts`."""

    lab: ClassVar[str]
    """The laboratory's name."""
    core_figures: ClassVar[tuple[str, ...]] = ()
    """Keys of the section that are seconds of a core, or cores: lower where cores are faster."""

    @classmethod
    def build(cls, config: Any) -> Self:
        """The section of a cluster file. Raises RequestError for a key or value that makes no sense."""
        return read(cls, config, "cluster.hosts")

    @abstractmethod
    def network(self) -> Mapping[str, Any]:
        """The sections of a cluster file's network that follow from the hosts."""

    @abstractmethod
    def crowd_latency_s_of(self, ranks_per_core: float) -> float:
        """Latency of messages between hosts in addition, where more than one rank shares a core."""

    @property
    @abstractmethod
    def messages_take_cores(self) -> bool:
        """Whether messages between hosts take time of the cores that ranks share."""

    @property
    @abstractmethod
    def even(self) -> Self:
        """The same without what differs from one block or message to the next by chance."""

    @abstractmethod
    def is_even(self, ranks: int, cores: int | None) -> bool:
        """Whether nothing differs by chance among so many ranks on so many shared cores."""

    @abstractmethod
    def effects(self, network: Network, simulated: np.ndarray, cores: int | None, seed: int, phase: str) -> Effects:
        """The effects on the `simulated` ranks (q,) of one phase."""

    @abstractmethod
    def least_carried_bytes(self, crossing: np.ndarray, lanes: int) -> np.ndarray:
        """Of bytes that must cross links between hosts, those carried by the end, where so many lanes send: (L,)."""
