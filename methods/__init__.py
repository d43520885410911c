"""One file for each method, and the registry of them."""

from __future__ import annotations

from collections.abc import Mapping

from methods.all_gather import AllGather
from methods.double_ring import DoubleRing
from methods.mesh import Mesh
from methods.pass_q import PassQ
from methods.reference import Reference
from methods.ring import Ring
from methods.startrail import StarTrail
from methods.striped import Striped
from methods.tokenring import TokenRing
from methods.ulysses import Ulysses
from methods.usp import USP
from methods.zigzag import Zigzag
from sp_bench.plan import Method, unknown

REGISTRY: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Reference, Ring, Striped, Zigzag, DoubleRing, PassQ, AllGather, TokenRing, Ulysses, USP, StarTrail, Mesh,
    )
}  # fmt: skip
"""Every method by its name. A new one is imported above and listed here."""


def build(name: str, options: Mapping[str, object]) -> Method:
    """The method of that name with these options. Raises RequestError with the nearest name for an unknown one."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    return REGISTRY[name].build(options)
