"""FLOPs and memory of a training step beside its attention, from its shapes. Imports no torch.

Time: that of the layers (layer_costs), of their backward, the loss and the optimizer, by the same rules. Memory: what
trainer.py and transformer.py hold, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sp_bench.errors import RequestError
from sp_bench.plan.problem import DTYPE_BYTES
from sp_bench.plan.tensors import KV
from sp_bench.workload.layer_costs import LayerCosts
from sp_bench.workload.model import shard_elements
from sp_bench.workload.training import MOMENTS, UPDATE, Training, sent_otherwise

ELEMENTWISE_BACKWARD = 2.0
"""Memory moved by the backward of elementwise operations over that of their forward."""
OPTIMIZER_MOVES = 9
"""Numbers that clipping and AdamW read and write for each parameter: the gradient twice and once, p, m and v both."""


@dataclass(frozen=True, kw_only=True)
class TrainingCosts(LayerCosts):
    """A training step on one GPU of the rank that owns the most tokens."""

    training: Training
    sharded: bool
    """Whether parameters, gradients and moments are split over the ranks of all data-parallel groups."""
    turns: int = 1
    """How often a rank computes forward and backward in a step."""

    @property
    def gpus(self) -> int:
        """The number of GPUs: those of all tensor-parallel and data-parallel groups."""
        return self.ranks * self.degree

    @property
    def ranks(self) -> int:
        """The ranks of all data-parallel groups, over which gradients are summed and parameters split."""
        return self.problem.n * self.training.data_parallel

    @property
    def _wide(self) -> int:
        """Bytes of a parameter, a gradient or a moment."""
        return DTYPE_BYTES[self.problem.accumulate_dtype]

    # Time

    def layer_s(self, phase: str) -> float:
        """Seconds of a layer's forward or backward without its attention; of the backward with what it recomputes."""
        if phase == "forward":
            return self.before_s() + self.after_s()
        return self.again_s() + self.before_backward_s() + self.after_backward_s()

    def again_s(self) -> float:
        """Seconds of what a layer's backward computes again of the forward, without the attention."""
        return 0.0 if self.training.recompute == "none" else self.before_s() + self.after_s()

    def before_backward_s(self) -> float:
        """Seconds of the backward of what is before the attention, in place of the forward's."""
        elements, kernels = self._before
        moved_s = self._through_memory_s(ELEMENTWISE_BACKWARD * elements, 2 * kernels)
        return self.dense_s(self.share.before(self.problem), times=2) + moved_s

    def after_backward_s(self) -> float:
        """The same of what is after the attention."""
        model = self.share
        elements = ELEMENTWISE_BACKWARD * (8 * model.width + (3 if model.kind == "decoder" else 2) * model.ffn)
        return self.dense_s(("o", "gate", "up", "down"), times=2) + self._through_memory_s(elements, kernels=8)

    def loss_s(self) -> float:
        """Seconds of the head and the loss with their gradients: three products, and logits through memory four times.

        The embedding is read and its gradient written.
        """
        model = self.share
        logits_s = self._moved_s(4 * self._wide * self._tokens * model.outputs)
        return 3 * self._product_s(model.width, model.outputs) + logits_s + self._through_memory_s(4 * model.width)

    def optimizer_s(self) -> float:
        """Seconds of clipping and the optimizer on this rank's parameters."""
        moved = OPTIMIZER_MOVES * self._wide * self._own_parameters
        return self.crowding * (self.device.launch_s + moved / self.device.memory_bytes_per_s)

    @property
    def copied_s(self) -> float:
        """Seconds of copying what one layer keeps to the host, or back; 0 if it stays on the device.

        Raises RequestError where the device's way to its host isn't known.
        """
        if not self.training.offload:
            return 0.0
        rate = self.device.host_bytes_per_s
        if rate is None:
            rule = f"the way from {self.device.name} to its host is not known"
            raise RequestError("train.offload=true", rule, "cluster.device.host_bytes_per_s=2.5e10 would work")
        return self.device.layer_launch_s + self._layer_kept_bytes / rate

    # Collectives: bytes that each rank sends in a ring

    @property
    def _layer_sent(self) -> int:
        """Elements that each rank sends in a collective of a layer's parameters; 0 if they are not split."""
        n, shapes = self.ranks, self.share.layer_shapes(self.problem)
        return self.sharded * (n - 1) * shard_elements(shapes, n)

    @property
    def gathered_bytes(self) -> float:
        """Sent to gather the parameters of a layer in the compute dtype; 0 if they are not split."""
        return self._element * self._layer_sent

    @property
    def reduced_bytes(self) -> float:
        """Sent to reduce the gradients of a layer to the ranks that own them; 0 if they are not split."""
        return self._wide * self._layer_sent

    @property
    def outside_bytes(self) -> float:
        """Sent to gather and reduce the parameters outside the layers, which are kept from forward to backward."""
        n, shapes = self.ranks, self.share.outside_shapes()
        return self.sharded * (n - 1) * (self._element + self._wide) * shard_elements(shapes, n)

    @property
    def summed_bytes(self) -> float:
        """Sent to sum all gradients over the ranks where each has all of them."""
        sent = sent_otherwise(UPDATE, self.share, self.problem, sharded=False, groups=self.training.data_parallel)
        return (not self.sharded) * sum(sent.values())

    @property
    def tensor_sums(self) -> dict[str, int]:
        """How many such sums there are: in a layer's forward and backward, and outside the layers.

        Two follow row-parallel matrices in the forward, two column-parallel ones in the backward, which has the
        forward's again if it is recomputed. Outside, they are of the embedding and of the head's input gradient.
        """
        again = 0 if self.training.recompute == "none" else 2
        return {"forward": 2, "backward": 2 + again, "outside": 2}

    # Memory

    @property
    def _own_parameters(self) -> int:
        model, n = self.share, self.ranks if self.sharded else 1
        return model.layers * shard_elements(model.layer_shapes(self.problem), n) + shard_elements(
            model.outside_shapes(), n
        )

    def held_bytes(self) -> dict[str, int]:
        """Bytes on a rank by kind, without the transient ones of the attention."""
        own, model = self._own_parameters, self.share
        chunk = min(self.training.loss_chunk, self._tokens)
        loss = (2 * self._wide + self._element) * chunk * model.outputs
        gathered = 2 * model.layer_parameters(self.problem) + model.outside_parameters()
        return {
            "parameters": round(self._wide * own),
            "gradients": round(self._wide * own),
            "optimizer": round(MOMENTS * self._wide * own),
            "activations": self._activation_bytes(),
            "gathered": round(self.sharded * self._element * gathered),
            "loss": round(loss if model.kind == "decoder" else 0),
        }

    @property
    def host_bytes(self) -> int:
        """Bytes of activations in the host's memory for a GPU."""
        return self.training.offload * round(self.model.layers * self._layer_kept_bytes)

    def _activation_bytes(self) -> int:
        """Bytes on the device that the backward keeps from the forward (transformer.Recompute).

        If the rest is on the host, those of two layers: one is copied while the next computes.
        """
        model = self.share
        last = 3 * model.width  # before and after the last norm, and the gradient that the loss has made
        head = self._wide * model.outputs * model.width * (model.kind == "decoder")  # its gradient, made with the loss
        layers = min(2, model.layers) if self.training.offload else model.layers
        return round(layers * self._layer_kept_bytes + self._element * self._tokens * last + head)

    @property
    def _layer_kept_bytes(self) -> float:
        """Bytes that a layer keeps."""
        problem, model = self.problem, self.share
        lse = DTYPE_BYTES[problem.accumulate_dtype] * problem.heads / self._element
        kv = problem.kv_heads * sum(problem.width(field) for field in KV.fields)
        attention = problem.heads * (problem.head_dim + problem.value_dim) + kv + lse
        mlp = (4 if model.kind == "decoder" else 2) * model.ffn
        # Latents before and after their norms; those that travel are among the attention's inputs.
        latents = 2 * (model.q_latent or 0) + (1 if problem.latent_dim else 2) * (
            (model.kv_latent or 0) + model.kv_rope
        )
        layer = {
            "full": model.width,
            "attention": model.width + attention,
            "none": 4 * model.width + latents + attention + mlp,
        }[self.training.recompute]
        return self._element * self._tokens * layer


def too_large(costs: TrainingCosts, held: Mapping[str, int]) -> RequestError:
    """The error for a step that doesn't fit the device: how much is missing, of what kinds it is, and what would help.

    `held` has the bytes of a rank by kind.
    """
    need, have, device = sum(held.values()), costs.device.memory_bytes or 0, costs.device
    kinds = ", ".join(f"{kind} {size / 1e9:.3g}" for kind, size in sorted(held.items(), key=lambda x: -x[1]) if size)
    rule = f"a rank needs {need / 1e9:.4g} GB and {device.name} has {have / 1e9:.4g}: {(need - have) / 1e9:.3g} GB are "
    rule += f"missing. In GB: {kinds}"
    shorter, more = "a shorter seqlen, or more GPUs,", ["train.recompute=full"] * (costs.training.recompute != "full")
    more += ["train.offload=true"] * (not costs.training.offload and costs.device.host_bytes_per_s is not None)
    would_work = {
        "activations": f"a shorter seqlen, more GPUs, or {' or '.join(more)}" if more else shorter,
        "attention": shorter,
        "gathered": "a smaller model",
        "loss": "a smaller train.loss_chunk",
    }.get(
        max(held, key=lambda kind: held[kind]),
        "more GPUs" if costs.sharded else "train.parameters=sharded on more GPUs",
    )
    return RequestError(f"seqlen={costs.problem.seqlen} on gpus={costs.gpus}", rule, f"{would_work} would work")
