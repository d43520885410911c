"""The costs of what memory bounds on a device: folds, merges, casts and copies."""

from __future__ import annotations

from dataclasses import dataclass

from sp_bench.cluster.implementation import OURS, Implementation
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.plan.tensors import Kind, Tensor


@dataclass(frozen=True, kw_only=True)
class MemoryCosts:
    """One device's memory rates, and what an implementation moves by them."""

    memory_bytes_per_s: float
    """Bandwidth of copies; reads plus writes."""
    fold_bytes_per_s: float
    """Bandwidth of merging partial outputs, arithmetic included."""
    sum_bytes_per_s: float
    """Bandwidth of casts and of gradient sums, which read a narrower dtype than they write."""
    launch_s: float
    """Launch overhead of each kernel."""
    implementation: Implementation = OURS
    """The implementation that uses the device."""

    def fold_s(
        self,
        problem: Problem,
        tensor: Tensor,
        *,
        first: bool = False,
        arriving: bool = False,
        summed: bool = True,
        share: float = 1.0,
        sliced: bool = False,
    ) -> float:
        """Seconds of folding one chunk's partial into its accumulator, bound by memory.

        A fold reads the partial in its own dtype, and reads and writes the accumulator, where the block has rows: the
        `share` of the chunk's. The first fold only writes the accumulator, all of it; if it has all rows and the dtypes
        are equal, as they are without `summed`, the partial becomes the accumulator at no cost. An implementation that
        merges by several kernels (Implementation.fold_bytes_per_element) moves more, and more again where the rows are
        `sliced` out of the chunk. One that doesn't merge (Implementation.merges) moves nothing.
        """
        if not self.implementation.merges:
            return 0.0
        moved, unfused = 0, self.implementation.fold_bytes_per_element
        if unfused is not None:
            unfused = share * (unfused + sliced * self.implementation.slice_bytes_per_element)
        for field in tensor.fields:
            held = problem.field_dtype(field, wire=False, summed=summed)
            part = problem.field_dtype(field, wire=True) if arriving else problem.dtype
            part = held if field.kind is Kind.STATISTIC else part
            if first and part == held and not sliced:
                continue
            elements = problem.field_bytes(field, wire=False, summed=summed) // DTYPE_BYTES[held]
            fused = share * DTYPE_BYTES[part] + (1 if first else 2 * share) * DTYPE_BYTES[held]
            moved += elements * (fused if first or unfused is None else unfused)
        merges = not first and any(field.kind is Kind.STATISTIC for field in tensor.fields)
        return self._memory_s(moved, self.fold_bytes_per_s if merges else self.sum_bytes_per_s)

    def merge_s(self, problem: Problem, tensor: Tensor, parts: int) -> float:
        """Seconds of merging the partials that a reduce-scatter brings into one: each is read once, the result written,
        in the wire dtype. It is one kernel for outputs, and two for each gradient: the rank's own place is set to zero,
        and added with the others.
        """
        if not self.implementation.merges:
            return 0.0
        fields = sum(problem.width(field) > 0 for field in tensor.fields)
        launches, more = (1, 1) if tensor.is_output else (2 * fields, 3)
        moved = (parts + more) * sum(problem.field_bytes(field, wire=True) for field in tensor.fields)
        merged_s = self._memory_s(moved, self.fold_bytes_per_s if tensor.is_output else self.sum_bytes_per_s)
        return merged_s + (launches - 1) * self.launch_s

    def cast_s(self, problem: Problem, tensor: Tensor, *, wire: bool, summed: bool = True, share: float = 1.0) -> float:
        """Seconds of casting a held chunk to its wire dtype, or (`wire` false) an accumulator to the compute dtype.

        `share` is that of the chunk's rows.
        """
        if not self.implementation.merges:
            return 0.0
        moved = 0
        for field in tensor.fields:
            held = problem.field_dtype(field, wire=False, summed=summed)
            to = problem.field_dtype(field, wire=True) if wire else problem.dtype
            if field.kind is Kind.PARTIAL and to != held:
                elements = problem.field_bytes(field, wire=False, summed=summed) // DTYPE_BYTES[held]
                moved += share * elements * (DTYPE_BYTES[held] + DTYPE_BYTES[to])
        return self._memory_s(moved, self.sum_bytes_per_s)

    def copy_s(self, moved_bytes: float) -> float:
        """Seconds of copying `moved_bytes` on the device."""
        return self._memory_s(2 * moved_bytes, self.memory_bytes_per_s)

    def _memory_s(self, moved_bytes: float, bytes_per_s: float) -> float:
        return self.launch_s + moved_bytes / bytes_per_s if moved_bytes else 0.0
