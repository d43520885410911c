"""Stragglers of a cluster: slow ranks, slow links, and noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import Meta, structs

from sp_bench.cluster.topology import Network
from sp_bench.errors import RequestError, unknown
from sp_bench.reading import NotNegative, Positive, Section, read

Factors = dict[Annotated[int, Meta(ge=0, description="the number of a rank or link", examples=[0])], Positive]


class StragglerSection(Section, frozen=True, kw_only=True):
    """The section `stragglers` of a config."""

    ranks: Factors = msgspec.field(default_factory=dict)
    """{rank: factor on its compute time}."""
    links: dict[str, Factors] = msgspec.field(default_factory=dict)
    """{link class (port, nic, ...): {number in the class: factor on its rate}}, in both directions."""
    jitter: NotNegative = 0.0
    """Relative standard deviation of the time of each run of blocks and of each latency: log-normal, mean unchanged."""


class Stragglers(StragglerSection, frozen=True, kw_only=True):
    """Slow ranks, slow links and noise; by default there are none."""

    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.ranks or self.links or self.jitter)

    @classmethod
    def build(cls, config: Any, seed: int) -> Self:
        """The stragglers of a config section. Raises RequestError for an invalid key or value."""
        section = read(StragglerSection, config or {}, "stragglers")
        return cls(**structs.asdict(section), seed=seed)

    def slow_ranks(self, n: int) -> np.ndarray:
        """The factor on each rank's compute time: (n,). Raises RequestError for a rank that doesn't exist."""
        factors = np.ones(n)
        for rank, factor in self.ranks.items():
            if rank >= n:
                raise RequestError(f"stragglers.ranks.{rank}", f"there are {n} ranks", f"0 to {n - 1} would work")
            factors[rank] = factor
        return factors

    def slow_links(self, network: Network) -> Network:
        """The network with slow links. Raises RequestError for a class or number that doesn't exist."""
        rates = network.link_bytes_per_s.copy()
        names = list(network.first_link)
        for name, entries in self.links.items():
            both = [whole for whole in names if whole.split()[0] == name]
            if not both:
                raise unknown("stragglers.links", name, sorted({whole.split()[0] for whole in names}))
            for whole in both:
                links = np.flatnonzero(network.link_class == names.index(whole))
                for index, share in entries.items():
                    if index >= links.size:
                        key, rule = f"stragglers.links.{name}.{index}", f"there are {links.size} of them"
                        raise RequestError(key, rule, f"0 to {links.size - 1} would work")
                    rates[links[index]] *= share
        return replace(network, link_bytes_per_s=rates)

    def as_record(self) -> dict[str, Any] | None:
        """The stragglers as a record has them; None if there are none."""
        return msgspec.to_builtins(self, str_keys=True) if self else None
