"""workload=prefill: chunks of a prompt one after another over a growing cache, to the first token. Imports no torch.

Each chunk is an attention of its own: its queries see what is cached, and the chunk's own keys causally (chunked
prefills, Agrawal et al. 2023). The cache lies on the ranks by tokens, as each chunk was dealt. Without a model it is
the attention of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from sp_bench import account
from sp_bench.cluster.device import DeviceCosts
from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.plan.method import Method
from sp_bench.plan.problem import Problem
from sp_bench.reading import Count, Natural, Section, Tokens, read
from sp_bench.records.quantities import Prompt, TrainingStep
from sp_bench.workload.base import RankContext, Spec, Step, Workload
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.model import NONE, Model, refuse_keys
from sp_bench.workload.prefill_costs import PrefillCosts, layer_cache_bytes
from sp_bench.workload.training import refuse_training


class Chunking(Section, frozen=True, kw_only=True):
    """The section `prefill` of conf/config.yaml."""

    chunk: Tokens | None = None
    """Tokens of a chunk; the last one has the rest. None: the whole prompt at once."""
    cached: Natural = 0
    """Tokens that are in the cache before the first chunk, such as a prefix that prompts share."""
    tensor_parallel: Count = 1
    """How many GPUs share the tokens of a rank of the attention: each has a part of the heads and of the matrices."""


@dataclass(frozen=True, kw_only=True)
class Prefill(Workload):
    """The forward of a prompt of `seqlen` tokens.

    With tensor parallelism, the problem is that of one GPU of each group: it has the GPU's heads, and a rank a group.
    """

    name: ClassVar[str] = "prefill"
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward": ("forward",)}
    keys: ClassVar[tuple[str, ...]] = ("prefill",)
    degree_key: ClassVar[str] = "prefill.tensor_parallel"
    simulated_as: ClassVar[str] = "prefill"

    chunking: Chunking
    model: Model | None = None
    """The model whose layers are counted; None: the attention of one layer."""

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Self:
        """The workload of a config. Raises RequestError for a model that has no first token, and keys of training."""
        asked = _chunking(config)
        refuse_training(config, f"workload={cls.name}")
        if config["model"]["name"] == NONE:
            if asked.tensor_parallel > 1:
                rule = "splits the matrices of a model, and there is none"
                raise RequestError(
                    f"{cls.degree_key}={asked.tensor_parallel}", rule, "1, or model=llama3_8b, would work"
                )
            return cls(phases=phases, chunking=asked)
        model = read(Model, config["model"], "model")
        if model.kind != "decoder":
            rule = f"is a {model.kind}, and a first token is that of a decoder"
            raise RequestError(f"model={model.name}", rule, "model=llama3_8b would work")
        model.part(asked.tensor_parallel, cls.degree_key)
        return cls(phases=phases, chunking=asked, model=model)

    @classmethod
    def filled(cls, config: Mapping[str, Any], *, here: bool) -> dict[str, Any]:
        """The only phase that there is, where a config has null."""
        return {"phase": "forward"} if config["phase"] is None else {}

    @classmethod
    def kv_seqlen(cls, config: Mapping[str, Any], seqlen: int, asked: int | None) -> int | None:
        """The number of keys: those cached and the prompt's.

        Raises RequestError where kv_seqlen is given too, for a mask of documents, and for layers of two kinds.
        """
        if (every := config["model"].get("full_every")) is not None:
            rule = "workload=prefill has layers of one kind, which see all of what is cached"
            works = "model.full_every=null mask=causal window=null chunk=null, or workload=train, would work"
            raise RequestError(f"model.full_every={every}", rule, works)
        if asked is not None or config["kv_seqlen"] is not None:
            rule = "workload=prefill counts its keys itself: what is cached, and the prompt"
            raise RequestError(f"kv_seqlen={asked or seqlen}", rule, "kv_seqlen=null prefill.cached=64k would work")
        _refuse_mask(str(config["mask"]), CAUSAL.name, FULL.name)  # causal=false, which is full, is read later
        cached = _chunking(config).cached
        return seqlen + cached if cached else None

    @classmethod
    def tensor_parallel(cls, config: Mapping[str, Any]) -> int:
        """The degree that prefill.tensor_parallel asks for."""
        return _chunking(config).tensor_parallel

    @property
    def degree(self) -> int:
        """The degree of tensor parallelism."""
        return self.chunking.tensor_parallel

    @property
    def notes(self) -> tuple[str, ...]:
        """A remark on parts that the model leaves out."""
        return self.model.notes if self.model else ()

    @property
    def layers(self) -> int:
        """How many attentions each chunk has, one after another."""
        return self.model.layers if self.model else 1

    @classmethod
    def refuse_method(cls, method: Method | Peer) -> None:
        """Raise RequestError for a peer."""
        if isinstance(method, Peer):
            rule = "workload=prefill runs the suite's own methods, whose queries may be fewer than keys"
            raise RequestError(f"method=peer impl={method.impl}", rule, "method=ring would work")

    def refuse(self, problem: Problem, mode: str, peer: Peer | None) -> None:
        """Raise RequestError for a mask or chunks that no cache can be behind, and what isn't measured."""
        _refuse_mask(problem.mask.name, CAUSAL.name)
        if mode == "alone":
            rule = f"executes one attention, not workload={self.name}"
            raise RequestError("mode=alone", rule, "mode=measure would work")
        if self.model and mode != "simulate":
            rule = "is simulated only: measured ranks compute the attention of one layer"
            raise RequestError(f"model={self.model.name}", rule, "mode=simulate, or model=none, would work")
        if self.model:
            refuse_keys(self.model, problem, self.name, "model=none")
        self._refuse_chunks(problem)

    def _refuse_chunks(self, problem: Problem) -> None:
        """Raise RequestError for chunks after which ranks hold other shares of the cache than the next one expects."""
        seqlen, n, cached = problem.seqlen, problem.n, self.chunking.cached
        chunk = self.chunking.chunk or seqlen
        if chunk > seqlen:
            rule = f"is longer than the prompt, seqlen={seqlen}"
            raise RequestError(f"prefill.chunk={chunk}", rule, f"prefill.chunk={seqlen} or less would work")
        for key, size in (("chunk", chunk if chunk < seqlen else 0), ("cached", cached)):
            if size % n:
                rule = f"must be a multiple of the {n} ranks: each keeps as many of its tokens"
                works = f"prefill.{key}={max(size // n, 1) * n} would work"
                raise RequestError(f"prefill.{key}={size}", rule, works)
        for size, which in ((chunk, "every"), (seqlen % chunk, "the last")):
            try:
                _ = size and replace(problem, seqlen=size, kv_seqlen=problem.keys.seqlen)
            except RequestError as error:
                rule = f"leaves {size} tokens for {which} chunk, and {error.rule}"
                works = "a larger one that divides seqlen would work"
                raise RequestError(f"prefill.chunk={chunk}", rule, works) from None

    def attentions(self, problem: Problem) -> tuple[Problem, ...]:
        """The attention of each chunk, in order: its own queries, and all keys up to its end."""
        chunk, cached = self.chunking.chunk or problem.seqlen, problem.history
        starts = range(0, problem.seqlen, chunk)
        ends = [min(start + chunk, problem.seqlen) for start in starts]
        return tuple(
            replace(problem, seqlen=end - start, kv_seqlen=cached + end)
            for start, end in zip(starts, ends, strict=True)
        )

    @classmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """The forward, which is all that is timed."""
        return phases

    def times_executed(self, phase: str, attention: int = 0) -> Mapping[str, int]:
        """The plan of a chunk once for each layer."""
        return {phase: self.layers}

    def costs(self, problem: Problem, device: DeviceCosts, crowding: float = 1.0) -> PrefillCosts:
        """Seconds and memory of a chunk beside its attention. `problem` is that of the chunk."""
        assert self.model is not None, "without a model there is nothing beside the attention"
        return PrefillCosts(
            model=self.model, problem=problem, device=device, crowding=crowding, degree=self.chunking.tensor_parallel
        )

    def described(self, problem: Problem) -> TrainingStep:
        """The model, as far as there is one."""
        if not self.model:
            return TrainingStep()
        parameters = self.model.parameters(problem, self.degree)
        return TrainingStep(model=self.model.name, parameters=parameters, tensor_parallel=self.degree)

    def prompt(self, problem: Problem) -> Prompt:
        """The chunks, and the cache that they leave on a GPU."""
        return Prompt(
            prefill_chunk=self.chunking.chunk or problem.seqlen,
            prefill_cached=self.chunking.cached,
            chunks=len(self.attentions(problem)),
            kv_cache_bytes=self.layers * layer_cache_bytes(problem),
        )

    def flops(self, phase: str, problem: Problem) -> float:
        """FLOPs of the attention, as account.model_flops counts them; with a model also 2 N D of its layers, and those
        of the last token's head.

        With tensor parallelism, they are those of one GPU of each group.
        """
        attention = self.layers * account.model_flops(problem, phase)
        if not self.model:
            return attention
        share = self.model.part(self.degree, self.degree_key)
        of_a_layer = sum(a * b for a, b in share.layer_matrices(problem).values())
        tokens = share.layers * of_a_layer * problem.seqlen + share.outputs * share.width
        return attention + 2.0 * problem.batch * tokens

    def gate(self, spec: Spec, context: RankContext) -> GateErrors:
        """Errors of out of the first chunk, one in the middle and the last, over a cache that grows."""
        from sp_bench.workload.prefill_gate import gate

        return gate(spec, context)

    def prepare(self, spec: Spec, context: RankContext) -> Step:
        """Make this rank's random q, k and v, an empty cache behind the cached tokens, and an engine for each chunk."""
        from sp_bench.workload.prefill_step import PrefillStep

        return PrefillStep(spec, context)


def _chunking(config: Mapping[str, Any]) -> Chunking:
    return read(Chunking, config["prefill"], "prefill")


def _refuse_mask(name: str, *taken: str) -> None:
    if name not in taken:
        rule = "is not that of a prompt: each chunk sees all of what is cached, and itself causally"
        raise RequestError(f"mask={name}", rule, f"mask={CAUSAL.name} would work")
