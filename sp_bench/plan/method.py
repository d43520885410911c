"""What every method is: a layout, a forward plan, a backward plan, a closed form, and what it refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import ClassVar, Self

from sp_bench.errors import RequestError, unknown, unknown_key
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.layout import LAYOUTS, Layout
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem

PHASES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """One sequence-parallel attention method with its options, as fields of the subclass."""

    name: ClassVar[str]
    citation: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]
    """The layouts that the method can be exact and useful on."""
    formula: ClassVar[Mapping[str, str]]
    """Payload that a GPU sends in each phase, on average, as an expression in n, h = heads, k = kv_heads / heads and
    the method's own numbers (`symbols`); in chunks of N/n tokens x heads * head_dim elements."""
    limit: ClassVar[str] = "any number"
    """How many GPUs it can use."""

    layout: str = "auto"
    """The layout's name; auto is the one that balances the mask."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def build(cls, options: Mapping[str, object]) -> Self:
        """The method with these options. Raises RequestError with the nearest name for an unknown one."""
        for key in options:
            if key not in cls.options():
                raise unknown_key(f"method.{key}", [f"method.{name}" for name in cls.options()])
        return cls(**options)  # pyright: ignore[reportArgumentType]  # each subclass checks its values

    def __post_init__(self) -> None:
        if self.layout not in (*self.layouts, "auto"):
            if self.layout not in LAYOUTS:
                raise unknown("method.layout", str(self.layout), [*LAYOUTS, "auto"])
            raise RequestError(
                f"method.layout={self.layout}",
                f"{self.name} is not defined on that layout",
                f"one of {', '.join(self.layouts)} would work",
            )

    def refuse(self, problem: Problem) -> None:  # noqa: B027  # most methods take any problem
        """Raise RequestError for a problem that the method can't do, with what it could do."""

    def candidates(self, problem: Problem) -> tuple[Method, ...]:
        """The concrete variants that an `auto` among the options stands for; itself alone if there is none."""
        self.refuse(problem)
        return (self,)

    def tile_shape(self, n: int) -> tuple[int, int] | None:
        """The a x b tile of the assignment matrix that a rank computes, where the method has one."""
        return None

    def variant(self, n: int) -> str:
        """What tells this variant from the method's others, in a few words; empty where there are none."""
        shape = self.tile_shape(n)
        return f"{shape[0]}x{shape[1]}" if shape else ""

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of the names in `formula`, beside n, k and h = heads."""
        return {}

    def head_parallel(self, n: int) -> int:
        """The head-parallel degree on n ranks: how many consecutive ones split the heads of a chunk of the layout."""
        return 1

    def head_slices(self, problem: Problem) -> int:
        """In how many slices the heads are taken, one after the other."""
        return 1

    def dealt_by(self, layout: Layout, n: int) -> Layout:
        """The layout as this variant deals the tokens out."""
        return replace(layout, head_parallel=self.head_parallel(n))

    def dealt(self, problem: Problem) -> Problem:
        """The problem as this variant deals it out: what its plans are for."""
        layout = self.dealt_by(problem.layout, problem.n)
        return replace(problem, layout=layout, head_slices=self.head_slices(problem))

    def plan(self, problem: Problem, phase: str, costs: CostProfile) -> Plan:
        """The plan of one phase, for the problem as dealt. `costs` are those of whole blocks, with all heads."""
        problem = self.dealt(problem)
        costs = costs.of_a_slice(problem)
        return self.forward(problem, costs) if phase == "forward" else self.backward(problem, costs)

    @abstractmethod
    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """q#0, kv#0 -> o#0 or out#0, on the problem as dealt and with what its blocks cost."""

    @abstractmethod
    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """odoq#0 (or do#0 where the rest was kept), kv#0 -> dq#0, dkv#0, on the problem as dealt."""

    @abstractmethod
    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float | Fraction]:
        """The closed form: how many chunks of each tensor a GPU sends, on average; a whole chunk of the tensor each."""

    def bytes_sent(self, problem: Problem, phase: str) -> float:
        """The closed form in bytes for each GPU, statistics included."""
        problem = self.dealt(problem)
        sent = self.chunks_sent(problem, phase)
        return float(sum(count * problem.mean_wire_bytes(tensor) for tensor, count in sent.items()))


@dataclass(frozen=True, kw_only=True)
class Sized(Method):
    """A method with one size among its options; where that is auto, every possible size is a variant."""

    size_option: ClassVar[str]
    """The option's name."""

    @abstractmethod
    def sizes(self, problem: Problem) -> list[int]:
        """Every size that is possible."""

    @abstractmethod
    def size_rule(self, problem: Problem) -> str:
        """What a size must do to be possible, in words that follow "must"."""

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
            raise RequestError(
                f"method.{self.size_option}={size}",
                f"must be auto or {self.size_rule(problem)}",
                f"one of {', '.join(map(str, sizes))} would work",
            )

    def candidates(self, problem: Problem) -> tuple[Self, ...]:
        """One for each size."""
        self.refuse(problem)
        size = getattr(self, self.size_option)
        sizes = self.sizes(problem) if size == "auto" else [size]
        return tuple(replace(self, **{self.size_option: each}) for each in sizes)
