"""workload=train and workload=dit: a training step of a transformer with sequence-parallel attention.

All ranks share one sequence (or `batch` of them). Each rank has all parameters, or a shard of each (FSDP); gradients
are summed over all ranks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from sp_bench import account
from sp_bench.cluster.device import DeviceCosts
from sp_bench.errors import RequestError
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.reading import Count, Positive, Section, Tokens, read
from sp_bench.records.quantities import TrainingStep
from sp_bench.workload.base import RankContext, Step, Workload
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.model import NONE, Model, shard_elements

UPDATE = "update"
"""The phase after the backward: gradients are summed over the ranks, and the optimizer steps."""
SYNC = ("gradients", "all_reduce", "sum")
"""The key of what the summation of gradients sends."""
GATHER = ("parameters", "all_gather", "shards")
"""The key of what gathers of sharded parameters send."""
REDUCE = ("gradients", "reduce_scatter", "sum")
"""The key of what the summation of gradients sends to the ranks that own their shards."""
NORM = ("norm", "all_reduce", "sum")
"""The key of what the loss and the norm of sharded gradients send."""
DENSE_BACKWARD = 2.0
"""FLOPs of the backward of a matrix product over those of its forward."""
MOMENTS = 2
"""Numbers that AdamW keeps beside each parameter."""


class Training(Section, frozen=True, kw_only=True):
    """The section `train` of conf/config.yaml."""

    recompute: Literal["none", "attention", "full"]
    """What of a layer the backward computes again (transformer.Recompute)."""
    parameters: Literal["auto", "replicated", "sharded"]
    """sharded: parameters, gradients and moments are split over all ranks (FSDP). auto: only where they don't fit."""
    tensor_parallel: Count = 1
    """How many GPUs share the tokens of a rank of the attention: each has a part of the heads and of the matrices."""
    loss_chunk: Tokens
    """The tokens whose logits exist at a time."""
    learning_rate: Positive
    task: Annotated[str, Meta(description="the data of a decoder", examples=["recall", "copy"])]


@dataclass(frozen=True, kw_only=True)
class Train(Workload):
    """Forward, backward and update of a decoder (conf/model) on a seeded task.

    With tensor parallelism, the problem is that of one GPU of each group: it has the GPU's heads, and a rank a group.
    """

    name: ClassVar[str] = "train"
    kind: ClassVar[str] = "decoder"
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward_backward": (*PHASES, UPDATE)}
    keys: ClassVar[tuple[str, ...]] = ("train",)

    model: Model
    training: Training
    sharded: bool = False
    """Whether parameters, gradients and moments are split over all ranks (`on`)."""

    @classmethod
    def build(cls, config: Mapping[str, Any], problem: Problem, **common: Any) -> Self:
        """The workload of a config. Raises RequestError without a model of its kind, or for invalid keys of `train`."""
        if config["model"]["name"] == NONE:
            example = "tiny" if cls.kind == "decoder" else "tiny_dit"
            raise RequestError(f"workload={cls.name}", "needs a model", f"model={example} would work")
        model, training = read(Model, config["model"], "model"), read(Training, config["train"], "train")
        if model.kind != cls.kind:
            other = "train" if model.kind == "decoder" else "dit"
            rule = f"is a {model.kind}, and workload={cls.name} trains a {cls.kind}"
            raise RequestError(f"model={model.name}", rule, f"workload={other} would work")
        if problem.head_dim % 2:
            rule = "RoPE turns pairs of elements of a head"
            raise RequestError(f"head_dim={problem.head_dim}", rule, f"head_dim={problem.head_dim + 1} would work")
        if training.task not in ("recall", "copy"):
            raise RequestError(f"train.task={training.task}", "there is no such task", "recall or copy would work")
        model.part(training.tensor_parallel)
        return cls(problem=problem, model=model, training=training, **common)

    def on(self, device: DeviceCosts) -> Self:
        """With parameters split if it says so, or doesn't say and they wouldn't fit the device's memory."""
        asked, memory_bytes = self.training.parameters, device.memory_bytes
        states = (2 + MOMENTS) * self._wide * self.share.parameters(self.problem)
        sharded = asked == "sharded" or (asked == "auto" and memory_bytes is not None and memory_bytes < states)
        return replace(self, sharded=sharded and self.problem.n > 1)

    @property
    def _wide(self) -> int:
        """Bytes of a parameter, a gradient or a moment."""
        return DTYPE_BYTES[self.problem.accumulate_dtype]

    @classmethod
    def tensor_parallel(cls, config: Mapping[str, Any]) -> int:
        """The degree that train.tensor_parallel asks for."""
        return read(Training, config["train"], "train").tensor_parallel

    @property
    def gpus(self) -> int:
        """The number of GPUs: those of all tensor-parallel groups."""
        return self.problem.n * self.training.tensor_parallel

    @cached_property
    def share(self) -> Model:
        """What a GPU has of the model before parameters are split over the ranks."""
        return self.model.part(self.training.tensor_parallel)

    @classmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """Forward and backward of the attention."""
        return PHASES

    @property
    def plan_phases(self) -> tuple[str, ...]:
        return PHASES

    def times_executed(self, phase: str) -> Mapping[str, int]:
        """Each layer's plan once; the forward's again in the backward if a whole layer is recomputed."""
        again = {"forward": self.model.layers} if self.training.recompute == "full" else {}
        return {"forward": {"forward": self.model.layers}, "backward": again | {"backward": self.model.layers}}.get(
            phase, {}
        )

    def sent_otherwise(self, phase: str) -> Mapping[tuple[str, ...], int]:
        """Bytes each rank sends to sum the gradients and the loss, by a ring: 2 (n - 1) / n of them.

        Where they are split: to gather each layer's parameters, forward and backward, and those outside the layers
        once, n - 1 times a rank's shard; the same to reduce gradients, once each; and for the norm.
        """
        n, model, problem = self.problem.n, self.share, self.problem
        if n == 1:
            return {}
        if not self.sharded:
            size = (model.parameters(problem) + 1) * self._wide
            return {SYNC: ring_bytes(size, n)} if phase == UPDATE else {}
        if phase == UPDATE:
            return {NORM: ring_bytes(2 * self._wide, n)}
        layers = (n - 1) * model.layers * shard_elements(model.layer_shapes(problem), n)
        outside = (n - 1) * shard_elements(model.outside_shapes(), n)
        element = DTYPE_BYTES[problem.dtype]
        if phase == "forward":
            return {GATHER: element * (layers + outside)}
        return {GATHER: element * layers, REDUCE: self._wide * (layers + outside)}

    def described(self) -> TrainingStep:
        """The model, and what is recomputed and split."""
        degree = self.training.tensor_parallel
        heads = {"heads": self.problem.heads * degree, "kv_heads": self.problem.kv_heads * degree}
        return TrainingStep(
            model=self.model.name,
            parameters=self.model.parameters(replace(self.problem, **heads)),
            recompute=self.training.recompute,
            sharded=self.sharded,
            tensor_parallel=degree,
        )

    def refuse_run(self, mode: str) -> None:
        """Raises RequestError for a peer, and for mode=alone."""
        if self.peer:
            rule = f"workload={self.name} trains with the suite's own methods"
            raise RequestError(f"method=peer impl={self.peer.impl}", rule, "method=ring would work")
        if mode != "simulate" and self.training.tensor_parallel > 1:
            rule = "is simulated only: measured ranks have whole matrices"
            raise RequestError(
                f"train.tensor_parallel={self.training.tensor_parallel}", rule, "mode=simulate would work"
            )
        if mode == "alone":
            rule = f"executes attention, not workload={self.name}"
            raise RequestError("mode=alone", rule, "mode=measure would work")

    def held_bytes(self, device: DeviceCosts) -> Mapping[str, int]:
        """Bytes of parameters, gradients, optimizer, activations and the loss (costs.TrainingCosts)."""
        from sp_bench.workload.costs import TrainingCosts

        return TrainingCosts(workload=self, device=device).held_bytes()

    def flops(self, phase: str) -> float:
        """6 N D, and the attention's as account.model_flops counts them. What is recomputed doesn't count.

        With tensor parallelism, of one GPU of each group.
        """
        if phase == UPDATE:
            return 0.0
        dense = self.share.dense_flops(self.problem) * (1 if phase == "forward" else DENSE_BACKWARD)
        return dense + self.model.layers * account.model_flops(self.problem, phase)

    def gate(self, context: RankContext) -> GateErrors:
        """Errors of the loss and of every parameter's gradient of a narrow model against one process in fp64."""
        from sp_bench.workload.train_gate import gate

        return gate(self, context)

    def prepare(self, context: RankContext) -> Step:
        """Make the parameters, the optimizer and an engine for the attention of all layers."""
        from sp_bench.workload.train_step import TrainStep

        return TrainStep(self, context)


class Dit(Train):
    """The same of a diffusion transformer (Peebles and Xie 2023), without a mask, on seeded noisy patches."""

    name: ClassVar[str] = "dit"
    kind: ClassVar[str] = "dit"


def ring_bytes(size: int, n: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes, to the nearest byte."""
    return round(2 * (n - 1) * size / n)
