"""Seconds and memory of a forward beside its attention: of a chunk of a prompt. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV
from sp_bench.workload.layer_costs import LayerCosts


@dataclass(frozen=True, kw_only=True)
class ForwardCosts(LayerCosts, ABC):
    """A forward without a backward on one GPU of the rank that owns the most of its tokens."""

    note: ClassVar[str]
    """A remark for a reader of its simulated times."""
    sources: ClassVar[str]
    """The parts of its peak of memory, in words."""
    would_fit: ClassVar[str]
    """Remedies for a device with too little memory, in words."""

    @abstractmethod
    def embedding_s(self) -> float:
        """Seconds of what is before the layers."""

    @abstractmethod
    def head_s(self) -> float:
        """Seconds of what is behind the layers of the last chunk."""

    @property
    def cache_bytes(self) -> int:
        """Bytes that stay of one layer after it, on the rank with most."""
        return 0

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


@dataclass(frozen=True, kw_only=True)
class PrefillCosts(ForwardCosts):
    """A chunk of a prompt."""

    note: ClassVar[str] = (
        "matrix products at their best rate or memory speed; the last token alone has its head computed"
    )
    sources: ClassVar[str] = (
        "parameters, the cache of all layers, and what is there at one time: the attention's from its plans, or the"
        " activations of a feed-forward"
    )
    would_fit: ClassVar[str] = "more GPUs, a higher prefill.tensor_parallel, or a smaller prefill.chunk,"

    def embedding_s(self) -> float:
        """Seconds of looking up the chunk's tokens: rows of the embedding are read and written."""
        return self._through_memory_s(2 * self.share.width)

    def head_s(self) -> float:
        """Seconds of the last token's logits, from which the first new one is drawn."""
        return self._product_s(self.share.width, self.share.outputs, tokens=self.problem.batch)

    @property
    def cache_bytes(self) -> int:
        """Bytes of one layer's keys and values."""
        return layer_cache_bytes(replace(self.problem, padded=None))


def chunk_part(index: int) -> str:
    """The name of a chunk's whole time among the parts of a measured step."""
    return f"chunk {index}"


def layer_cache_bytes(problem: Problem) -> int:
    """Bytes of one layer's keys and values on the rank that holds most of them."""
    return problem.in_one_slice.chunk_bytes(KV, wire=False)
