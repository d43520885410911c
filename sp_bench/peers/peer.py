"""The base class of peers: a package's attention, its layout, its options, and the problems that it refuses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.documents import Documents
from sp_bench.plan.layout import Layout
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
    """This rank's q (B, S, H, D), k and v (B, S, kv_heads, D), S = seqlen / n -> out (B, S, H, D), differentiable."""

PEER = "peer"
"""The value of the key `method` that runs the peer which `impl` names."""
AUTO = "auto"
WHOLE = (FULL, CAUSAL)
"""The masks of whole sequences that packages have a flag for."""


@dataclass(frozen=True, kw_only=True)
class Peer(ABC):
    """A package and its options, which are fields of the subclass. Only `attention` imports torch.

    In a request it takes the place of a Method. It has no plan, so it can be measured but not simulated.
    """

    name: ClassVar[str]
    """The value of the key `impl`."""
    distribution: ClassVar[str]
    """The package's name for pip."""
    module: ClassVar[str]
    """The package's name for import."""
    install: ClassVar[str] = 'pip install "sp-bench[peers]"'
    """The command that installs it."""
    algorithms: ClassVar[tuple[str, ...]]
    """The package's algorithms. Auto is the first, unless a subclass overrides `preferred`."""
    takes_documents: ClassVar[bool] = False
    """Whether it takes packed documents, beside the masks of whole sequences."""
    on_cpus: ClassVar[bool] = True
    """Whether it takes tensors of CPUs, with a stand-in in flash_attn's place."""
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    """The dtypes that the package is made for. Those of flash_attn, unless a subclass overrides them."""

    mask: Mask
    algorithm: str = AUTO
    layout: str = AUTO
    """The name of the layout that the algorithm needs."""

    @classmethod
    def build(cls, options: Mapping[str, Any], *, mask: Mask, here: bool = True) -> Self:
        """The peer with these options. Options that it doesn't have must be auto.

        Raises RequestError for an invalid option or value or, if it is to run `here`, a package that is not installed.
        """
        own = {f.name: options[f.name] for f in fields(cls) if f.name in options}
        for key, value in options.items():
            if key not in own and value != AUTO:
                rule = f"impl={cls.name} has no such option"
                raise RequestError(f"method.{key}={value}", rule, f"method.{key}={AUTO} would work")
        peer = cls(mask=mask, **own)
        if here:
            peer.refuse_absence()
        return peer

    def __post_init__(self) -> None:
        if self.mask not in WHOLE and not self._takes(self.mask):
            also = " and documents without a window" if self.takes_documents else ""
            names = [mask.name for mask in WHOLE]
            rule = f"{self.name} is measured with the masks {' and '.join(names)}{also}"
            raise RequestError(f"mask={self.mask.name}", rule, f"one of {', '.join(names)} would work")
        if self.algorithm not in (*self.algorithms, AUTO):
            raise unknown("method.algorithm", str(self.algorithm), [*self.algorithms, AUTO])
        if self.algorithm == AUTO:
            object.__setattr__(self, "algorithm", self.preferred())
        wanted = self.wanted_layout()
        if self.layout not in (wanted, AUTO):
            rule = f"{self.name}'s {self.algorithm} needs another layout"
            raise RequestError(f"method.layout={self.layout}", rule, f"method.layout={wanted} would work")
        object.__setattr__(self, "layout", wanted)

    def _takes(self, mask: Mask) -> bool:
        return self.takes_documents and isinstance(mask, Documents) and not mask.windowed

    @property
    def documents(self) -> Documents | None:
        """The packed documents; None for one whole sequence."""
        return self.mask if isinstance(self.mask, Documents) else None

    @property
    def causal(self) -> bool:
        """Whether the mask is causal, or its documents are."""
        return self.documents.causal if self.documents else self.mask == CAUSAL

    def document_unit(self, n: int) -> int:
        """The number of tokens that must divide the length of each document, on n ranks."""
        return 1

    def preferred(self) -> str:
        """The algorithm that auto means."""
        return self.algorithms[0]

    @abstractmethod
    def wanted_layout(self) -> str:
        """The name of the layout that the algorithm needs."""

    @property
    def takes_group(self) -> bool:
        """Whether it runs on a part of the ranks. If not, `attention` must not be given a group."""
        return True

    @abstractmethod
    def attention(self, problem: Problem, device: torch.device, group: ProcessGroup | None = None) -> Attention:
        """The package's attention function on the ranks of a group, the default group if None.

        Call it inside these ranks: it imports the package.
        """

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a problem that the algorithm can't compute."""
        if problem.kv_seqlen:
            rule = f"a peer is called with as many keys as queries, seqlen={problem.seqlen}"
            works = f"{problem.without_history}, or another method, would work"
            raise RequestError(f"kv_seqlen={problem.kv_seqlen}", rule, works)
        if problem.v_head_dim:
            rule = f"a peer is called with values as wide as keys, head_dim={problem.head_dim}"
            raise RequestError(
                f"v_head_dim={problem.v_head_dim}", rule, "v_head_dim=null, or another method, would work"
            )
        if problem.latent_dim:
            rule = "a peer is called with keys and values of all heads"
            raise RequestError(
                f"latent_dim={problem.latent_dim}", rule, "latent_dim=null, or another method, would work"
            )
        unit = problem.n * (2 if self.layout == "zigzag" else 1)
        if problem.seqlen % unit:
            low, high = problem.seqlen // unit * unit, (problem.seqlen // unit + 1) * unit
            choices = f"seqlen={low} or {high}" if low else f"seqlen={high}"
            rule = f"{self.name} splits it into {unit} equal pieces, so {unit} must divide it"
            raise RequestError(f"seqlen={problem.seqlen}", rule, f"{choices} would work")
        if problem.wire_dtype != problem.dtype:
            rule = "a peer chooses the dtypes of its transfers itself"
            raise RequestError(f"wire_dtype={problem.wire_dtype}", rule, "wire_dtype=null would work")

    def refuse_absence(self) -> None:
        """Raise RequestError if the package is not installed."""
        if importlib.util.find_spec(self.module) is None:
            rule = f"{self.distribution} is not installed"
            raise RequestError(f"impl={self.name}", rule, f"{self.install} would work")

    def refuse_run(self, *, mode: str, kernel: str, device: str, here: bool = True) -> None:
        """Raise RequestError for a run that a peer can't do: a simulation, one on that device, or another kernel's.

        Whether the packages for a device are there is known `here` alone.
        """
        if mode == "simulate":
            rule = f"{self.name} has no plan that could be simulated"
            raise RequestError(f"method={PEER} mode=simulate", rule, "cluster=local would work, which measures")
        if here or not self.on_cpus:
            self.refuse_device(device)
        if kernel != "auto":
            raise RequestError(f"kernel={kernel}", f"{self.name} has its own kernel", "kernel=auto would work")

    def refuse_device(self, device: str) -> None:
        """Raise RequestError if its kernel can't compute on cpu or cuda: a stand-in has flash_attn's place on CPUs."""
        spec = importlib.util.find_spec("flash_attn")
        itself = spec is not None and spec.name == "flash_attn"
        if device == "cpu" and itself:
            rule = "flash_attn is installed here, and takes no tensors of a CPU"
            would_work = (
                "device=cuda, or an environment without flash_attn, where a stand-in takes its place, would work"
            )
            raise RequestError(f"impl={self.impl}", rule, would_work)
        if device == "cuda" and not itself:
            rule = "flash_attn is not installed, and what stands in for it computes on CPUs"
            raise RequestError(f"impl={self.impl}", rule, "pip install flash-attn, or device=cpu, would work")

    @property
    def version(self) -> str:
        """The installed version of the package."""
        return importlib.metadata.version(self.distribution)

    def layout_of(self, mask: Mask, n: int) -> Layout:
        """The layout of the problem that is asked for; `assigned` has the algorithm's own."""
        return mask.layout(self.layout, n)

    def head_parallel(self, problem: Problem) -> int:
        """The head-parallel degree: the number of consecutive ranks that split the heads of a chunk."""
        return 1

    def assigned(self, problem: Problem) -> Problem:
        """The problem in the algorithm's layout."""
        layout = self.mask.layout(self.layout)
        return replace(problem, layout=replace(layout, head_parallel=self.head_parallel(problem)))

    def variant(self, problem: Problem) -> str:
        """The algorithm with its options; empty if the package has only one."""
        return self.algorithm if len(self.algorithms) > 1 else ""

    @property
    def impl(self) -> str:
        """The value of the key `impl`."""
        return self.name

    def kernel_on(self, device: str) -> str:
        """The kernel of its blocks on cpu or cuda: flash_attn, or on CPUs that of its stand-in (stand_in.py)."""
        return "flash_attn" if device == "cuda" else "aten_cpu"

    def notes(self, device: str) -> list[str]:
        """Remarks that a reader of the numbers must know."""
        package = f"{self.name} is {self.distribution} {self.version}"
        if self.kernel_on(device) == "aten_cpu":
            return [f"{package}, with the CPU kernel of our own methods in flash_attn's place"]
        return [package]


def refuse_full_mask(peer: Peer, other: str) -> None:
    """Raise RequestError for any but a causal mask. The algorithm `other` takes any mask."""
    if not peer.causal:
        rule = f"{peer.name}'s {peer.algorithm} is for causal masks only"
        raise RequestError(f"mask={peer.mask.name}", rule, f"method.algorithm={other} would work")


def refuse_mixed_rings(peer: Peer, problem: Problem) -> None:
    """Raise RequestError if a rank would send float64 gradients to one that awaits fp32, which ends gloo.

    A rank's gradients become fp32 when it adds a block to those it received. Under a causal mask not all ranks do.
    """
    if problem.dtype == "float64" and peer.causal and peer.algorithm in ("ring", "stripe"):
        rule = f"in {peer.name}'s {peer.algorithm} some ranks send gradients of float64 to ranks that await fp32"
        raise RequestError("dtype=float64", rule, "dtype=float32 would work")


def refuse_lonely_ring(peer: Peer, ranks: int, would_work: str) -> None:
    """Raise RequestError for a ring of one rank: gloo can't send to the rank itself."""
    if ranks == 1:
        rule = f"{peer.name}'s {peer.algorithm} sends to itself in a ring of one"
        raise RequestError("gpus=1", rule, f"{would_work} would work")


def refuse_uneven_heads(peer: Peer, problem: Problem, ranks: int) -> None:
    """Raise RequestError unless `ranks` divides the heads and the key heads."""
    for key, heads in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
        if heads % ranks:
            rule = f"{peer.name}'s {peer.algorithm} splits them evenly among {ranks} ranks"
            raise RequestError(f"{key}={heads}", rule, f"{key}={(heads // ranks + 1) * ranks} would work")
