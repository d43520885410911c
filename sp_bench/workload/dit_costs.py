"""Seconds and memory of a denoising step beside its attention, from its shapes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.plan.tensors import KV
from sp_bench.workload.prefill_costs import ForwardCosts


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
