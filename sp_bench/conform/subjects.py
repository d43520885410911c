"""Subjects of checks: a user's function, a known package, or a method of this suite. Imports torch only in ranks."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sp_bench.conform.case import Case
from sp_bench.conform.claims import ATTRIBUTE, FLAGS, FUNCTIONS, Claims, dtypes_named
from sp_bench.errors import RequestError, nearest
from sp_bench.extras import require
from sp_bench.methods import REGISTRY, build
from sp_bench.peers.peer import Peer
from sp_bench.peers.registry import PEERS
from sp_bench.peers.registry import build as build_peer
from sp_bench.peers.user import function_named
from sp_bench.plan.layout import LAYOUTS, Layout
from sp_bench.plan.mask import MASKS
from sp_bench.plan.method import PHASES, Method
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

REFUSALS = (NotImplementedError, ValueError, AssertionError)
"""The errors that a subject's call raises, on all ranks, for what it doesn't do."""


@dataclass
class Instance:
    """An attention on this rank, and how its tokens are assigned."""

    attend: Attend
    shard: Callable[[Tensor], Tensor]
    unshard: Callable[[Tensor], Tensor]
    sent_bytes: Callable[[], int] | None = None
    """The bytes that this rank has sent so far, where the attention counts them itself."""
    at: Callable[[Case], Instance] | None = None
    """The same attention for a case of another length; None: a new instance is what a caller would make."""


@dataclass(frozen=True, kw_only=True)
class Subject(ABC):
    """A function to check. It is pickled and sent to the ranks."""

    name: str
    """As the user wrote it."""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def title(self) -> str:
        """The name with its options."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options)])

    @property
    @abstractmethod
    def claims(self) -> Claims:
        """Everything that it claims to compute."""
        ...

    @abstractmethod
    def refuse(self, case: Case) -> None:
        """Raise RequestError for a case that it documents not to do."""

    @abstractmethod
    def layout(self, case: Case) -> Layout:
        """How a case's tokens are assigned to the ranks."""

    @abstractmethod
    def instance(self, case: Case, group: ProcessGroup) -> Instance:
        """In a rank: a new attention for the case."""

    def in_other_layouts(self, case: Case) -> Mapping[str, Subject]:
        """The subject with its tokens in another layout than the case's, by layout; none where that isn't open."""
        return {}

    def sent_bytes(self, case: Case, phase: str) -> float | None:
        """The claimed bytes that all ranks send in a phase; None: nothing is claimed."""
        formula = self.claims.sent_bytes
        return formula(case.problem(self.layout(case)), phase) if formula else None


@dataclass(frozen=True, kw_only=True)
class Function(Subject):
    """module:name, called as fn(q, k, v, causal=, group=). Its claims are an attribute, or come with the request."""

    overrides: tuple[tuple[str, Any], ...] = ()
    """Claims that the request states."""

    @property
    def claims(self) -> Claims:
        """Everything that it claims to compute."""
        made = getattr(self.function(), ATTRIBUTE, None) or Claims()
        return replace(made, **dict(self.overrides)) if self.overrides else made

    def function(self) -> Callable[..., Any]:
        """The function. Raises RequestError where there is none."""
        module = self.name.partition(":")[0]
        try:
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"no module {module}")
            return function_named(self.name, self.name)
        except ImportError as error:
            would_work = "the name of a module in this folder or on PYTHONPATH would work"
            raise RequestError(self.name, f"can't be imported: {error}", would_work) from None

    def refuse(self, case: Case) -> None:
        made = self.claims
        if case.mask not in made.masks:
            raise RequestError(f"mask={case.mask}", "is not claimed", f"mask={made.masks[0]} would work")
        if case.dtype not in made.dtypes:
            raise RequestError(f"dtype={case.dtype}", "is not claimed", f"dtype={made.dtypes[0]} would work")
        if case.more and not made.uneven:
            raise RequestError(f"seqlen={case.seqlen}", "uneven lengths are not claimed", "uneven=true would claim it")
        for key in ("documents", "window", "scale"):
            if getattr(case, key) and not getattr(made, key):
                raise RequestError(f"{key}={getattr(case, key)}", "is not claimed", f"{key}=true would claim it")
        if made.head_parallel and case.heads % case.n:
            raise RequestError(f"heads={case.heads}", f"{case.n} ranks split them", f"heads={case.n} would work")
        refuse_pieces(self.layout(case), case)

    def layout(self, case: Case) -> Layout:
        name = self.claims.layout
        return MASKS[case.mask].layout(name)

    def in_other_layouts(self, case: Case) -> Mapping[str, Subject]:
        made = self.claims
        if made.shard or made.unshard or case.n == 1:
            return {}
        kept = tuple((key, value) for key, value in self.overrides if key != "layout")
        others = (name for name in LAYOUTS if name != self.layout(case).name)
        return {name: replace(self, overrides=(*kept, ("layout", name))) for name in others}

    def instance(self, case: Case, group: ProcessGroup) -> Instance:
        function, made = self.function(), self.claims
        keywords: dict[str, Any] = {"causal": case.mask == "causal", "group": group}
        keywords |= {"seqlen": case.seqlen} if made.uneven else {}
        keywords |= {"documents": list(case.lengths)} if case.documents else {}
        keywords |= {"window_size": case.window_size} if case.window else {}
        keywords |= {"scale": case.scale} if case.scale else {}
        shard, unshard = made.shard, made.unshard
        instance = _assigned(lambda q, k, v: function(q, k, v, **keywords), self.layout(case), group)
        instance.shard = (lambda x: shard(x, group)) if shard else instance.shard
        instance.unshard = (lambda x: unshard(x, group)) if unshard else instance.unshard
        return instance


@dataclass(frozen=True, kw_only=True)
class Package(Subject):
    """A package that the registry of peers knows."""

    dtypes: tuple[str, ...] = ()
    """In place of the dtypes that the package is made for."""

    def peer(self, case: Case) -> Peer:
        """The package with this subject's options. Raises RequestError for masks or options that it doesn't take."""
        return build_peer(self.name, dict(self.options), mask=case.whole_mask())

    @property
    def claims(self) -> Claims:
        """Everything that it claims to compute."""
        masks = self._masks()
        peer = self.peer(Case(mask=masks[0]))
        dtypes = self.dtypes or peer.dtypes
        return Claims(dtypes=dtypes, masks=masks, sub_groups=peer.takes_group, documents=peer.takes_documents)

    def _masks(self) -> tuple[str, ...]:
        masks = []
        for mask in ("causal", "full"):
            with suppress(RequestError):
                self.refuse(Case(n=2, heads=2, kv_heads=2, tokens=8, mask=mask, dtype="bfloat16"))
                masks.append(mask)
        return tuple(masks)

    def refuse(self, case: Case) -> None:
        if case.scale:
            raise RequestError(f"scale={case.scale}", "packages are run with the usual one", "scale=0 would work")
        peer = self.peer(case)
        peer.refuse_device("cpu")
        refuse_pieces(peer.layout_of(case.whole_mask(), case.n), case)
        peer.refuse(case.problem(peer.layout_of(case.whole_mask(), case.n)))

    def layout(self, case: Case) -> Layout:
        peer = self.peer(case)
        return peer.assigned(case.problem(peer.layout_of(case.whole_mask(), case.n))).layout

    def instance(self, case: Case, group: ProcessGroup) -> Instance:
        import torch

        peer, layout = self.peer(case), self.layout(case)
        problem, among = case.problem(layout), group if peer.takes_group else None
        return _assigned(peer.attention(problem, torch.device("cpu"), among), layout, group)


@dataclass(frozen=True, kw_only=True)
class Own(Subject):
    """A method of this suite, as SequenceParallelAttention."""

    @property
    def claims(self) -> Claims:
        """Everything that it claims to compute."""
        dtypes = ("float32", "bfloat16", "float16", "float64")
        return Claims(dtypes=dtypes, uneven=True, documents=True, window=True)

    def variant(self, case: Case) -> tuple[Method, Problem]:
        """The variant that the attention runs, and its assigned problem. Raises RequestError where it refuses."""
        method = build(self.name, dict(self.options))
        problem = case.problem(method.layout_of(case.whole_mask(), case.n))
        least = min(method.candidates(problem), key=lambda m: sum(m.bytes_sent(problem, phase) for phase in PHASES))
        return least, least.assigned(problem)

    def refuse(self, case: Case) -> None:
        if case.scale:
            raise RequestError(f"scale={case.scale}", "methods have the usual one", "scale=0 would work")
        self.variant(case)

    def layout(self, case: Case) -> Layout:
        return self.variant(case)[1].layout

    def instance(self, case: Case, group: ProcessGroup) -> Instance:
        from sp_bench.run.attention import SequenceParallelAttention

        options = vars(self.variant(case)[0])  # the degrees of an auto decide which tokens a rank owns
        attention = SequenceParallelAttention(self.name, mask=case.whole_mask(), group=group, **options)

        def at(other: Case) -> Instance:
            return Instance(
                lambda q, k, v: attention(q, k, v, seqlen=other.seqlen),
                attention.shard,
                attention.unshard,
                lambda: attention.sent_bytes.total(),
                at if attention.mask in MASKS.values() else None,
            )

        return at(case)

    def sent_bytes(self, case: Case, phase: str) -> float | None:
        method, problem = self.variant(case)
        return None if case.documents else case.n * method.bytes_sent(problem, phase)


def _assigned(attend: Attend, layout: Layout, group: ProcessGroup) -> Instance:
    """An attention whose tokens are assigned as a layout says."""
    from sp_bench.run import sharding

    n, rank = group.size(), group.rank()
    return Instance(
        attend, lambda x: sharding.shard(x, layout, rank, n), lambda x: sharding.unshard(x, layout, group, n)
    )


def refuse_pieces(layout: Layout, case: Case) -> None:
    """Raise RequestError where a layout of whole sequences has uneven pieces, which only `uneven` claims."""
    unit = case.n * layout.pieces
    if not case.documents and not case.more and case.seqlen % unit:
        rule = f"{unit} pieces of the {layout.name} layout don't share it evenly"
        raise RequestError(f"seqlen={case.seqlen}", rule, f"seqlen={-(-case.seqlen // unit) * unit} would work")


CLAIM_KEYS = ("layout", "masks", "dtypes", *FLAGS, *FUNCTIONS)
"""The claims that a request may state."""


def subjects_named(name: str, options: Mapping[str, Any]) -> Sequence[Subject]:
    """The subjects that a request names: module:fn, a peer, a method, "methods" or "peers".

    `options` are spelled as the benchmark does, method.layout, or without its `method.`. Raises RequestError for an
    unknown name or option, one that is given twice, or where torch or a package is missing.
    """
    for key in options:
        if f"method.{key}" in options:
            raise RequestError(key, f"is given as method.{key} too", "one of them would work")
    options = {key.removeprefix("method."): value for key, value in options.items()}
    require("run", f"conform {name}")
    if name == "methods":
        return [Own(name=each) for each in REGISTRY if each != "reference"]
    if name == "peers":
        return [subject for peer in PEERS.values() if peer.on_cpus for subject in _algorithms(peer)]
    if ":" in name:
        subject = Function(name=name, overrides=tuple((key, _claim(key, value)) for key, value in options.items()))
        assert subject.claims
        return [subject]
    if name in PEERS:
        rest = {key: value for key, value in options.items() if key != "dtypes"}
        dtypes = dtypes_named(options["dtypes"]) if "dtypes" in options else ()
        subject = Package(name=name, options=tuple(rest.items()), dtypes=dtypes)
        subject.peer(Case(mask="causal")).refuse_device("cpu")
        return [subject]
    if name in REGISTRY:
        build(name, dict(options))
        return [Own(name=name, options=tuple(options.items()))]
    known = nearest(name, [*REGISTRY, *PEERS, "methods", "peers"])
    raise RequestError(name, "there is no such method or package", f"{known}, or your_module:your_function")


def _algorithms(peer: type[Peer]) -> list[Package]:
    """The package once with each of its algorithms."""
    if len(peer.algorithms) == 1:
        return [Package(name=peer.name)]
    return [Package(name=peer.name, options=(("algorithm", each),)) for each in peer.algorithms]


def _claim(key: str, value: Any) -> Any:
    """The value of a claim from its text."""
    if key in FUNCTIONS:
        return Function(name=str(value)).function()
    if key not in CLAIM_KEYS:
        raise RequestError(key, "there is no such claim", nearest(key, CLAIM_KEYS))
    return tuple(value) if isinstance(value, list) else value
