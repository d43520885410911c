"""Seconds and memory of a chunk of a prompt beside its attention, and its name. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV
from sp_bench.workload.layer_costs import LayerCosts


@dataclass(frozen=True, kw_only=True)
class PrefillCosts(LayerCosts):
    """A chunk's forward on one GPU of the rank that owns the most of its tokens."""

    degree: int = 1
    """The degree of tensor parallelism."""

    @property
    def tensor_parallel(self) -> int:
        """How many GPUs share the tokens of a rank, with a part of the heads and matrices each."""
        return self.degree

    def embedding_s(self) -> float:
        """Seconds of looking up the chunk's tokens: rows of the embedding are read and written."""
        return self._through_memory_s(2 * self.share.width)

    def head_s(self) -> float:
        """Seconds of the last token's logits, from which the first new one is drawn."""
        return self._product_s(self.share.width, self.share.outputs, tokens=self.problem.batch)

    @property
    def parameters_bytes(self) -> int:
        """Bytes of the GPU's part of the model, in the compute dtype: every rank has the same."""
        return self._element * self.share.parameters(self.problem)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the residual stream, beside an attention."""
        return self._element * self._tokens * self.share.width

    @property
    def activations_bytes(self) -> int:
        """Bytes of a feed-forward network at work: the residual stream, its norm, gate and up. No attention is then."""
        return self._element * self._tokens * 2 * (self.share.width + self.share.ffn)


def chunk_part(index: int) -> str:
    """The name of a chunk's whole time among the parts of a measured step."""
    return f"chunk {index}"


def layer_cache_bytes(problem: Problem) -> int:
    """Bytes of one layer's keys and values on the rank that holds most of them."""
    return problem.in_one_slice.chunk_bytes(KV, wire=False)
