"""Figures without the measurements that they were fitted to (analysis/published/fits.yaml).

Without a source, a factor on kernel rates is fitted again to the other sources of its clusters, if they have measured
that phase. All else becomes what it would be without any measurement like it, the prior: no other source has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np
import yaml

from sp_bench.point import resolve
from sp_bench.point.backing import Kind, kind_of
from sp_bench.point.choose import choose
from sp_bench.resources import conf_content, conf_files, place

FITS = place("analysis/published/fits.yaml")
ROUNDS = 3
"""How often a factor is fitted. Each round ends with times that are as much too long as too short, to first order."""

Point = tuple[Mapping[str, str], Mapping[str, Any]]
"""A measurement, and the config of its simulation."""


@cache
def fits() -> tuple[dict[str, Any], ...]:
    """The fits, as in fits.yaml."""
    return tuple(yaml.safe_load(FITS.read_text()))


class Simulated(NamedTuple):
    """The time and the bytes sent of a simulated point."""

    step_s: float
    kind: Kind


def simulation(config: Mapping[str, Any]) -> Simulated:
    """The simulation of a config; equal ones are simulated once."""
    return _simulation(json.dumps(_copy(config), sort_keys=True))


@cache
def _simulation(config: str) -> Simulated:
    request = resolve(json.loads(config))
    choice = choose(request)
    return Simulated(choice.total_s, kind_of(request, choice.plans.values()))


class LeftOut:
    """Configs of measured points without what was fitted to their own source."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = points
        """The measured points of all sources."""
        self._refitted: dict[tuple[int, str], float | None] = {}

    def without(self, row: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of a measurement without what was fitted to its source."""
        without_fit = _copy(config)
        for index, fit in enumerate(fits()):
            if not _concerns(fit, row, config):
                continue
            section = _section(without_fit, fit)
            if "cluster" in fit:
                section.clear()
                section.update(_section(_cluster(fit["cluster"]), fit))
            for path, value in fit.get("points", {}).items():
                *above, last = path.split(".")
                place = reduce(lambda at, key: at[key], above, section)
                assert last in place, f"{fit['key']}.{path} is in no file"
                place[last] = value
            for table, prior in fit.get("scale", {}).items():
                factor = self.refitted(index, table.partition("_")[0]) or 1.0
                section[table] = {tokens: rate * prior * factor for tokens, rate in section[table].items()}
        return without_fit

    def refitted(self, index: int, phase: str) -> float | None:
        """A factor on the prior rates of a phase of fit number `index`, from the other sources; None if none has it."""
        if (index, phase) not in self._refitted:
            self._refitted[index, phase] = self._refit(fits()[index], phase)
        return self._refitted[index, phase]

    def others(self, fit: Mapping[str, Any], phase: str) -> list[Point]:
        """The points of other sources on the clusters of a fit, which have measured the phase alone."""
        return [
            (row, config)
            for row, config in self.points
            if row["phase"] == phase
            and config["cluster"]["name"] in fit["clusters"]
            and fit["source"] not in row["source"]
        ]

    def _refit(self, fit: Mapping[str, Any], phase: str) -> float | None:
        others, factor = self.others(fit, phase), 1.0
        if not others:
            return None
        tables = {table: prior for table, prior in fit["scale"].items() if table.startswith(phase)}
        for _ in range(ROUNDS):
            ratios = []
            for row, config in others:
                scaled = _copy(config)
                section = _section(scaled, fit)
                for table, prior in tables.items():
                    section[table] = {tokens: rate * prior * factor for tokens, rate in section[table].items()}
                ratios.append(1e3 * simulation(scaled).step_s / float(row["measured_ms"]))
            factor *= float(np.median(ratios))
        return factor


def is_fitted(row: Mapping[str, str], config: Mapping[str, Any]) -> bool:
    """Whether anything of a measurement's simulation was fitted to its own source."""
    return any(_concerns(fit, row, config) for fit in fits())


def _concerns(fit: Mapping[str, Any], row: Mapping[str, str], config: Mapping[str, Any]) -> bool:
    return fit["source"] in row["source"] and config["cluster"]["name"] in fit["clusters"]


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(config))  # which makes the tokens of rates text, as the paths of fits have them


def _cluster(name: str) -> dict[str, Any]:
    """The config of a cluster of the suite's, as _copy has it."""
    files = conf_files("cluster")
    return _copy({"cluster": conf_content(files[name], files)})


def _section(config: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
    return reduce(lambda at, key: at[key], fit["key"].split("."), config["cluster"])
