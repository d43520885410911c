"""workload=decode: attention of a decode step, new tokens of many sequences over their caches. Imports no torch.

Without a model it is that of one layer, with one that of all its layers, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from sp_bench.peers.peer import Peer
from sp_bench.plan.caches import Caches
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.mask import CAUSAL, Mask
from sp_bench.plan.method import Method
from sp_bench.plan.problem import Problem, heads_of_a_key_head
from sp_bench.plan.tensors import KV
from sp_bench.reading import Count, Section, Tokens, read
from sp_bench.records.quantities import DecodeStep, Prompt, TrainingStep
from sp_bench.workload.attention import Attention
from sp_bench.workload.base import SINKS
from sp_bench.workload.model import Model, decoder_of

NEW_TOKENS, CACHED, CACHED_HERE = 1, 2**17, 2**9
"""New tokens of each sequence and keys of its cache where a config doesn't say; the last on this machine."""


class DecodeSection(Section, frozen=True, kw_only=True):
    """The section `decode` of a config."""

    tensor_parallel: Count = 1
    latent: bool = False
    page_tokens: Tokens | None = None


@dataclass(frozen=True, kw_only=True)
class Decode(Attention):
    """The attention for the next token, or the next few, of each sequence of a batch.

    `seqlen` are the new tokens of a sequence, `kv_seqlen` the keys of its cache with theirs, `batch` the sequences.
    With mask=document each document of `data` is the cache of one sequence, and kv_seqlen the keys of all of them.
    Under a window a layer keeps the last keys of each sequence alone, which are assigned like a cache of so many.
    Ranks share the caches by tokens (plan.caches); `tensor_parallel` GPUs share the heads of each rank. A model whose
    layers make keys of latents keeps these, and its queries absorb the matrices.
    """

    name: ClassVar[str] = "decode"
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward": ("forward",)}
    keys: ClassVar[tuple[str, ...]] = ("decode", SINKS)
    degree_key: ClassVar[str] = "decode.tensor_parallel"
    baselines: ClassVar[Mapping[str, str]] = {"ring": "pass_q"}

    degree: int = 1
    """GPUs that share a rank's part of the caches, with a part of the heads each."""
    model: Model | None = None
    """The model all of whose layers' attentions are a step; None: that of one layer."""

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Decode:
        sinks, degree = read(bool, config.get(SINKS, False), SINKS), cls.tensor_parallel(config)
        return cls(phases=phases, sinks=sinks, degree=degree, model=decoder_of(config, "tokens are those of"))

    @classmethod
    def tensor_parallel(cls, config: Mapping[str, Any]) -> int:
        return _section(config).tensor_parallel

    @classmethod
    def filled(cls, config: Mapping[str, Any], *, here: bool) -> dict[str, Any]:
        """One new token a sequence, a usual cache, and the only phase that there is, where a config has null."""
        usual = {"phase": "forward", "seqlen": NEW_TOKENS, "kv_seqlen": CACHED_HERE if here else CACHED}
        return {key: value for key, value in usual.items() if config[key] is None}

    @classmethod
    def mask_tokens(cls, values: Any) -> tuple[int, int | None]:
        """The keys of all sequences: lengths of documents are those of caches."""
        return values.kv_seqlen or values.seqlen, None

    @classmethod
    def attention_of(
        cls, config: Mapping[str, Any], shape: Mapping[str, Any], mask: Mask, n: int
    ) -> tuple[dict[str, Any], Mask]:
        """The shape and mask of the attention: rows of all sequences, and the keys of all caches.

        Raises RequestError for a mask that no decode step has, or sequences that don't go together.
        """
        new, share = shape["seqlen"], heads_of_a_key_head(shape["heads"], shape["kv_heads"])
        cached = shape["kv_seqlen"] or new
        if isinstance(mask, Documents) and mask.causal:
            if mask.new:
                rule = "are those of parts of prompts: here lengths are those of caches"
                raise RequestError(f"data.cached={[sum(each) for each in mask.cached]}", rule, "[] would work")
            if shape["batch"] != 1:
                rule = "the sequences are the documents of data, and their number follows"
                raise RequestError(f"batch={shape['batch']}", rule, "batch=1 would work")
            if mask.seqlen != cached:
                rule = f"the caches of {len(mask.lengths)} sequences have {mask.seqlen} keys together"
                raise RequestError(f"kv_seqlen={cached}", rule, f"kv_seqlen={mask.seqlen} would work")
            lengths = mask.lengths
        elif mask is CAUSAL or (isinstance(mask, Window | Chunked) and mask.causal):
            lengths = (cached,) * shape["batch"]
        else:
            rule = f"a new token sees what is cached of its sequence, or the end of it, in workload={cls.name}"
            works = "mask=causal, a causal mask=window or chunked, or mask=document with data would work"
            raise RequestError(f"mask={mask.name}", rule, works)
        section = _section(config)
        caches = Caches(lengths, new, share, section.page_tokens)
        if isinstance(mask, Chunked):
            caches = caches.chunked(max(mask.lengths))
        elif isinstance(mask, Packed) and mask.left is not None:
            caches = caches.ends(mask.left)
        if section.page_tokens and new > 1 and caches.limits:
            rule = f"kernels read pages from their first key, and {new} new tokens have first keys of their own"
            works = "seqlen=1, or decode.page_tokens=null, would work"
            raise RequestError(f"decode.page_tokens={section.page_tokens} with mask={mask.name}", rule, works)
        caches.refuse_ranks(n)
        if shape.get("latent_dim"):  # what is held are latents, whoever makes keys of them elsewhere
            width = shape["latent_dim"] + shape["rope_dim"]
            shape = {
                **shape,
                "head_dim": width,
                "v_head_dim": shape["latent_dim"],
                "latent_dim": None,
                "rope_dim": None,
            }
            section = section.replace(latent=True)
        latent, kv_heads = section.latent, section.tensor_parallel * shape["kv_heads"]
        if latent and kv_heads > 1:
            rule = "all query heads share the one head of latent keys, which GPUs can't split"
            raise RequestError(f"decode.latent=true, kv_heads={kv_heads}", rule, "kv_heads=1 would work")
        heads = {"heads": shape["kv_heads"], "batch": 1, "absorbed": latent}
        return {**shape, **heads, "seqlen": caches.seqlen, "kv_seqlen": caches.kv_seqlen}, caches

    @classmethod
    def refuse_method(cls, method: Method | Peer) -> None:
        """Raise RequestError for a peer, or a method that would send caches."""
        takes = [each.name for each in REGISTRY.values() if each.takes_caches]
        works = f"method={', '.join(takes)} would work"
        if isinstance(method, Peer):
            raise RequestError(
                f"method=peer impl={method.impl}", f"workload={cls.name} runs the suite's methods", works
            )
        if not method.takes_caches:
            rule = f"would send keys, that is the caches, at every token of workload={cls.name}"
            raise RequestError(f"method={method.name}", rule, works)

    def refuse(self, problem: Problem, mode: str, peer: Peer | None) -> None:
        """Raise RequestError for what only simulations have, and for sinks of a rank alone."""
        super().refuse(problem, mode, peer)
        if self.model and mode != "simulate":
            rule = "is simulated only: measured ranks compute the attention of one layer"
            raise RequestError(f"model={self.model.name}", rule, "mode=simulate, or model=none, would work")
        if self.model and self.model.full_every and problem.mask.unlimited is None:
            rule = "sets layers apart that see more than others, and here all see their whole caches"
            works = "mask=window window=[127,0], mask=chunked chunk=8k, or model.full_every=null, would work"
            raise RequestError(f"model.full_every={self.model.full_every}", rule, works)
        if mode != "simulate" and self.degree > 1:
            rule = "is simulated only: measured ranks have all heads"
            raise RequestError(f"{self.degree_key}={self.degree}", rule, "mode=simulate would work")

    def cluster_of(self, cluster: Cluster, gpus: int) -> Cluster:
        """The first GPUs of all groups that share heads, which are consecutive.

        Raises RequestError where other GPUs of a group would use the same links, as they are not simulated.
        """
        shared = cluster.topology.shares_links
        if self.degree > 1 and shared:
            rule = f"has GPUs of a group in turn on what cluster={cluster.name} has once for several: {shared}"
            raise RequestError(f"{self.degree_key}={self.degree}", rule, "1, or a NIC for each GPU, would work")
        return cluster.tensor_parts(gpus, self.degree)[0]

    @property
    def layers(self) -> tuple[int, ...]:
        """How many layers have each of a step's attentions: all, or those that see all and the others."""
        return self.model.layers_by_attention if self.model else (1,)

    @property
    def notes(self) -> tuple[str, ...]:
        of = f"of all {sum(self.layers)} layers" if self.model else "of one layer"
        return (f"the attention {of}: of the time for an output token it is that share alone",)

    def attentions(self, problem: Problem) -> tuple[Problem, ...]:
        """That of all layers; of layers of two kinds that of those that see all, and that of the others."""
        whole = problem.mask.unlimited if len(self.layers) > 1 else None
        if not isinstance(whole, Caches):
            return (problem,)
        return replace(problem, kv_seqlen=whole.kv_seqlen, mask=whole), problem

    def times_executed(self, phase: str, attention: int = 0) -> Mapping[str, int]:
        """The plan of a kind of layers once for each of them."""
        return {phase: self.layers[attention]}

    def tokens(self, problem: Problem) -> int:
        """New tokens of a step, all sequences together."""
        return problem.mask.tokens if isinstance(problem.mask, Caches) else super().tokens(problem)

    def flops(self, phase: str, problem: Problem) -> float:
        """Model FLOPs of all layers' attentions on all ranks together."""
        kinds = zip(self.layers, self.attentions(problem), strict=True)
        return sum(layers * super(Decode, self).flops(phase, each) for layers, each in kinds)

    def decoded(self, problem: Problem) -> DecodeStep:
        """The sequences of a step, and the cache that a GPU holds of one layer: of that which sees most."""
        mask = problem.mask
        assert isinstance(mask, Caches), "attention_of made it"
        return DecodeStep(
            sequences=len(mask.lengths),
            cache_bytes=max(map(_cache_bytes, self.attentions(problem))),
            cache_page_tokens=mask.page,
            latent_keys=problem.absorbed or None,
            cache_tensor_parallel=self.degree if self.degree > 1 else None,
        )

    def described(self, problem: Problem) -> TrainingStep:
        if not self.model:
            return TrainingStep()
        full, *others = self.layers
        return TrainingStep(model=self.model.name, full_layers=full if others else None)

    def prompt(self, problem: Problem) -> Prompt:
        """The caches of all layers of a model."""
        return Prompt(kv_cache_bytes=self.every_cache_bytes(problem)) if self.model else Prompt()

    def every_cache_bytes(self, problem: Problem) -> int:
        """Bytes of keys and values of all layers on the GPU that holds most of them."""
        kinds = zip(self.layers, self.attentions(problem), strict=True)
        return sum(layers * _cache_bytes(each) for layers, each in kinds)

    def beside_bytes(self, problem: Problem, attention: Problem) -> int:
        """Bytes of the caches of all other layers beside one of the step's attentions."""
        return self.every_cache_bytes(problem) - _cache_bytes(attention) if self.model else 0


def _cache_bytes(problem: Problem) -> int:
    """Bytes of one layer's keys and values on the rank that holds most of them."""
    assert isinstance(problem.mask, Caches), "attention_of made it"
    keys = problem.mask.capacity(problem.n)
    return keys * sum(problem.token_bytes(field, wire=False) for field in KV.fields)


def _section(config: Mapping[str, Any]) -> DecodeSection:
    return read(DecodeSection, config["decode"], "decode")
