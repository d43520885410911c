"""One file for each method, and the registry of them."""

from __future__ import annotations

from collections.abc import Mapping

from methods.mesh import Mesh
from methods.ring import Ring
from sp_bench.errors import unknown
from sp_bench.plan import Method

REGISTRY: dict[str, type[Method]] = {method.name: method for method in (Ring, Mesh)}
"""Every method by its name. A new one is imported above and listed here."""


def build(name: str, options: Mapping[str, object]) -> Method:
    """The method of that name with these options. Raises RequestError with the nearest name for an unknown one."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    return REGISTRY[name].build(options)
