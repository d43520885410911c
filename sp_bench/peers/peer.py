"""What every peer is: a package's own attention, the layout that it wants, its options, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.mask import CAUSAL, Mask
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
    """This rank's q (B, S, H, D), k and v (B, S, kv_heads, D), S = seqlen / n -> out (B, S, H, D), differentiable."""

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Peer(ABC):
    """One package with its options, as fields of the subclass. Read without torch; `attention` needs a rank.

    It stands where a Method does in a request, but has no plan: it can be measured, and not simulated.
    """

    name: ClassVar[str]
    """As `impl` has it."""
    distribution: ClassVar[str]
    """What pip calls it."""
    module: ClassVar[str]
    """What is imported."""
    algorithms: ClassVar[tuple[str, ...]]
    """The first is what `auto` stands for, unless a subclass knows better."""

    mask: Mask
    algorithm: str = AUTO
    layout: str = AUTO
    """The name of one of our layouts: the one that the algorithm wants."""

    @classmethod
    def build(cls, options: Mapping[str, Any], *, mask: Mask) -> Self:
        """The peer with these options; those that it doesn't have must be left at auto.

        Raises RequestError for any other, for a bad value, and for a package that is not installed.
        """
        own = {f.name: options[f.name] for f in fields(cls) if f.name in options}
        for key, value in options.items():
            if key not in own and value != AUTO:
                raise RequestError(
                    f"method.{key}={value}", f"impl={cls.name} has no such option", f"method.{key}={AUTO} would work"
                )
        peer = cls(mask=mask, **own)
        peer.refuse_absence()
        return peer

    def __post_init__(self) -> None:
        if self.algorithm not in (*self.algorithms, AUTO):
            raise unknown("method.algorithm", str(self.algorithm), [*self.algorithms, AUTO])
        if self.algorithm == AUTO:
            object.__setattr__(self, "algorithm", self.preferred())
        wanted = self.wanted_layout()
        if self.layout not in (wanted, AUTO):
            raise RequestError(
                f"method.layout={self.layout}",
                f"{self.name}'s {self.algorithm} wants another",
                f"method.layout={wanted} would work",
            )
        object.__setattr__(self, "layout", wanted)

    @property
    def causal(self) -> bool:
        """Whether the mask is causal, as packages say it."""
        return self.mask == CAUSAL

    def preferred(self) -> str:
        """The algorithm that `auto` stands for."""
        return self.algorithms[0]

    @abstractmethod
    def wanted_layout(self) -> str:
        """How the algorithm wants the tokens dealt out: the name of one of our layouts."""

    @abstractmethod
    def attention(self, problem: Problem) -> Attention:
        """Inside a rank of the default group: the package's attention, with torch and the package imported now."""

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a problem that the algorithm can't do, with what it could do."""
        unit = problem.n * (2 if self.layout == "zigzag" else 1)
        if problem.seqlen % unit:
            low, high = problem.seqlen // unit * unit, (problem.seqlen // unit + 1) * unit
            choices = f"seqlen={low} or {high}" if low else f"seqlen={high}"
            raise RequestError(
                f"seqlen={problem.seqlen}",
                f"{self.name} deals it out in {unit} equal pieces, so {unit} must divide it",
                f"{choices} would work",
            )
        if problem.wire_dtype != problem.dtype:
            raise RequestError(
                f"wire_dtype={problem.wire_dtype}",
                "a peer decides itself what travels in which dtype",
                "wire_dtype=null would work",
            )

    def refuse_absence(self) -> None:
        """Raise RequestError where the package is not installed."""
        if importlib.util.find_spec(self.module) is None:
            raise RequestError(
                f"impl={self.name}", f"{self.distribution} is not installed", 'pip install "sp-bench[peers]" would work'
            )

    @property
    def version(self) -> str:
        """Of the package, as installed."""
        return importlib.metadata.version(self.distribution)

    def head_parallel(self, problem: Problem) -> int:
        """The head-parallel degree: how many consecutive ranks split the heads of a chunk of the layout."""
        return 1

    def dealt(self, problem: Problem) -> Problem:
        """The problem with its tokens dealt out as the algorithm wants them."""
        layout = self.mask.layout(self.layout)
        return replace(problem, layout=replace(layout, head_parallel=self.head_parallel(problem)))

    def variant(self, problem: Problem) -> str:
        """What tells this algorithm from the package's others; empty where there are none."""
        return self.algorithm if len(self.algorithms) > 1 else ""

    @property
    def impl(self) -> str:
        """What `impl` was."""
        return self.name

    @property
    def kernel_name(self) -> str:
        """What computes its blocks: flash_attn where it is installed, else what stands in for it (stand_in.py)."""
        there = importlib.util.find_spec("flash_attn")
        return "flash_attn" if there and there.name == "flash_attn" else "aten_cpu"

    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        package = f"{self.name} is {self.distribution} {self.version}"
        if self.kernel_name == "aten_cpu":
            return [f"{package}, with the CPU kernel of our own methods in flash_attn's place"]
        return [package]


def refuse_full_mask(peer: Peer, other: str) -> None:
    """Raise RequestError where an algorithm for causal masks is asked for a full one; `other` takes any."""
    if not peer.causal:
        raise RequestError(
            f"mask={peer.mask.name}",
            f"{peer.name}'s {peer.algorithm} is for causal masks only",
            f"method.algorithm={other} would work",
        )


def refuse_mixed_rings(peer: Peer, problem: Problem) -> None:
    """Raise RequestError where a rank sends float64 gradients to one that awaits fp32, of which gloo would die.

    What decides is whether a rank has added a block to those that it got, which under a causal mask not all have.
    """
    if problem.dtype == "float64" and peer.causal and peer.algorithm in ("ring", "stripe"):
        raise RequestError(
            "dtype=float64",
            f"in {peer.name}'s {peer.algorithm} some ranks send gradients of float64 to ranks that await fp32",
            "dtype=float32 would work",
        )


def refuse_lonely_ring(peer: Peer, ranks: int, would_work: str) -> None:
    """Raise RequestError for a ring of one rank, which would send to itself; gloo has no such connection."""
    if ranks == 1:
        raise RequestError(
            "gpus=1", f"{peer.name}'s {peer.algorithm} sends to itself in a ring of one", f"{would_work} would work"
        )


def refuse_uneven_heads(peer: Peer, problem: Problem, ranks: int) -> None:
    """Raise RequestError where `ranks` can't split the heads, and the key heads, evenly."""
    for key, heads in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
        if heads % ranks:
            raise RequestError(
                f"{key}={heads}",
                f"{peer.name}'s {peer.algorithm} splits them evenly among {ranks} ranks",
                f"{key}={(heads // ranks + 1) * ranks} would work",
            )
