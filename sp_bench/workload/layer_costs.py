"""Seconds of a transformer's layers beside their attention, forward, from their shapes. Imports no torch.

Matrix products at the device's rate for them or at memory speed, whichever is longer (a roofline); everything else at
memory speed, each operation once through memory, or at the speed that a calibration has found; a launch for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sp_bench.cluster.device import DeviceCosts
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.workload.model import Model
from sp_bench.workload.training import FLOAT8, ring_bytes


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Layers on one GPU of the rank that owns the most tokens."""

    model: Model
    problem: Problem
    """The problem of the attention."""
    device: DeviceCosts
    crowding: float = 1.0
    """How many times longer all takes because ranks share cores."""
    degree: int = 1
    """How many GPUs share the tokens of a rank, with a part of the heads and matrices each (tensor parallelism)."""
    narrow: bool = False
    """Whether matrix products are in float8, with a scale for each tensor."""

    @cached_property
    def share(self) -> Model:
        """The part of the model that a GPU has before parameters are split over the ranks."""
        return self.model.part(self.degree)

    @property
    def _tokens(self) -> int:
        return self.problem.batch * self.problem.queries.most

    @property
    def _element(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.problem.dtype]

    def before_s(self) -> float:
        """Seconds of a layer's forward before its attention: norm, q, k and v, RoPE."""
        elements, kernels = self._before
        return self.dense_s(self.share.before(self.problem)) + self._through_memory_s(elements, kernels)

    @property
    def _before(self) -> tuple[float, int]:
        """Elements of a token that a layer's operations before its attention, other than products, move through memory,
        and their kernels: norm and RoPE; of latents a norm each, and copies that put what is turned behind the rest.
        """
        problem, model = self.problem, self.share
        q, kv = problem.heads * problem.head_dim, problem.kv_heads * problem.head_dim
        if not model.kv_latent:
            return 2 * (model.width + q + kv), 3
        latents = (model.q_latent or 0) + 2 * model.kv_latent + model.kv_rope
        turned = (problem.heads + 1) * model.kv_rope
        made = 0 if problem.latent_dim else kv
        return 2 * (model.width + latents + turned + q + made), 6 + (model.q_latent is not None) + (made > 0)

    def after_s(self) -> float:
        """Seconds of a layer's forward after its attention: o, residuals, norm, feed-forward."""
        model = self.share
        elements = 8 * model.width + (3 if model.kind == "decoder" else 2) * model.ffn
        return self.dense_s(("o", "gate", "up", "down")) + self._through_memory_s(elements, kernels=4)

    def dense_s(self, names: tuple[str, ...], *, times: float = 1.0) -> float:
        """Seconds of a layer's matrix products of these names, `times` over (2 for their backward)."""
        seconds = 0.0
        for name, (inputs, outputs) in self.share.layer_matrices(self.problem).items():
            if name in names:
                seconds += times * self._product_s(inputs, outputs, narrow=self.narrow)
                seconds += self.narrow * self._scaled_s(inputs, outputs, backward=times > 1)
        return seconds

    def _product_s(self, inputs: int, outputs: int, *, narrow: bool = False, tokens: int | None = None) -> float:
        """Seconds of the product of a matrix with all tokens of the rank, or with so many."""
        tokens = self._tokens if tokens is None else tokens
        rate = self.device.matmul_flops_per_s(FLOAT8 if narrow else self.problem.dtype)
        operand = 1 if narrow else self._element
        moved = operand * (tokens + outputs) * inputs + self._element * tokens * outputs
        computed_s = 2.0 * tokens * inputs * outputs / rate
        return self.crowding * (self.device.layer_launch_s + max(computed_s, moved / self.device.memory_bytes_per_s))

    def _scaled_s(self, inputs: int, outputs: int, *, backward: bool) -> float:
        """Seconds of casting the operands of a float8 product with a scale for each tensor.

        Its largest element is found before it is cast. The backward has the output's gradient too.
        """
        elements = (self._tokens + outputs) * inputs + backward * self._tokens * outputs
        return self._moved_s((2 * self._element + 1) * elements, kernels=2 * (2 + backward))

    def _through_memory_s(self, elements: float, kernels: int = 1) -> float:
        """Seconds of elementwise operations that read and write so many elements of each token."""
        return self._moved_s(elements * self._element * self._tokens, kernels)

    def _moved_s(self, moved_bytes: float, kernels: int = 1) -> float:
        device = self.device
        return self.crowding * (kernels * device.layer_launch_s + moved_bytes / device.elementwise_bytes_per_s)

    @property
    def tensor_sum_bytes(self) -> int:
        """Sent in one sum of a hidden state, or its gradient, over a tensor-parallel group (Shoeybi et al. 2019)."""
        return ring_bytes(self._element * self._tokens * self.share.width, self.degree)
