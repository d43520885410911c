"""The interface of a method: layouts, forward and backward plans, the closed-form volume, and what it refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from typing import ClassVar, Literal, NamedTuple, Self
from weakref import WeakValueDictionary

from sp_bench.errors import impossible, unknown, unknown_key
from sp_bench.plan.assignments import ASSIGNMENTS, FOR_ANY
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.documents import Packed
from sp_bench.plan.fuse import fuse
from sp_bench.plan.groups import Grid, Group
from sp_bench.plan.layout import LAYOUTS, Layout
from sp_bench.plan.mask import Mask
from sp_bench.plan.ops import Plan
from sp_bench.plan.options import checked
from sp_bench.plan.padded_heads import PaddedHeads, padded_heads, splits
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Tensor

PHASES = ("forward", "backward")
OPEN_LAYOUTS = ("auto", "search")
"""Values of the option `layout` that name none: auto is the one that balances the mask, search the fastest one."""


class ScheduleTime(NamedTuple):
    """The time of a variant's schedule, and a lower bound on the time of all schedules of the same work, in seconds."""

    scheduled_s: float
    least_s: float


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """One sequence-parallel attention method. The fields of a subclass are its options."""

    name: ClassVar[str]
    colour: ClassVar[str] = ""
    """Its colour in every figure, #rrggbb. A method without one gets a free one."""
    marker: ClassVar[str] = ""
    """Its marker on lines, by matplotlib's name. A method without one gets a free one."""
    citation: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]
    """The names of the layouts that the method supports."""
    for_packs: ClassVar[str] = ""
    """The one of its `all_layouts` that layout=auto stands for where there is a pack; if empty, auto tries all."""
    formula: ClassVar[Mapping[str, str]]
    """By phase, the mean payload that a GPU sends, in chunks of N/n tokens x heads * head_dim elements: an expression
    in n, h = heads, k = kv_heads / heads and the method's `symbols`."""
    counts_rows: ClassVar[bool] = False
    """Whether the closed form holds under packs of documents, too."""
    by_blocks: ClassVar[bool] = False
    """Whether every pair of chunks is a block of its own, where no option joins some (`blocks_are_pairs`)."""
    folds_arrivals: ClassVar[bool] = False
    """Whether, where that is so, each partial sum that comes to a rank is folded into the rank's own by itself."""
    plans_by_size: ClassVar[bool] = False
    """Whether plans depend on how large the largest chunks are."""
    plans_by_rows: ClassVar[bool] = False
    """Whether its plans depend on which rows the chunks of a pack see of each other, and not on sizes alone."""
    takes_caches: ClassVar[bool] = False
    """Whether it leaves keys where they are, so that it can be used for a decode step (plan.caches)."""
    limit: ClassVar[str] = "any number"
    """The most GPUs that it can use, in words."""

    layout: str = "auto"
    """The layout's name; auto is the layout that balances the mask, search stands for every one of `all_layouts`."""
    fuse: bool = False
    """Whether blocks that are ready together are one operation where the mask allows (plan.fuse)."""

    @classmethod
    @cache
    def options(cls) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(f.name for f in fields(cls))

    @property
    def blocks_are_pairs(self) -> bool:
        """Whether every pair of chunks is a block of its own: ranks then compute at least what these blocks take,
        whatever the plan is.
        """
        return self.by_blocks and not self.fuse

    @classmethod
    def all_layouts(cls) -> tuple[str, ...]:
        """The layouts that it supports, with those of documents (ASSIGNMENTS) where it takes any layout."""
        return (*cls.layouts, *(FOR_ANY if set(cls.layouts) == set(LAYOUTS) else ()))

    @classmethod
    def layouts_for_auto(cls) -> tuple[str, ...]:
        """Those of its `all_layouts` that layout=auto tries on a pack: its own for packs, or all."""
        return (cls.for_packs,) if cls.for_packs else cls.all_layouts()

    @classmethod
    def build(cls, options: Mapping[str, object]) -> Self:
        """The method with these options. Raises RequestError for an unknown option, naming the nearest one."""
        for key in options:
            if key not in cls.options():
                raise unknown_key(f"method.{key}", [f"method.{name}" for name in cls.options()])
        return cls(**options)  # pyright: ignore[reportArgumentType]  # __post_init__ checks them

    def __post_init__(self) -> None:
        for name in self.options():
            value = getattr(self, name)
            if (right := checked(type(self), name, value)) is not value:
                object.__setattr__(self, name, right)
        if self.layout not in (*self.all_layouts(), *OPEN_LAYOUTS):
            if self.layout not in (*LAYOUTS, *ASSIGNMENTS):
                raise unknown("method.layout", str(self.layout), [*LAYOUTS, *ASSIGNMENTS, *OPEN_LAYOUTS])
            rule = f"{self.name} is not defined on that layout"
            raise impossible(f"method.layout={self.layout}", rule, self.layouts)

    def refuse(self, problem: Problem) -> None:  # noqa: B027  # most methods take any problem
        """Raise RequestError for a problem that the method can't do; the message says what would work."""

    def carried(self, problem: Problem) -> tuple[Method, ...]:
        """The method in each form of its transfers that its options stand for."""
        return (self,)

    def candidates(self, problem: Problem) -> tuple[Method, ...]:
        """The concrete variants that `auto` options stand for; only this method if no option is auto."""
        self.refuse(problem)
        return (self,)

    def on_nodes(self, problem: Problem, gpus_per_node: int) -> tuple[Method, ...]:
        """`candidates`, on a cluster that has so many consecutive ranks on each node."""
        return self.candidates(problem)

    def leaner(self) -> tuple[Method, ...]:
        """The same method in forms that hold less memory, and may take longer."""
        return ()

    def tile_shape(self, n: int) -> tuple[int, int] | None:
        """The sides (a, b) of the tile of the assignment matrix that a rank computes; None if it is no tile."""
        return None

    def homes(self, problem: Problem, phase: str) -> tuple[Group | Grid, Group | Grid]:
        """The ranks whose queries, and those whose keys, a rank computes, every pair of them, where blocks are pairs: a
        row of the assignment matrix if the method doesn't say otherwise.
        """
        u = problem.layout.head_parallel
        return Group(u, 1), Group(u, problem.n // u)

    def partials_folded(self, problem: Problem, phase: str, tensor: Tensor) -> float | Fraction:
        """How many partial sums of a tensor come to a rank and are folded by themselves, where blocks are pairs: in the
        mean over ranks, for each slice of the heads. With a tile, each chunk of its rows or columns comes back from all
        ranks of its group but one.
        """
        if not self.folds_arrivals:
            return 0
        tile = self.tile_shape(problem.n)
        return tile[tensor.of_keys] - 1 if tile else self.chunks_sent(problem, phase).get(tensor, 0)

    def variant(self, n: int) -> str:
        """The difference to the method's other variants, in a few words; empty if there are no others."""
        shape = self.tile_shape(n)
        return f"{shape[0]}x{shape[1]}" if shape else ""

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of the names in `formula` other than n, k and h."""
        return {}

    def head_parallel(self, n: int) -> int:
        """The head-parallel degree on n ranks: how many consecutive ranks split the heads of a layout chunk."""
        return 1

    def head_slices(self, problem: Problem) -> int:
        """How many slices of the heads are computed one after another."""
        return 1

    def query_parts(self, problem: Problem) -> int:
        """How many slices of the query heads share a slice of the key heads (Problem.query_parts)."""
        return 1

    def padded(self, problem: Problem) -> PaddedHeads | None:
        """The padded heads that this variant computes; None if it adds none."""
        return None

    def layout_of(self, mask: Mask, n: int) -> Layout:
        """The layout that this method has on n ranks, before its heads are split."""
        if self.layout == "auto" and self.for_packs and not mask.sends_unseen:
            return mask.layout(self.for_packs, n)
        return mask.layout("auto" if self.layout in OPEN_LAYOUTS else self.layout, n, self.all_layouts())

    def layout_for(self, layout: Layout, n: int) -> Layout:
        """The layout with this variant's head-parallel degree."""
        return replace(layout, head_parallel=self.head_parallel(n))

    def assigned(self, problem: Problem) -> Problem:
        """The problem with this variant's head-parallel degree, padded heads and slices, which its plans are for."""
        layout, padded = self.layout_for(problem.layout, problem.n), self.padded(problem)
        slices, parts = self.head_slices(problem), self.query_parts(problem)
        return replace(problem, layout=layout, head_slices=slices, query_parts=parts, padded=padded)

    @property
    def sends_as(self) -> Method:
        """The variant that sends the same bytes over the same links in as many hops: this one, or another that stands
        for all of them.
        """
        return self

    def schedule_time(self, problem: Problem, phase: str, costs: CostProfile) -> ScheduleTime | None:
        """The time of a phase's schedule by these costs, beside a certified bound; None if it has no such bound."""
        return None

    def plan(self, problem: Problem, phase: str, costs: CostProfile) -> Plan:
        """The plan of one phase, for the assigned problem. `costs` are for blocks with all heads, not one slice.

        Packs of as many tokens that are assigned alike share it: users plan each batch.
        """
        problem = self.assigned(problem)
        if not isinstance(problem.mask, Packed) or self.fuse or self.plans_by_rows:
            return self._made(problem, phase, costs)
        size = problem.largest_chunks if self.plans_by_size else ()
        key = self, phase, costs, *problem.but_for_documents, size
        if (shared := _OF_PACKS.get(key)) is None:
            _OF_PACKS[key] = shared = self._made(problem, phase, costs)
        return shared

    def _made(self, problem: Problem, phase: str, costs: CostProfile) -> Plan:
        costs = costs.of_a_slice(problem)
        plan = self.forward(problem, costs) if phase == "forward" else self.backward(problem, costs)
        return (fuse(plan, problem) if self.fuse else plan).shared()

    @abstractmethod
    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The forward plan, q#0, kv#0 -> o#0 or out#0, of an assigned problem; `costs` are those of its blocks."""

    @abstractmethod
    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The backward plan of an assigned problem: odoq#0 (do#0 if the rest was kept), kv#0 -> dq#0, dkv#0."""

    @abstractmethod
    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The closed form: the mean number of whole chunks of each tensor that a GPU sends."""

    def bytes_sent(self, problem: Problem, phase: str) -> float:
        """The closed form in bytes per GPU, statistics included."""
        problem = self.assigned(problem)
        sent = self.chunks_sent(problem, phase)
        return float(sum(count * problem.mean_wire_bytes(tensor) for tensor, count in sent.items()))


_OF_PACKS: WeakValueDictionary[Hashable, Plan] = WeakValueDictionary()
"""The plans of packs that are in use."""


@dataclass(frozen=True, kw_only=True)
class CollectiveMethod(Method):
    """A method with collectives, which can be the library's or made of messages."""

    collectives: Literal["auto", "library", "messages"] = "auto"
    """library: NCCL's or gloo's own; messages: point-to-point; auto: the library's, but for gathers and reductions
    under a pack of documents, where messages leave out what nobody needs: a point takes the faster form there
    (`carried`). Points on gloo take auto for messages."""

    gathers: ClassVar[bool] = False
    """Whether it has gathers or reductions: auto then stands for both forms under a pack, where it is to be chosen."""

    def carried(self, problem: Problem) -> tuple[Self, ...]:
        """The method in each form that `collectives` stands for: messages that leave out what nobody needs may be
        slower than the library's rings over all NICs of a node.
        """
        if not self.gathers or self.collectives != "auto" or self.by_library(problem):
            return (self,)
        return tuple(replace(self, collectives=form) for form in ("messages", "library"))

    def by_library(self, problem: Problem) -> bool:
        """Whether gathers and reductions are the library's."""
        return self.collectives == "library" or (self.collectives == "auto" and problem.mask.sends_unseen)

    def padding(self, problem: Problem, tensor: Tensor) -> Fraction:
        """The longest chunk of a tensor over the mean one, as the pieces of the library's collectives are equal."""
        if not self.by_library(problem):
            return Fraction(1)
        return problem.chunk_bytes(tensor, wire=True) / problem.mean_wire_bytes(tensor)


@dataclass(frozen=True, kw_only=True)
class SplitsHeads(Method):
    """A method whose ranks split the heads, in groups of its head-parallel degree (`head_parallel`)."""

    pad_heads: bool = False
    """Whether degrees that don't divide the heads work, with heads of zeros that are computed and sent as others are
    (plan.padded_heads)."""

    def degrees(self, problem: Problem) -> list[int]:
        """Every degree that is possible, ascending: those that split heads and key heads evenly; padded, up to one for
        each head.
        """
        return [u for u in range(1, problem.heads + 1) if self._splits(problem, u)]

    def degree_rule(self, problem: Problem) -> str:
        """The rule for a possible degree, in words that follow "must divide gpus=8 and"."""
        if self.pad_heads:
            return f"be at most heads={problem.heads}"
        return f"heads={problem.heads}, and divide kv_heads={problem.kv_heads} or be a multiple of them"

    def if_padded(self, problem: Problem, degree: object) -> str:
        """The words that offer padded heads for a degree that is refused without them, to follow what would work."""
        if self.pad_heads or type(degree) is not int or not 1 <= degree <= problem.heads or problem.n % degree:
            return ""
        return ", or method.pad_heads=true"

    def padded(self, problem: Problem) -> PaddedHeads | None:
        """The padded heads of this variant's degree; None if that splits the true ones evenly."""
        if not self.pad_heads:
            return None
        u = self.head_parallel(problem.n)
        return padded_heads(problem.heads, problem.kv_heads, u, problem.n // u)

    def _splits(self, problem: Problem, degree: int) -> bool:
        return self.pad_heads or splits(problem.heads, problem.kv_heads, degree)


@dataclass(frozen=True, kw_only=True)
class Sized(Method):
    """A method with a size option. If it is auto, every possible size is a variant."""

    size_option: ClassVar[str]
    """The name of the size option."""

    @abstractmethod
    def sizes(self, problem: Problem) -> list[int]:
        """All possible sizes, ascending."""

    @abstractmethod
    def size_rule(self, problem: Problem) -> str:
        """The rule for a possible size, in words that follow "must"."""

    @property
    def size(self) -> int:
        """The size of this variant."""
        size = getattr(self, self.size_option)
        assert isinstance(size, int), "a caller picks one of the candidates first"
        return size

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a size that is not possible."""
        size, sizes = getattr(self, self.size_option), self.sizes(problem)
        if size != "auto" and (type(size) is not int or size not in sizes):
            rule, or_else = f"must be auto or {self.size_rule(problem)}", self.or_else(problem, size)
            raise impossible(f"method.{self.size_option}={size}", rule, sizes, or_else)

    def or_else(self, problem: Problem, size: object) -> str:
        """Words that follow the possible sizes: what else would make this one possible. Empty if there is nothing."""
        return ""

    def candidates(self, problem: Problem) -> tuple[Self, ...]:
        """One variant for each possible size, or for the size given."""
        self.refuse(problem)
        size = getattr(self, self.size_option)
        sizes = self.sizes(problem) if size == "auto" else [size]
        return tuple(replace(self, **{self.size_option: each}) for each in sizes)
