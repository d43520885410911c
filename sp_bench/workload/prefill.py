"""workload=prefill: chunks of a prompt one after another over a growing cache, to the first token. Imports no torch.

Each chunk is an attention of its own: its queries see what is cached, and the chunk's own keys causally (chunked
prefills, Agrawal et al. 2023). The cache lies on the ranks by tokens, as each chunk was assigned. Under a window, or in
chunks of the mask, queries see the end of what is cached, and the rest of it is no part of the attention. Without a
model it is the attention of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from sp_bench import account
from sp_bench.cluster.device import DeviceCosts
from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer
from sp_bench.plan.documents import Chunked, Packed, Window
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import Method
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV
from sp_bench.reading import Count, Natural, Section, Tokens, read
from sp_bench.records.quantities import Prompt, TrainingStep
from sp_bench.workload.base import SINKS, RankContext, Spec, Step, Workload
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.model import WHOLE, Model, decoder_of, mask_of_full_layers, refuse_keys
from sp_bench.workload.prefill_costs import PrefillCosts, layer_cache_bytes
from sp_bench.workload.training import refuse_training

LIMITED = (Window.name, Chunked.name)
"""The masks under which a query sees the end of what is before it."""


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
    keys: ClassVar[tuple[str, ...]] = ("prefill", SINKS)
    degree_key: ClassVar[str] = "prefill.tensor_parallel"
    simulated_as: ClassVar[str] = "prefill"

    chunking: Chunking
    model: Model | None = None
    """The model whose layers are counted; None: the attention of one layer."""
    limited: bool = False
    """Whether layers, all or those that don't see all, have a window or chunks."""
    sinks: bool = False
    """Whether every softmax has one score more, learned by head, besides those of keys (gpt-oss, OpenAI 2025)."""

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Self:
        """The workload of a config. Raises RequestError for a model that has no first token, and keys of training."""
        asked, limited = _chunking(config), config["mask"] in LIMITED
        sinks = read(bool, config.get(SINKS, False), SINKS)
        refuse_training(config, f"workload={cls.name}")
        if model := decoder_of(config, "a first token is that of"):
            model = model.replace(sinks=sinks)
            model.part(asked.tensor_parallel, cls.degree_key)
        elif asked.tensor_parallel > 1:
            rule = "splits the matrices of a model, and there is none"
            raise RequestError(f"{cls.degree_key}={asked.tensor_parallel}", rule, "1, or model=llama3_8b, would work")
        return cls(phases=phases, chunking=asked, model=model, limited=limited, sinks=sinks)

    @classmethod
    def filled(cls, config: Mapping[str, Any], *, here: bool) -> dict[str, Any]:
        return {"phase": "forward"} if config["phase"] is None else {}

    @classmethod
    def kv_seqlen(cls, config: Mapping[str, Any], seqlen: int, asked: int | None) -> int | None:
        """The number of keys: those cached and the prompt's.

        Raises RequestError where kv_seqlen is given too, and for a mask of documents.
        """
        if asked is not None or config["kv_seqlen"] is not None:
            rule = "workload=prefill counts its keys itself: what is cached, and the prompt"
            raise RequestError(f"kv_seqlen={asked or seqlen}", rule, "kv_seqlen=null prefill.cached=64k would work")
        _refuse_mask(str(config["mask"]), CAUSAL.name, FULL.name, *LIMITED)  # causal=false is read later
        cached = _chunking(config).cached
        return seqlen + cached if cached else None

    @classmethod
    def tensor_parallel(cls, config: Mapping[str, Any]) -> int:
        return _chunking(config).tensor_parallel

    @property
    def degree(self) -> int:
        """The degree of tensor parallelism."""
        return self.chunking.tensor_parallel

    @property
    def notes(self) -> tuple[str, ...]:
        return self.model.notes if self.model else ()

    @property
    def layers_by_attention(self) -> tuple[int, ...]:
        """How many layers have each of a chunk's attentions: all, or those that see all and the others."""
        return self.model.layers_by_attention if self.model else (1,)

    @property
    def in_one_layout(self) -> bool:
        """Whether a chunk's attentions depend on how earlier chunks were assigned, of which they see a part."""
        return self.limited

    @classmethod
    def mask_of_layout(cls, config: Mapping[str, Any], mask: Mask) -> Mask:
        """That of a whole sequence: what is cached lies as such a mask's tokens are assigned."""
        if config["model"].get("full_every") is not None:
            return mask_of_full_layers(config, mask)
        return mask.unlimited or mask

    @classmethod
    def refuse_method(cls, method: Method | Peer) -> None:
        if isinstance(method, Peer):
            rule = "workload=prefill runs the suite's own methods, whose queries may be fewer than keys"
            raise RequestError(f"method=peer impl={method.impl}", rule, "method=ring would work")

    def refuse(self, problem: Problem, mode: str, peer: Peer | None) -> None:
        """Raise RequestError for a mask or chunks that no cache can be behind, and what isn't measured."""
        _refuse_mask(problem.mask.name, CAUSAL.name, *LIMITED)
        if isinstance(problem.mask, Packed) and not problem.mask.causal:
            rule = "is not that of a prompt, whose later tokens are not there yet"
            raise RequestError("causal=false", rule, "causal=true would work")
        if self.sinks and mode == "alone":
            rule = "are of ranks together, and mode=alone has one at a time"
            raise RequestError("sinks=true", rule, "mode=measure would work")
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
                problem.layout.refuse(n, size or seqlen)
            except RequestError as error:
                rule = f"leaves {size} tokens for {which} chunk, and {error.rule}"
                works = "a larger one that divides seqlen would work"
                raise RequestError(f"prefill.chunk={chunk}", rule, works) from None

    def attentions(self, problem: Problem) -> tuple[Problem, ...]:
        """The attention of each chunk, in order: its own queries, and all keys up to its end or, under a window, those
        of earlier chunks of which it sees some: chunks that see alike have equal attentions. Of layers of two kinds,
        for each chunk that of those that see all, and that of the others.
        """
        chunk, cached = self.chunking.chunk or problem.seqlen, problem.history
        problems: list[Problem] = []
        for start in range(0, problem.seqlen, chunk):
            end = min(start + chunk, problem.seqlen)
            for mask in self.masks(problem):
                keys = cached + end
                if isinstance(mask, Packed):
                    mask = mask.part(start, end, (cached, *(chunk,) * (start // chunk)))
                    keys = end - start + mask.cached_tokens
                problems.append(replace(problem, seqlen=end - start, kv_seqlen=keys, mask=mask))
        return tuple(problems)

    def masks(self, problem: Problem) -> tuple[Mask, ...]:
        """The masks of the layers, as many as there are kinds."""
        unlimited = problem.mask.unlimited
        return (unlimited, problem.mask) if len(self.layers_by_attention) > 1 and unlimited else (problem.mask,)

    @classmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        return phases

    def times_executed(self, phase: str, attention: int = 0) -> Mapping[str, int]:
        """The plan of a chunk once for each layer that has it."""
        layers = self.layers_by_attention
        return {phase: layers[attention % len(layers)]}

    def costs(self, problem: Problem, device: DeviceCosts, crowding: float = 1.0) -> PrefillCosts:
        """Seconds and memory of a chunk beside its attention. `problem` is that of the chunk."""
        assert self.model is not None, "without a model there is nothing beside the attention"
        return PrefillCosts(
            model=self.model, problem=problem, device=device, crowding=crowding, degree=self.chunking.tensor_parallel
        )

    def described(self, problem: Problem) -> TrainingStep:
        if not self.model:
            return TrainingStep()
        parameters = self.model.parameters(problem, self.degree)
        full, *others = self.layers_by_attention
        return TrainingStep(
            model=self.model.name,
            parameters=parameters,
            tensor_parallel=self.degree,
            full_layers=full if others else None,
        )

    def prompt(self, problem: Problem) -> Prompt:
        """The chunks, and the most that a GPU holds of the cache: under a window of each chunk's keys alone."""
        attentions, kinds = self.attentions(problem), len(self.layers_by_attention)
        chunks = {attentions[first : first + kinds] for first in range(0, len(attentions), kinds)}
        return Prompt(
            prefill_chunk=self.chunking.chunk or problem.seqlen,
            prefill_cached=self.chunking.cached,
            chunks=len(attentions) // kinds,
            kv_cache_bytes=max(
                sum(
                    layers * layer_cache_bytes(each)
                    for layers, each in zip(self.layers_by_attention, chunk, strict=True)
                )
                for chunk in chunks
            ),
        )

    def standing_bytes(self, attention: Problem, every: Sequence[Problem]) -> int:
        """Bytes of the rows of a measured rank's cache, with room for the whole prompt, that a chunk doesn't see."""
        ranks, first = np.arange(attention.n), every[0]
        rows = first.keys.tokens(ranks) - first.queries.tokens(ranks) - attention.keys.tokens(ranks)
        rows = rows + sum(each.queries.tokens(ranks) for each in every)
        return int(np.max(rows)) * sum(attention.token_bytes(field, wire=False) for field in KV.fields)

    def flops(self, phase: str, problem: Problem) -> float:
        """FLOPs of the attention, as account.model_flops counts them; with a model also 2 N D of its layers, and those
        of the last token's head.

        With tensor parallelism, they are those of one GPU of each group, with a share of what all compute alike.
        """
        kinds = zip(self.layers_by_attention, self.masks(problem), strict=True)
        attention = sum(layers * account.model_flops(replace(problem, mask=mask), phase) for layers, mask in kinds)
        if not self.model:
            return attention
        share = self.model.part(self.degree, self.degree_key)
        matrices = share.layer_matrices(problem).items()
        of_a_layer = sum(a * b / (self.degree if name in WHOLE else 1) for name, (a, b) in matrices)
        tokens = share.layers * of_a_layer * problem.seqlen + share.outputs * share.width
        return attention + 2.0 * problem.batch * tokens

    def gate(self, spec: Spec, context: RankContext) -> GateErrors:
        """Errors of out of the first chunk, one in the middle and the last, over a cache that grows."""
        from sp_bench.workload.prefill_step import gate

        return gate(spec, context)

    def prepare(self, spec: Spec, context: RankContext) -> Step:
        """Make this rank's random q, k and v, an empty cache behind the cached tokens, and an engine for each chunk."""
        from sp_bench.workload.prefill_step import PrefillStep

        return PrefillStep(spec, context)


def _chunking(config: Mapping[str, Any]) -> Chunking:
    return read(Chunking, config["prefill"], "prefill")


def _refuse_mask(name: str, *taken: str) -> None:
    if name not in taken:
        rule = "is not that of a prompt: each chunk sees what is cached, or the end of it, and itself causally"
        works = f"mask={CAUSAL.name}, {' or '.join(LIMITED)} would work"
        raise RequestError(f"mask={name}", rule, works)
