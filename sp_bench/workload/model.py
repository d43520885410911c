"""The models of conf/model: shapes, parameters and FLOPs. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sp_bench.errors import RequestError
from sp_bench.plan.mask import Mask
from sp_bench.plan.problem import Problem
from sp_bench.reading import Count, Natural, Positive, Section, read

SMALL_TEXT = 24
"""Most text tokens of the correctness gate."""
NONE = "none"
"""The name of no model, for workload=attention."""


class Model(Section, frozen=True, kw_only=True):
    """A transformer. Its heads, kv_heads and head_dim are those of the request.

    decoder: tokens in, next tokens out; RMSNorm, RoPE, a SwiGLU of three matrices, an untied head (Touvron et al.
    2023). dit: noisy patches in, the noise out; LayerNorm modulated by the diffusion time, a GELU of two matrices
    (Peebles and Xie 2023, adaLN-Zero), and RoPE in place of DiT's fixed embedding of positions. Text enters the forward
    of a dit alone, at the model's width, and all ranks hold it (workload=dit phase=forward).
    """

    name: str
    kind: Literal["decoder", "dit"]
    layers: Count
    width: Count
    """Elements of a token's hidden state."""
    ffn: Count
    """Hidden elements of the feed-forward network."""
    vocab: Count | None = None
    """The number of different tokens of a decoder."""
    channels: Count | None = None
    """The elements of a patch of a dit."""
    rope_theta: Positive = 1e4
    full_every: Count | None = None
    """Every so many layers one sees all, and the others what the window or the chunks of the mask leave, as in GPT-OSS
    (2), Llama 4 (4) and Gemma 3 (6). None: all layers are alike."""
    sinks: bool = False
    """Whether the softmaxes of every layer of a decoder have a learned score by head besides those of keys, as in
    GPT-OSS; the key `sinks` of a config says so."""
    text: Literal["joint", "cross"] | None = None
    """How text enters a dit. joint: text tokens go through the layers beside patches, and all see all (MM-DiT, Esser et
    al. 2024). cross: each layer has a cross-attention from patches to text (Wan, 2025)."""
    text_tokens: Natural = 0
    """Text tokens of a sequence; 0 for none."""
    kv_latent: Count | None = None
    """Elements of the latent that a decoder's layers make keys and values of (multi-head latent attention, DeepSeek-V2,
    Liu et al. 2024), after a norm. With the key `latent_dim`, which is then as much, it travels; else keys do."""
    kv_rope: Natural = 0
    """With `kv_latent`, elements of a key that all heads share, the last ones: RoPE turns these and no others."""
    q_latent: Count | None = None
    """With `kv_latent`, elements of a latent that queries are made of, after a norm; None: of the hidden state."""
    left_out: str = ""
    """Parts of the model that it is named for that are not modelled, in words; records have it as a note."""
    modulation: Literal["layer", "shared"] = "layer"
    """The matrix of a dit that makes modulations of the diffusion time: one in each layer, or one for all and a bias in
    each (adaLN-single of PixArt, Chen et al. 2023)."""

    def __post_init__(self) -> None:
        """Raises RequestError where the kind's own size is missing, or the other kind's is given, and for layers of two
        kinds that would all be of one.
        """
        if self.full_every is not None and not 2 <= self.full_every <= self.layers:
            rule = f"leaves all of {self.layers} layers alike"
            works = "null would work" if self.layers < 2 else f"2 to {self.layers}, or null, would work"
            raise RequestError(f"full_every={self.full_every}", rule, works)
        needed, other = ("vocab", "channels") if self.kind == "decoder" else ("channels", "vocab")
        if getattr(self, needed) is None:
            raise RequestError(needed, f"is missing: a model of kind={self.kind} needs it", f"{needed}=64 would work")
        if getattr(self, other) is not None:
            rule = f"says nothing about a model of kind={self.kind}"
            raise RequestError(f"{other}={getattr(self, other)}", rule, f"{other}=null would work")
        if self.text_tokens and not self.text:
            rule = "says nothing about a model without text"
            raise RequestError(f"text_tokens={self.text_tokens}", rule, "0, or text=joint, would work")
        if self.kind == "decoder" and (self.text or self.modulation != "layer"):
            value = f"text={self.text}" if self.text else f"modulation={self.modulation}"
            raise RequestError(value, "is of models of kind=dit", f"{value.partition('=')[0]} left out would work")
        self._refuse_latents()

    def _refuse_latents(self) -> None:
        if self.kv_latent is None and (self.q_latent or self.kv_rope):
            value = f"q_latent={self.q_latent}" if self.q_latent else f"kv_rope={self.kv_rope}"
            raise RequestError(value, "is of layers whose keys are made of a latent", "kv_latent=512 would work")
        if self.kv_latent and self.kind != "decoder":
            rule = f"is of decoders, and {self.name} is a {self.kind}"
            raise RequestError(f"kv_latent={self.kv_latent}", rule, "kv_latent=null would work")
        if self.kv_latent and (self.kv_rope < 2 or self.kv_rope % 2):
            rule = "RoPE turns pairs of elements of a key that are not made of a latent, and there must be some"
            raise RequestError(f"kv_rope={self.kv_rope}", rule, f"kv_rope={max(self.kv_rope + 1, 2)} would work")

    @property
    def notes(self) -> tuple[str, ...]:
        """A remark on parts of the named model that it leaves out, for a reader of records; empty for none."""
        return (f"model={self.name} leaves out {self.left_out}",) if self.left_out else ()

    @property
    def modulated(self) -> bool:
        """Whether the layers are modulated by the diffusion time."""
        return self.kind == "dit"

    @property
    def crosses(self) -> bool:
        """Whether its layers have a cross-attention to text."""
        return self.text == "cross" and self.text_tokens > 0

    @property
    def joint_tokens(self) -> int:
        """Text tokens that go through the layers beside patches."""
        return self.text_tokens if self.text == "joint" else 0

    @property
    def outputs(self) -> int:
        """Elements of what a token is mapped to: logits, or a patch."""
        return self.vocab or self.channels or 0

    @property
    def layers_by_attention(self) -> tuple[int, ...]:
        """How many layers have each of Workload.attentions: all, or those that see all and the others."""
        full = self.layers // self.full_every if self.full_every else 0
        return (full, self.layers - full) if full else (self.layers,)

    def attention_of(self, layer: int) -> int:
        """The attention of a layer, by its place in `layers_by_attention`; layers count from 0."""
        return int(self.full_every is not None and (layer + 1) % self.full_every > 0)

    def layer_matrices(self, problem: Problem) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the matrices that each token of a layer is multiplied with."""
        q, kv = problem.heads * problem.head_dim, problem.kv_heads * problem.head_dim
        mlp = ("gate", "up") if self.kind == "decoder" else ("up",)
        if self.kv_latent:
            out, made = problem.heads * problem.value_dim, problem.heads * (problem.head_dim - self.kv_rope)
            matrices = {"q_down": (self.width, self.q_latent)} if self.q_latent else {}
            matrices |= {"q": (self.q_latent or self.width, q), "kv_down": (self.width, self.kv_latent + self.kv_rope)}
            matrices |= {"k_up": (self.kv_latent, made), "v_up": (self.kv_latent, out), "o": (out, self.width)}
        else:
            matrices = {"q": (self.width, q), "k": (self.width, kv), "v": (self.width, kv), "o": (q, self.width)}
        matrices |= {"cross_q": (self.width, q), "cross_o": (q, self.width)} if self.crosses else {}
        return matrices | dict.fromkeys(mlp, (self.width, self.ffn)) | {"down": (self.ffn, self.width)}

    def before(self, problem: Problem) -> tuple[str, ...]:
        """The names of the matrices that are used before the attention: all that make queries and keys, or without
        those that its blocks make keys and values with.
        """
        if not self.kv_latent:
            return ("q", "k", "v")
        return ("q_down", "q", "kv_down", *(() if problem.latent_dim else ("k_up", "v_up")))

    def text_matrices(self, problem: Problem) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the matrices that each text token of a cross-attention is multiplied with."""
        kv = problem.kv_heads * problem.head_dim
        return dict.fromkeys(("cross_k", "cross_v"), (self.width, kv)) if self.crosses else {}

    def layer_shapes(self, problem: Problem) -> list[tuple[int, int]]:
        """(rows, elements of a row) of each parameter of one layer."""
        both = self.layer_matrices(problem) | self.text_matrices(problem)
        matrices = [(outputs, inputs) for inputs, outputs in both.values()]
        if not self.modulated:
            norms = [(size, 1) for size in (self.width, self.width, self.q_latent, self.kv_latent) if size]
            return matrices + norms + [(problem.heads, 1)] * self.sinks
        return matrices + (self._with_bias(6) if self.modulation == "layer" else [(6 * self.width, 1)])

    def outside_shapes(self) -> list[tuple[int, int]]:
        """The same of the parameters outside the layers: embedding, head, the last norm, the diffusion time's."""
        head = (self.outputs, self.width)
        if self.modulated:
            shared = [(6 * self.width, self.width)] if self.modulation == "shared" else []
            times = [*self._with_bias(1), *self._with_bias(1), *self._with_bias(2)]
            return [(self.width, self.outputs), head, *times, *shared]
        return [head, head, (self.width, 1)]

    def _with_bias(self, widths: int) -> list[tuple[int, int]]:
        return [(widths * self.width, self.width), (widths * self.width, 1)]

    def layer_parameters(self, problem: Problem) -> int:
        """Parameters of one layer."""
        return shard_elements(self.layer_shapes(problem), 1)

    def outside_parameters(self) -> int:
        """Parameters outside the layers."""
        return shard_elements(self.outside_shapes(), 1)

    def parameters(self, problem: Problem, degree: int = 1) -> int:
        """Parameters of the whole model, whose heads are those of `degree` problems."""
        of_keys = problem.kv_heads * (1 if problem.latent_dim else degree)
        problem = replace(problem, heads=problem.heads * degree, kv_heads=of_keys)
        return self.layers * self.layer_parameters(problem) + self.outside_parameters()

    def dense_flops(self, problem: Problem) -> float:
        """FLOPs of the forward pass's matrices on all tokens: 2 N D, N without embeddings that are looked up."""
        per_token = self.layers * sum(a * b for a, b in self.layer_matrices(problem).values())
        per_token += self.outputs * self.width * (2 if self.modulated else 1)
        return 2.0 * per_token * problem.batch * problem.seqlen

    def part(self, degree: int, key: str = "train.tensor_parallel") -> Model:
        """The part that each of `degree` tensor-parallel GPUs has (Shoeybi et al. 2019); heads are the problem's.

        Raises RequestError, naming the `key` that asks for the degree, if its matrices can't be split.
        """
        if degree == 1:
            return self
        if self.vocab is None:
            rule = f"splits a decoder, and {self.name} is a {self.kind}"
            raise RequestError(f"{key}={degree}", rule, f"{key}=1 would work")
        for name, size in (("ffn", self.ffn), ("vocab", self.vocab)):
            if size % degree:
                raise RequestError(f"{key}={degree}", f"must divide {name}={size}", "1 would work")
        return self.replace(ffn=self.ffn // degree, vocab=self.vocab // degree)

    def small(self) -> Model:
        """The model of the correctness gate: as this one, but narrow and of two layers, of both kinds if it has two."""
        sizes = {name: min(getattr(self, name) or 64, 64) for name in ("width", "ffn")}
        own = {"vocab": 64} if self.kind == "decoder" else {"channels": 16}
        every = 2 if self.full_every else None
        sizes |= {"layers": min(self.layers, 2), "text_tokens": min(self.text_tokens, SMALL_TEXT)}
        own |= {"q_latent": min(self.q_latent, 64)} if self.q_latent else {}
        return self.replace(full_every=every, **sizes, **own)


def decoder_of(config: Mapping[str, Any], what: str) -> Model | None:
    """The decoder of a config; None for no model. Raises RequestError for another kind, as `what` is a decoder's."""
    if config["model"]["name"] == NONE:
        return None
    model = read(Model, config["model"], "model")
    if model.kind != "decoder":
        rule = f"is a {model.kind}, and {what} a decoder"
        raise RequestError(f"model={model.name}", rule, "model=llama3_8b would work")
    return model


WHOLE = ("q_down", "kv_down")
"""The matrices that every tensor-parallel GPU has whole: latents are of all heads."""


def mask_of_full_layers(config: Mapping[str, Any], mask: Mask) -> Mask:
    """The mask of the layers that see all, of a model with others among them.

    Raises RequestError if the mask has nothing that these leave out.
    """
    if mask.unlimited is None:
        rule = f"sets layers apart that see more than others, and under mask={mask.name} all see the same"
        works = "mask=window window=[127,0], mask=chunked chunk=8k, or model.full_every=null, would work"
        raise RequestError(f"model.full_every={config['model']['full_every']}", rule, works)
    return mask.unlimited


def refuse_keys(model: Model, problem: Problem, workload: str, otherwise: str) -> None:
    """Raise RequestError for heads that RoPE can't turn, and for keys, values or latents that the model's layers don't
    make: `otherwise` is what would take them.
    """
    if model.kv_latent:
        _refuse_other_latents(model, problem)
        return
    if problem.head_dim % 2:
        rule = "RoPE turns pairs of elements of a head"
        raise RequestError(f"head_dim={problem.head_dim}", rule, f"head_dim={problem.head_dim + 1} would work")
    for key, rule in (
        ("latent_dim", f"the layers of model={model.name} have projections to the keys of each head"),
        ("v_head_dim", f"the layers of model={model.name} have values as wide as keys, head_dim={problem.head_dim}"),
    ):
        if value := getattr(problem, key):
            works = f"{key}=null, {otherwise}, or a model with latents, such as model=minicpm3_4b, would work"
            raise RequestError(f"{key}={value}, workload={workload}", rule, works)


def _refuse_other_latents(model: Model, problem: Problem) -> None:
    if problem.head_dim <= model.kv_rope:
        rule = f"model={model.name} has kv_rope={model.kv_rope} elements of a key that no latent makes, and others"
        raise RequestError(f"head_dim={problem.head_dim}", rule, f"head_dim={model.kv_rope + 2} would work")
    for key, its in (("latent_dim", model.kv_latent), ("rope_dim", model.kv_rope)):
        if problem.latent_dim and getattr(problem, key) != its:
            rule = f"the layers of model={model.name} make latents of {model.kv_latent} + {model.kv_rope} elements"
            works = f"{key}={its}, or latent_dim=null rope_dim=null kv_heads={problem.heads}, would work"
            raise RequestError(f"{key}={getattr(problem, key)}", rule, works)
    if not problem.latent_dim and problem.kv_heads != problem.heads:
        rule = f"model={model.name} makes keys of every head of a latent"
        works = f"kv_heads={problem.heads}, or latent_dim={model.kv_latent} rope_dim={model.kv_rope}, would work"
        raise RequestError(f"kv_heads={problem.kv_heads}", rule, works)


def shard_elements(shapes: Sequence[tuple[int, int]], n: int) -> int:
    """Elements of the largest of n shards of parameters, (rows, elements of a row) each, that are split by rows."""
    return sum(math.ceil(rows / n) * elements for rows, elements in shapes)
