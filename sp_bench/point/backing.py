"""The validation that backs a simulated point: how far others' published measurements are from simulations like it.

backing.json, which `python -m sp_bench.validate published` writes, has a row for each kind of points: the workload, the
mask's class, what plans send and what they send it over. A row backs a point of its kind on a cluster with the figures
of one of its own clusters, whatever its name, and with the kernel and the implementation that were measured, or with
ours where that is simulated to take as long. Where no row does, the point has no interval. `validated` alone says so,
and records keep what it says: nothing else decides whether there is an interval.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from sp_bench.cluster import Cluster
from sp_bench.cluster.cluster import ClusterSection
from sp_bench.cluster.implementation import OURS, Implementation
from sp_bench.cluster.tiers import FullMesh, PcieTree, Torus
from sp_bench.lower import DEFAULT_TRANSPORT
from sp_bench.plan.documents import Documents
from sp_bench.plan.groups import is_shared
from sp_bench.plan.mask import WHOLE
from sp_bench.plan.memo import keep
from sp_bench.plan.ops import AllToAll, Plan, RowCollective
from sp_bench.plan.transfers import peers
from sp_bench.point.choose import TooSlowError, simulated
from sp_bench.point.request import Request
from sp_bench.point.variant_bounds import MANY_RANKS, by_bound
from sp_bench.point.variants import FUSED, Choice
from sp_bench.reading import read
from sp_bench.records.identity import digest
from sp_bench.records.interval import Interval
from sp_bench.resources import conf_content, conf_files
from sp_bench.workload.attention import Attention

FILE = Path(__file__).with_name("backing.json")
BETWEEN_NODES = "several nodes"
TELLING = 0.03
"""Times that differ by less are not told apart: repetitions of published measurements differ as much."""
MUCH = 0.1
"""A step of many ranks whose lower bound is shorter than ours by more than this isn't simulated to see whether it
takes as long nevertheless."""
ALL_TO_ALLS, CAST = "all-to-alls", "rows cast"
PACKS = f"mask={Documents.name}"
"""The mask's class of packed documents without a window."""
OF_NO_TIME = ("peak_tflops", "memory_bytes", "caches")
"""Figures of a device that change no simulated time of what is measured: there are no decode steps among that."""
OF_PACKS = ("variable", "variable_least_s", "variable_block_s")
"""Figures of a table of rates that change the times of calls for variable lengths alone: those of packs."""
FEW = 64
"""How many hashes of figures are kept."""
_HASHES: dict[tuple[str, bool, bool, str], str] = {}


class Kind(NamedTuple):
    """The properties that points share whose simulations are about as far off."""

    workload: str
    mask: str
    """The mask's class (Mask.measured_as)."""
    transfers: str
    links: str

    def __str__(self) -> str:
        step = "" if self.workload == Attention.name else f"whole steps of workload={self.workload}, "
        mask = "" if self.mask == WHOLE else f"{self.mask}, "
        return f"{step}{mask}{self.transfers.replace('KV passed on and Q and', 'KV, Q and')} over {self.links}"


class Backing(NamedTuple):
    """Errors of simulated times against published ones, of one kind of points."""

    kind: Kind
    median: float
    """The median of |simulated / measured - 1|, without what was fitted to the source of the measurement."""
    two_of_three: float
    """The error that two of three are within."""
    points: int
    implementation: str
    """The implementation that was measured, a name of conf/implementation."""
    clusters: Mapping[str, str | None]
    """The clusters that were measured, with their figures (figures_of); None where those are not in conf/cluster."""

    @classmethod
    def of(cls, kind: Kind, errors: Any, implementation: str, clusters: Mapping[str, str | None]) -> Self:
        """The backing by the errors, simulated / measured - 1, of the points of a kind."""
        off = np.abs(np.asarray(errors, float))
        median, two_of_three = (round(float(np.quantile(off, part)), 4) for part in (0.5, 2 / 3))
        return cls(kind, median, two_of_three, off.size, implementation, clusters)

    def words(self, *more: str) -> str:
        """The measurements and how far off their simulations were, with what else is to be said."""
        where = "; ".join([", ".join(self.clusters), *more])
        return f"{self.kind}: median {self.median:.1%}, n={self.points} ({where})"


@dataclass(frozen=True)
class Validation:
    """The validation of a simulated point, as a record has it."""

    kind: Kind
    backing: Backing | None
    why_not: str = ""
    """Why nothing backs it, in words."""
    apart: float = 0.0
    """How far the step is from the one simulated with the implementation that was measured, as a share of it."""

    @property
    def words(self) -> str:
        """The field `validation`."""
        if not self.backing:
            return f"not validated ({self.why_not})"
        theirs = [f"public code, {self.apart:.1%} apart"] if self.apart else []
        return self.backing.words(*theirs)

    @property
    def error(self) -> float | None:
        """The error that two of three are within, and the step's distance from measurements; None without backing."""
        return self.backing.two_of_three + self.apart if self.backing else None

    def around(self, step_ms: float) -> Interval:
        """The interval of a step. An error of 1 or more leaves it none: measured times have no upper end then."""
        if self.error is None or self.error >= 1:
            return Interval(None, step_ms, None)
        return Interval(step_ms / (1 + self.error), step_ms, step_ms / (1 - self.error))

    def setup(self) -> dict[str, Any]:
        """The record's fields of Setup."""
        return {"validation": self.words, "validation_kind": self.kind._asdict(), "validation_error": self.error}

    def ends(self, step_ms: float) -> dict[str, float | None]:
        """The record's fields of Timing."""
        interval = self.around(step_ms)
        return {"step_ms_validated_low": interval.low_ms, "step_ms_validated_high": interval.high_ms}


def transfers_of(plans: Iterable[Plan], *, of_packs: bool = False) -> str:
    """The transfers of plans between ranks, in words: all-to-alls, KV or Q and outputs from rank to rank, or nothing.

    Casts of rows are kinds of their own where they are few: under packs. Those of queries are not those of keys.
    """
    kinds = set()
    for _, op in (each for plan in plans for each in plan.transfers):
        if not any(is_shared(group) for group, _ in peers(op)):
            continue
        passed = "KV passed on" if op.tensor.of_keys else "Q and outputs passed on"
        if of_packs and isinstance(op, RowCollective):
            passed = CAST if op.tensor.of_keys else "rows of Q and outputs cast"
        kinds.add(ALL_TO_ALLS if isinstance(op, AllToAll) else passed)
    return " and ".join(sorted(kinds)) or "no transfers"


def links_of(cluster: Cluster, gpus: int) -> str:
    """The links that a cluster's transfers cross, in words."""
    intra = cluster.topology.intra
    if cluster.hosts:
        return "emulated hosts"
    if cluster.cores is not None:
        return "cores of a CPU"
    if cluster.nodes(gpus) > 1:
        return BETWEEN_NODES
    return "PCIe" if isinstance(intra, PcieTree) else "cables" if isinstance(intra, FullMesh | Torus) else "NVLink"


@cache
def known() -> list[Backing]:
    """The rows of backing.json, one for each implementation that points of a kind were measured with."""
    return [Backing(Kind(**row.pop("kind")), **row) for row in json.loads(FILE.read_text())] if FILE.exists() else []


def row_of(kind: Kind, asked: Implementation = OURS) -> Backing | None:
    """The row of a kind, measured with the implementation that is asked for if there is one; None if there is none."""
    rows = [row for row in known() if row.kind == kind]
    return next((row for row in rows if implementation_named(row.implementation) == asked), rows[0] if rows else None)


def written(rows: Iterable[Backing]) -> str:
    """The content of backing.json."""
    return json.dumps([{**row._asdict(), "kind": row.kind._asdict()} for row in rows], indent=1) + "\n"


def kind_of(request: Request, plans: Iterable[Plan]) -> Kind:
    """The kind of a request's point with these plans."""
    plans = list(plans)
    links = links_of(request.cluster, plans[0].n * request.workload.groups)
    mask = request.problem.measured_as
    if request.workload.in_one_layout:
        every = request.workload.attentions(request.problem)
        mask = " and ".join(dict.fromkeys(each.measured_as for each in every))
    return Kind(request.workload.name, mask, transfers_of(plans, of_packs=mask == PACKS), links)


def figures_of(config: Mapping[str, Any], kind: Kind, *kernels: str) -> list[str]:
    """A hash of what the times of points of a kind depend on, of the section `cluster` of a config, with each of some
    kernels.

    Neither the cluster's name nor where its figures are from is part of it. What connects nodes is, where there are
    several. `kernels` are the kernel figures that are simulated with (Device.figures).
    """
    text, between_nodes, of_packs = repr(config), kind.links == BETWEEN_NODES, kind.mask == PACKS

    def of(kernel: str) -> str:
        key = text, between_nodes, of_packs, kernel
        if key in _HASHES:
            return _HASHES[key]
        figures = _figures(config, between_nodes=between_nodes, of_packs=of_packs)
        return keep(_HASHES, key, digest({"kernel": kernel, **figures}), FEW)

    return [of(kernel) for kernel in kernels]


def _figures(config: Mapping[str, Any], *, between_nodes: bool, of_packs: bool) -> dict[str, Any]:
    """All that figures_of hashes but the kernel, of points between nodes or within one, of packs or of other masks."""
    section = msgspec.to_builtins(read(ClusterSection, config, "cluster"), str_keys=True)
    names = ("cores", "gpus_per_node", "intra", "lab", "hosts")
    names += ("inter", "fabric", "placement") if between_nodes else ()
    device = {key: value for key, value in section["device"].items() if key not in ("name", *OF_NO_TIME)}
    # Nor are there values narrower than keys, which some tables are for.
    tables = [(name, table) for name, table in section["device"]["rates"].items() if not table["v_head_dim"]]
    without = ("v_head_dim", *(() if of_packs else OF_PACKS))
    device["rates"] = {name: {k: v for k, v in table.items() if k not in without} for name, table in tables}
    return {"device": device, **{name: section[name] for name in names}}


def validated(request: Request, choice: Choice) -> Validation:
    """The validation of the simulated step of a variant of a request's method."""
    kind = kind_of(request, choice.plans.values())
    device = request.cluster.device
    row = row_of(kind, device.implementation)
    if row is None:
        return Validation(kind, None, str(kind))
    if request.cluster.stragglers:
        return Validation(kind, None, f"measurements of {kind} have no stragglers")
    if request.asked().sinks:
        return Validation(kind, None, f"measurements of {kind} have no sinks")
    if request.cluster.transport_options != DEFAULT_TRANSPORT:
        return Validation(kind, None, f"measurements of {kind} are of the default transport")
    if choice.problem.padded:
        return Validation(kind, None, f"measurements of {kind} have no padded heads")
    sliced = choice.problem.head_slices > 1 and ALL_TO_ALLS in kind.transfers
    if sliced and CAST not in kind.transfers:  # measured group casts stand for those that take slices by themselves
        return Validation(kind, None, f"measurements of {kind} exchange all heads at once")
    if FUSED in choice.variant.split():
        return Validation(kind, None, f"measurements of {kind} have no fused blocks")
    (figures,) = figures_of(request.config["cluster"], kind, device.figures(choice.problem))
    if figures not in row.clusters.values():
        return Validation(kind, None, f"measurements of {kind} are of {_measured_on(request, choice, row)}")
    return _with_implementation(request.cluster, choice, row)


def _measured_on(request: Request, choice: Choice, row: Backing) -> str:
    """The kernel, or the clusters, that were measured in place of a choice whose figures are others, in words."""
    device, kind = request.cluster.device, row.kind
    others = device.other_figures(choice.problem)
    hashes = figures_of(request.config["cluster"], kind, *(figures for _, figures in others))
    for (kernel, _), figures in zip(others, hashes, strict=True):
        if figures in row.clusters.values():
            return f"kernel={kernel}"
    return f"{', '.join(row.clusters)}, whose figures are others"


def _with_implementation(cluster: Cluster, choice: Choice, row: Backing) -> Validation:
    """The part of a row's backing that holds for a step of another implementation than the measured one.

    Ours stands for measured code where the plans take as long with that: what nobody has measured is then below what
    repetitions differ by.
    """
    asked, measured = cluster.device.implementation, implementation_named(row.implementation)
    if asked == measured:
        return Validation(row.kind, row)
    why = f"measurements of {row.kind} are of implementation={row.implementation}"
    if asked != OURS:
        return Validation(row.kind, None, why)

    def unlike(which: str, seconds: float) -> Validation:
        """No backing, as measured code takes another time than ours."""
        return Validation(row.kind, None, f"{why}, which {which} {1e3 * seconds:.4g} ms")

    other_cluster = replace(cluster, device=cluster.device.used_by(measured))
    whole = measured.sends_whole_chunks and not choice.problem.mask.sends_unseen  # of other masks all chunks are
    as_theirs = replace(choice, problem=replace(choice.problem, whole_chunks=whole))
    most_s = (1 + TELLING) * max(choice.total_s, choice.nearly_s)
    asked_for = [(as_theirs.method, as_theirs.problem, as_theirs.plans)]
    ((bounds_s, _),) = by_bound(other_cluster, asked_for, [], estimates=True, most_s=most_s)
    bound_s = sum(bounds_s.values())
    if bound_s > most_s:
        return unlike("takes at least", bound_s)
    if choice.problem.n >= MANY_RANKS and bound_s < (1 - MUCH) * min(choice.total_s, choice.nearly_s):
        return unlike("may take as little as", bound_s)
    try:
        theirs = simulated(as_theirs, other_cluster, bounds_s, most_s, nearly_alike=True)
    except TooSlowError as error:
        return unlike("takes at least", error.least_s)
    same = all(theirs.runs[phase].graph.exact == run.graph.exact for phase, run in choice.runs.items())
    step_s, ours_s = theirs.total_s, choice.total_s if same else choice.nearly_s
    apart = abs(step_s / ours_s - 1)
    if apart > TELLING:
        return unlike("is simulated to take", step_s)
    return Validation(row.kind, row, apart=apart)


@cache
def implementation_named(name: str) -> Implementation:
    """The implementation of a file of conf/implementation."""
    files = conf_files("implementation")
    return read(Implementation, conf_content(files[name], files), "implementation")
