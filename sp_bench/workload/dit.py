"""workload=dit: a training step of a diffusion transformer, or with phase=forward one denoising step. Imports no torch.

Text tokens of a denoising step are on all ranks whole (Model.text). Where they are joint, a rank's queries are its
patches and all text, and text keys are one more block of its own (plan.mask.Joint), as in xDiT's attention with
replicated joint tensors (Fang et al. 2024). Cross-attention to text is local.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sp_bench.cluster.device import DeviceCosts
from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer
from sp_bench.plan.mask import FULL, Joint, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.plan.tensors import KV
from sp_bench.reading import read
from sp_bench.records.quantities import TrainingStep
from sp_bench.workload.base import RankContext, Spec, Step
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.model import NONE, Model
from sp_bench.workload.prefill_costs import ForwardCosts
from sp_bench.workload.train import Train
from sp_bench.workload.training import UPDATE, refuse_training

FORWARD = ("forward",)


@dataclass(frozen=True, kw_only=True)
class Dit(Train):
    """A training step of a diffusion transformer (Peebles and Xie 2023), without a mask, on seeded noisy patches.

    Its sequence has no text besides.
    """

    name: ClassVar[str] = "dit"
    kind: ClassVar[str] = "dit"
    keys: ClassVar[tuple[str, ...]] = ("train",)
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward": FORWARD, "forward_backward": (*PHASES, UPDATE)}

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Train:
        """The workload of a config: a denoising step if the forward alone is timed.

        Raises RequestError as Train does, and for a training step with cross-attention to text.
        """
        if phases == FORWARD:
            return Denoise.build(config, phases)
        workload = super().build(config, phases)
        if workload.model.crosses:
            rule = "has cross-attention to text, which training steps don't have"
            works = "phase=forward, or model.text_tokens=0, would work"
            raise RequestError(f"model={workload.model.name} phase={config['phase']}", rule, works)
        return workload

    @classmethod
    def attention_of(
        cls, config: Mapping[str, Any], shape: Mapping[str, Any], mask: Mask, n: int
    ) -> tuple[dict[str, Any], Mask]:
        """The shape and mask of the attention on n ranks; with joint text that of Joint."""
        if cls.phases_of(str(config["phase"])) != FORWARD or config["model"]["name"] == NONE:
            return dict(shape), mask
        if not (text := read(Model, config["model"], "model").joint_tokens):
            return dict(shape), mask
        if mask is not FULL:
            rule = "lets patches see all text, and text all patches"
            raise RequestError(f"mask={mask.name} with model.text=joint", rule, "mask=full would work")
        if shape["kv_seqlen"]:
            rule = "counts its keys itself: patches, and text"
            raise RequestError(f"kv_seqlen={shape['kv_seqlen']} with model.text=joint", rule, "null would work")
        seqlen = shape["seqlen"]
        return {**shape, "seqlen": seqlen + n * text, "kv_seqlen": seqlen}, Joint(text)


@dataclass(frozen=True, kw_only=True)
class Denoise(Train):
    """The forward of all layers on the patches of a latent, at one diffusion time: latency, and no gradients.

    Every rank has all parameters, in the compute dtype. With joint text the problem's queries are patches and, on each
    rank, all text, and its keys are the patches.
    """

    name: ClassVar[str] = "dit"
    kind: ClassVar[str] = "dit"
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward": FORWARD}
    simulated_as: ClassVar[str] = "prefill"
    degree: ClassVar[int] = 1

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Train:
        """The workload of a config. Raises RequestError as Train does, for keys of training and layers of two kinds."""
        refuse_training(config, f"workload={cls.name} phase=forward")
        workload = super().build(config, phases)
        if workload.model.full_every:
            rule = f"workload={cls.name} phase=forward has layers of one kind"
            works = "model.full_every=null, or phase=forward_backward, would work"
            raise RequestError(f"model.full_every={workload.model.full_every}", rule, works)
        return workload

    def refuse(self, problem: Problem, mode: str, peer: Peer | None) -> None:
        """Raise RequestError as Train does, and for patches that ranks can't share evenly beside joint text."""
        text, patches = self.model.joint_tokens, problem.keys.seqlen
        super().refuse(replace(problem, seqlen=patches, kv_seqlen=None) if text else problem, mode, peer)
        if text and patches % problem.n:
            rule = (
                f"must be a multiple of the {problem.n} ranks: each has as many patches beside the text that all hold"
            )
            raise RequestError(f"seqlen={patches}", rule, f"seqlen={patches // problem.n * problem.n} would work")

    def on(self, device: DeviceCosts, problem: Problem) -> Denoise:
        """The same: parameters are on every rank."""
        return self

    @property
    def layers_by_attention(self) -> tuple[int, ...]:
        """All layers, which are of one kind."""
        return (self.model.layers,)

    @classmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        return phases

    @property
    def plan_phases(self) -> tuple[str, ...]:
        return self.phases

    def times_executed(self, phase: str, attention: int = 0) -> Mapping[str, int]:
        return {phase: self.model.layers}

    def sent_otherwise(self, phase: str, problem: Problem) -> Mapping[tuple[str, ...], int]:
        """Nothing: neither text nor cross-attention to it is sent beside the plans."""
        return {}

    def tokens(self, problem: Problem) -> int:
        """The number of patches of all sequences, without text."""
        return problem.batch * problem.keys.seqlen

    def described(self, problem: Problem) -> TrainingStep:
        text = (self.model.text, self.model.text_tokens) if self.model.text_tokens else (None, None)
        parameters = self.model.parameters(problem)
        return TrainingStep(model=self.model.name, parameters=parameters, text=text[0], text_tokens=text[1])

    def costs(  # pyright: ignore[reportIncompatibleMethodOverride]  # of a forward alone
        self, problem: Problem, device: DeviceCosts, crowding: float = 1.0
    ) -> DenoiseCosts:
        return DenoiseCosts(model=self.model, problem=problem, device=device, crowding=crowding)

    def held_bytes(self, device: DeviceCosts, problem: Problem) -> Mapping[str, int]:
        costs = self.costs(problem, device)
        return {"parameters": costs.parameters_bytes, "activations": costs.activations_bytes}

    def flops(self, phase: str, problem: Problem) -> float:
        """FLOPs of the matrices on each token, 2 N D, and of attention among all of them. Text counts once, whoever
        computes it again.
        """
        model, patches = self.model, problem.keys.seqlen
        tokens, width = patches + model.joint_tokens, problem.heads * problem.head_dim
        seen = problem.pairs / (problem.seqlen * problem.keys.seqlen)
        pairs = tokens * (tokens * seen + model.text_tokens * model.crosses)
        of_text = sum(a * b for a, b in model.text_matrices(problem).values()) * model.text_tokens
        of_tokens = sum(a * b for a, b in model.layer_matrices(problem).values()) * tokens
        both_ends = 2 * model.outputs * model.width * patches
        matrices = 2.0 * (model.layers * (of_tokens + of_text) + both_ends)
        return problem.batch * (matrices + 4.0 * model.layers * pairs * width)

    def gate(self, spec: Spec, context: RankContext) -> GateErrors:
        """Errors of the patches, and of the attention of each layer, of a narrow model against one process in fp64."""
        from sp_bench.workload.dit_step import gate

        return gate(self, spec, context)

    def prepare(self, spec: Spec, context: RankContext) -> Step:
        from sp_bench.workload.dit_step import DenoiseStep

        return DenoiseStep(self, spec, context)


@dataclass(frozen=True, kw_only=True)
class DenoiseCosts(ForwardCosts):
    """One denoising step: its tokens are the rank's patches and, if text is joint, all text."""

    note: ClassVar[str] = (
        "matrix products at their best rate or memory speed; a denoising step alone, without the encoding of text,"
        " the sampler and the decoding of latents"
    )
    sources: ClassVar[str] = (
        "parameters, and what is there at one time: the attention's from its plans, or the activations of a"
        " feed-forward"
    )
    would_fit: ClassVar[str] = "more GPUs, or a smaller seqlen or batch,"

    def before_s(self) -> float:
        """Seconds of a layer before its attention, with its modulations of the diffusion time."""
        return super().before_s() + self._modulations_s(6 if self.model.modulation == "layer" else 0)

    def after_s(self) -> float:
        """Seconds of a layer after its attention, with its cross-attention to text."""
        return super().after_s() + self._crossed_s()

    def embedding_s(self) -> float:
        """Seconds of what is before the layers: the matrix of patches, the embedding of the time, and the modulations
        that layers share.
        """
        times_s = 2 * self._modulations_s(1) + self._modulations_s(6 if self.model.modulation == "shared" else 0)
        return times_s + self._product_s(self.model.outputs, self.model.width, tokens=self._patches)

    def head_s(self) -> float:
        """Seconds of the last norm with its modulations, and of the matrix to patches."""
        norm_s = self._through_memory_s(2 * self.model.width)
        head_s = self._product_s(self.model.width, self.model.outputs, tokens=self._patches)
        return self._modulations_s(2) + norm_s + head_s

    @property
    def hidden_bytes(self) -> int:
        """Bytes beside an attention: the residual stream, and the keys and values of joint text."""
        of_text = sum(self.problem.width(field) for field in KV.fields) * self.problem.kv_heads
        return super().hidden_bytes + self._element * self.problem.batch * self.model.joint_tokens * of_text

    @property
    def _patches(self) -> int:
        return self.problem.batch * self.problem.keys.most

    def _modulations_s(self, widths: int) -> float:
        """Seconds of so many modulations of each sequence: reading their matrix is most of it."""
        return (
            self._product_s(self.model.width, widths * self.model.width, tokens=self.problem.batch) if widths else 0.0
        )

    def _crossed_s(self) -> float:
        """Seconds of a cross-attention: its norm, matrices of tokens and of text, one block, and the residual."""
        model, problem = self.model, self.problem
        if not model.crosses:
            return 0.0
        text = problem.batch * model.text_tokens
        products_s = self.dense_s(("cross_q", "cross_o"))
        products_s += sum(self._product_s(*shape, tokens=text) for shape in model.text_matrices(problem).values())
        block = Region(RegionKind.FULL, range(problem.queries.most), range(model.text_tokens))
        block_s = self.device.regions_s(_with_all_heads(problem), "forward", [block])
        return products_s + self.crowding * block_s + self._through_memory_s(5 * model.width, kernels=2)


def _with_all_heads(problem: Problem) -> Problem:
    """The problem as a rank has it whose blocks have all heads."""
    return replace(problem.in_one_slice, layout=replace(problem.layout, head_parallel=1), padded=None)
