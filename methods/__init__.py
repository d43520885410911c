"""One file for each method, and the registry of them."""

from __future__ import annotations

from collections.abc import Mapping

from sp_bench.checkout import one_name
from sp_bench.methods.all_gather import AllGatherKV
from sp_bench.methods.burst_attention import BurstAttention
from sp_bench.methods.dcp import DCP
from sp_bench.methods.double_ring import DoubleRing
from sp_bench.methods.group_cast import GroupCastAttention
from sp_bench.methods.helix import Helix
from sp_bench.methods.hybrid_cp import HybridCP
from sp_bench.methods.loongtrain import LoongTrain
from sp_bench.methods.mesh_variants import Mesh
from sp_bench.methods.pass_q import PassQ
from sp_bench.methods.reference import Reference
from sp_bench.methods.ring import Ring
from sp_bench.methods.startrail import StarTrail
from sp_bench.methods.striped import Striped
from sp_bench.methods.tasp import TASP
from sp_bench.methods.tokenring import TokenRing
from sp_bench.methods.tree import Tree
from sp_bench.methods.ulysses import Ulysses
from sp_bench.methods.ulysses_all_gather import UlyssesAllGather
from sp_bench.methods.upipe import UPipe
from sp_bench.methods.usp import USP
from sp_bench.methods.zigzag import Zigzag
from sp_bench.plan import Method, unknown

one_name(__name__)

REGISTRY: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Reference, Ring, Striped, Zigzag, DoubleRing, BurstAttention, PassQ, AllGatherKV, TokenRing, Ulysses, UPipe,
        USP, LoongTrain, UlyssesAllGather, TASP, StarTrail, Mesh,
        GroupCastAttention, HybridCP,
        DCP, Helix, Tree,
    )
}  # fmt: skip
"""Every method by its name. A new one is imported above and listed here."""


def build(name: str, options: Mapping[str, object]) -> Method:
    """The method of that name with these options. Raises RequestError with the nearest name for an unknown one."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    return REGISTRY[name].build(options)
