"""workload=train: a training step of a transformer with sequence-parallel attention.

All ranks share one sequence (or `batch` of them). Each rank has all parameters, or a shard of each (FSDP); gradients
are summed over all ranks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from sp_bench import account
from sp_bench.cluster.device import DeviceCosts
from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer
from sp_bench.plan.mask import Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.reading import read
from sp_bench.records.quantities import TrainingStep
from sp_bench.workload import training
from sp_bench.workload.base import SINKS, RankContext, Spec, Step, Workload
from sp_bench.workload.costs import TrainingCosts
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.model import NONE, Model, mask_of_full_layers, refuse_keys
from sp_bench.workload.training import FLOAT8, MOMENTS, UPDATE, Training

DENSE_BACKWARD = 2.0
"""FLOPs of the backward of a matrix product over those of its forward."""


@dataclass(frozen=True, kw_only=True)
class Train(Workload):
    """Forward, backward and update of a decoder (conf/model) on a seeded task.

    With tensor parallelism, the problem is that of one GPU of each group: it has the GPU's heads, and a rank a group.
    """

    name: ClassVar[str] = "train"
    kind: ClassVar[str] = "decoder"
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward_backward": (*PHASES, UPDATE)}
    keys: ClassVar[tuple[str, ...]] = ("train", SINKS)
    simulated_as: ClassVar[str] = "training"

    model: Model
    training: Training
    sharded: bool = False
    """Whether parameters, gradients and moments are split over all ranks (`on`)."""
    turns: int = 1
    """How often a rank computes forward and backward in a step, each time on other sequences (`on`)."""

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Self:
        """The workload of a config. Raises RequestError without a model of its kind, or for invalid keys of `train`."""
        if config["model"]["name"] == NONE:
            example = "tiny" if cls.kind == "decoder" else "tiny_dit"
            raise RequestError(f"workload={cls.name}", "needs a model", f"model={example} would work")
        model, asked = read(Model, config["model"], "model"), read(Training, config["train"], "train")
        model = model.replace(sinks=read(bool, config.get(SINKS, False), SINKS))
        if model.kind != cls.kind:
            other = "train" if model.kind == "decoder" else "dit"
            rule = f"is a {model.kind}, and workload={cls.name} trains a {cls.kind}"
            raise RequestError(f"model={model.name}", rule, f"workload={other} would work")
        if asked.task not in ("recall", "copy"):
            raise RequestError(f"train.task={asked.task}", "there is no such task", "recall or copy would work")
        model.part(asked.tensor_parallel)
        return cls(phases=phases, model=model, training=asked)

    def refuse(self, problem: Problem, mode: str, peer: Peer | None) -> None:
        """Raise RequestError for heads that RoPE can't turn, other keys, narrow values, a peer, and mode=alone."""
        if problem.kv_seqlen:
            rule = f"workload={self.name} trains on whole sequences, seqlen={problem.seqlen}"
            works = f"{problem.without_history}, or workload=attention, would work"
            raise RequestError(f"kv_seqlen={problem.kv_seqlen}", rule, works)
        refuse_keys(self.model, problem, self.name, "workload=attention")
        if self.model.kv_latent and self.training.tensor_parallel > 1:
            rule = "every GPU has whole latents, and sums of their gradients over GPUs are not simulated"
            raise RequestError(f"train.tensor_parallel={self.training.tensor_parallel}", rule, "1 would work")
        if peer:
            rule = f"workload={self.name} trains with the suite's own methods"
            raise RequestError(f"method=peer impl={peer.impl}", rule, "method=ring would work")
        asked = self.training
        for value, simulated, rule in (
            (
                f"tensor_parallel={asked.tensor_parallel}",
                asked.tensor_parallel > 1,
                "measured ranks have whole matrices",
            ),
            (f"data_parallel={asked.data_parallel}", asked.data_parallel > 1, "measured ranks share one sequence"),
            (f"batch_tokens={asked.batch_tokens}", bool(asked.batch_tokens), "a measured step is of one batch"),
            (f"linears={asked.linears}", asked.linears != "compute", "measured matrices have the compute dtype"),
        ):
            if mode != "simulate" and simulated:
                raise RequestError(f"train.{value}", f"is simulated only: {rule}", "mode=simulate would work")
        turn = super().tokens(problem)
        if (asked.batch_tokens or turn) % turn:
            rule = f"must be a multiple of {turn}, batch x seqlen x train.data_parallel"
            raise RequestError(f"train.batch_tokens={asked.batch_tokens}", rule, f"{turn} would work")
        if mode == "alone":
            rule = f"executes attention, not workload={self.name}"
            raise RequestError("mode=alone", rule, "mode=measure would work")

    def refuse_device(self, kind: str) -> None:
        if self.training.offload and kind == "cpu":
            rule = "ranks on CPUs keep activations in the host's memory anyway"
            raise RequestError("train.offload=true", rule, "train.offload=false would work")

    def on(self, device: DeviceCosts, problem: Problem) -> Self:
        """With parameters split if it says so, or doesn't say and they wouldn't fit the device's memory."""
        asked, memory_bytes = self.training.parameters, device.memory_bytes
        states = (2 + MOMENTS) * DTYPE_BYTES[problem.accumulate_dtype] * self.share.parameters(problem)
        sharded = asked == "sharded" or (asked == "auto" and memory_bytes is not None and memory_bytes < states)
        turn = super().tokens(problem)
        turns = (self.training.batch_tokens or turn) // turn
        return replace(self, sharded=sharded and problem.n * self.groups > 1, turns=turns)

    def tokens(self, problem: Problem) -> int:
        return self.turns * super().tokens(problem)

    @classmethod
    def tensor_parallel(cls, config: Mapping[str, Any]) -> int:
        return read(Training, config["train"], "train").tensor_parallel

    @classmethod
    def data_parallel(cls, config: Mapping[str, Any]) -> int:
        return read(Training, config["train"], "train").data_parallel

    @property
    def notes(self) -> tuple[str, ...]:
        return self.model.notes

    @property
    def groups(self) -> int:
        return self.training.data_parallel

    @cached_property
    def share(self) -> Model:
        """The part of the model that a GPU has before parameters are split over the ranks."""
        return self.model.part(self.training.tensor_parallel)

    @classmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """Forward and backward of the attention."""
        return PHASES

    @property
    def plan_phases(self) -> tuple[str, ...]:
        return PHASES

    def attentions(self, problem: Problem) -> tuple[Problem, ...]:
        """The attention of all layers or, of layers of two kinds, of those that see all and of the others."""
        if not self.in_one_layout:
            return (problem,)
        assert problem.mask.unlimited is not None, "refused"
        return (replace(problem, mask=problem.mask.unlimited), problem)

    @property
    def in_one_layout(self) -> bool:
        """Whether layers are of two kinds: hidden states stay on their ranks from layer to layer."""
        return self.model.full_every is not None

    @classmethod
    def mask_of_layout(cls, config: Mapping[str, Any], mask: Mask) -> Mask:
        """That of the layers that see all, if there are some among others.

        Raises RequestError if the mask has nothing that these leave out.
        """
        return mask if config["model"].get("full_every") is None else mask_of_full_layers(config, mask)

    def times_executed(self, phase: str, attention: int = 0) -> Mapping[str, int]:
        """Each layer's plan once a turn; the forward's again in the backward if a whole layer is recomputed."""
        times = self.turns * self.model.layers_by_attention[attention]
        again = {"forward": times} if self.training.recompute == "full" else {}
        return {"forward": {"forward": times}, "backward": again | {"backward": times}}.get(phase, {})

    def sent_otherwise(self, phase: str, problem: Problem) -> Mapping[tuple[str, ...], int]:
        """Bytes each rank sends to sum gradients and the loss, and to gather parameters that are split."""
        sent = training.sent_otherwise(phase, self.share, problem, sharded=self.sharded, groups=self.groups)
        return {key: size * (1 if phase == UPDATE else self.turns) for key, size in sent.items()}

    def described(self, problem: Problem) -> TrainingStep:
        degree = self.training.tensor_parallel
        return TrainingStep(
            model=self.model.name,
            parameters=self.model.parameters(problem, degree),
            recompute=self.training.recompute,
            offload=self.training.offload,
            sharded=self.sharded,
            tensor_parallel=degree,
            data_parallel=self.groups,
            turns=self.turns,
            linears=self.training.linears,
            full_layers=self.model.layers_by_attention[0] if self.in_one_layout else None,
        )

    def costs(self, problem: Problem, device: DeviceCosts, crowding: float = 1.0) -> TrainingCosts:
        """FLOPs and memory of a step beside its attention, on a GPU of such a device."""
        return TrainingCosts(
            model=self.model,
            training=self.training,
            sharded=self.sharded,
            turns=self.turns,
            problem=problem,
            device=device,
            crowding=crowding,
            degree=self.training.tensor_parallel,
            narrow=self.training.linears == FLOAT8,
        )

    def held_bytes(self, device: DeviceCosts, problem: Problem) -> Mapping[str, int]:
        return self.costs(problem, device).held_bytes()

    def flops(self, phase: str, problem: Problem) -> float:
        """6 N D, and the attention's as account.model_flops counts them. What is recomputed doesn't count.

        Of one data-parallel group; with tensor parallelism, of one GPU of each of its groups.
        """
        if phase == UPDATE:
            return 0.0
        dense = self.share.dense_flops(problem) * (1 if phase == "forward" else DENSE_BACKWARD)
        layers = zip(self.model.layers_by_attention, self.attentions(problem), strict=True)
        return self.turns * (dense + sum(count * account.model_flops(each, phase) for count, each in layers))

    def gate(self, spec: Spec, context: RankContext) -> GateErrors:
        """Errors of the loss and of every parameter's gradient of a narrow model against one process in fp64."""
        from sp_bench.workload.train_gate import gate

        return gate(self, spec, context)

    def prepare(self, spec: Spec, context: RankContext) -> Step:
        """Make the parameters, the optimizer and an engine for the attention of all layers."""
        from sp_bench.workload.train_step import TrainStep

        return TrainStep(self, spec, context)
