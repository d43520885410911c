"""What blocks, folds and casts cost on a device: published or measured figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from sp_bench.cluster.kernel_table import KernelTable
from sp_bench.cluster.values import count, number, section, table
from sp_bench.errors import RequestError, unknown
from sp_bench.plan import DTYPE_BYTES, FIELDS, Kind, Mask, Problem, Region

FLOPS_PER_PAIR = {"forward": 4, "backward": 10}
"""For each (query, key) pair, head and head_dim element: two matrix products forward, five backward."""


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """One device's kernel rates and memory rates."""

    name: str
    tables: tuple[KernelTable, ...]
    """The first one that has a problem's dtype and head_dim is the one for it."""
    peak_tflops: Mapping[str, float]
    """Dense peak by dtype, for MFU; a dtype that is missing has no MFU."""
    memory_bytes: float | None
    """What a rank can hold; None for no limit."""
    memory_bytes_per_s: float
    """Of copies, casts and sums of gradients, reads and writes together."""
    fold_bytes_per_s: float
    """Of merging partial outputs, which is arithmetic too; on a GPU the same as memory_bytes_per_s."""
    launch_s: float
    """Seconds that each kernel costs beside its work."""
    transfer_slowdown: float
    """How much longer kernels take while transfers of their rank are under way: 0.19 is 19%."""

    @classmethod
    def build(cls, config: Any) -> Self:
        """The device of a conf/cluster file. Raises RequestError for a key or value that makes no sense."""
        path = "cluster.device"
        required = ("name", "rates", "peak_tflops", "memory_bytes_per_s", "launch_s")
        optional = ("kernel", "sms", "memory_bytes", "fold_bytes_per_s", "transfer_slowdown")
        config = section(path, config, required, optional)
        memory, sms = config.get("memory_bytes"), config.get("sms")
        sms = None if sms is None else count(f"{path}.sms", sms)
        memory_rate = number(f"{path}.memory_bytes_per_s", config["memory_bytes_per_s"])
        fold_rate = config.get("fold_bytes_per_s")
        return cls(
            name=str(config["name"]),
            tables=_tables(path, config, sms),
            peak_tflops=table(f"{path}.peak_tflops", config["peak_tflops"]),
            memory_bytes=None if memory is None else number(f"{path}.memory_bytes", memory),
            memory_bytes_per_s=memory_rate,
            fold_bytes_per_s=memory_rate if fold_rate is None else number(f"{path}.fold_bytes_per_s", fold_rate),
            launch_s=number(f"{path}.launch_s", config["launch_s"], zero=True),
            transfer_slowdown=number(f"{path}.transfer_slowdown", config.get("transfer_slowdown") or 0.0, zero=True),
        )

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a dtype or head_dim whose kernel rates are not known."""
        known = [table for table in self.tables if problem.dtype in table.dtypes]
        if not known:
            dtypes = dict.fromkeys(dtype for table in self.tables for dtype in table.dtypes)
            raise RequestError(
                f"dtype={problem.dtype}",
                f"there are no kernel figures for it on {self.name}, so that it can't be simulated there",
                f"one of {', '.join(dtypes)} would work",
            )
        if not any(table.fits(problem) for table in known):
            head_dims = " or ".join(map(str, sorted({table.head_dim for table in known})))
            raise RequestError(
                f"head_dim={problem.head_dim}",
                f"the kernel figures of {self.name} are for head_dim {head_dims}, and rates differ by it",
                f"head_dim={head_dims} would work, or a cluster file with figures for {problem.head_dim}",
            )

    def figures(self, problem: Problem) -> str:
        """Which kernel figures a problem is simulated with: published (flash_attn_3), measured (aten_cpu)."""
        table = self._table(problem)
        return f"{table.figures} ({table.kernel})"

    def notes(self, problem: Problem) -> list[str]:
        """Where the tables are stretched beyond their figures."""
        table, notes = self._table(problem), []
        if table.figures == "assumed":
            notes.append(f"the kernel rates of {self.name} are assumptions, at least in part")
        if problem.block_tokens < table.smallest:
            notes.append(
                f"blocks of {problem.block_tokens} tokens are below the smallest of the kernel figures "
                f"({table.smallest}); their rate is taken to be that one's, which is too fast"
            )
        return notes

    def block_s(self, problem: Problem, phase: str) -> np.ndarray:
        """Seconds of one block without its fold, for q chunk below, equal to, above kv chunk: (3,).

        As all that a device takes: where a rank has it, or a core, to itself.
        """
        cases = problem.layout.cases(problem.causal)
        return np.array([sum(self._region_s(problem, phase, region) for region in case) for case in cases])

    def fold_s(
        self, problem: Problem, tensor: str, *, first: bool = False, arriving: bool = False, summed: bool = True
    ) -> float:
        """Seconds of folding one chunk's partial into its accumulator, bound by memory.

        The partial is read in the dtype that it comes in and the accumulator read and written; the first one only
        written. Where the dtypes are equal, as where nothing is `summed`, the first partial becomes the accumulator at
        no cost.
        """
        moved = 0
        for field in FIELDS[tensor]:
            held = problem.field_dtype(field, wire=False, summed=summed)
            part = problem.field_dtype(field, wire=True) if arriving else problem.dtype
            part = held if field.kind is Kind.STATISTIC else part
            if first and part == held:
                continue
            elements = problem.field_bytes(field, wire=False, summed=summed) // DTYPE_BYTES[held]
            moved += elements * (DTYPE_BYTES[part] + (1 if first else 2) * DTYPE_BYTES[held])
        merges = not first and any(field.kind is Kind.STATISTIC for field in FIELDS[tensor])
        return self._memory_s(moved, self.fold_bytes_per_s if merges else self.memory_bytes_per_s)

    def cast_s(self, problem: Problem, tensor: str, *, wire: bool, summed: bool = True) -> float:
        """Seconds of casting what is held to its wire dtype, or an accumulator to the compute dtype of a result."""
        moved = 0
        for field in FIELDS[tensor]:
            held = problem.field_dtype(field, wire=False, summed=summed)
            to = problem.field_dtype(field, wire=True) if wire else problem.dtype
            if field.kind is Kind.PARTIAL and to != held:
                elements = problem.field_bytes(field, wire=False, summed=summed) // DTYPE_BYTES[held]
                moved += elements * (DTYPE_BYTES[held] + DTYPE_BYTES[to])
        return self._memory_s(moved, self.memory_bytes_per_s)

    def copy_s(self, moved_bytes: float) -> float:
        """Seconds of copying so many bytes on the device."""
        return self._memory_s(2 * moved_bytes, self.memory_bytes_per_s)

    def _memory_s(self, moved_bytes: float, bytes_per_s: float) -> float:
        return self.launch_s + moved_bytes / bytes_per_s if moved_bytes else 0.0

    def _table(self, problem: Problem) -> KernelTable:
        # Points that are measured may have a dtype or head_dim without figures: the nearest table ranks their variants.
        return min(
            self.tables,
            key=lambda t: (problem.dtype not in t.dtypes, abs(math.log2(t.head_dim / problem.head_dim))),
        )

    def _region_s(self, problem: Problem, phase: str, region: Region) -> float:
        tokens, batch_heads = problem.block_tokens, problem.batch * problem.block_heads
        if not region.pairs(tokens):
            return 0.0
        # A kernel works on tiles of rows: STRICT, which is one row less, takes as long as CAUSAL.
        pairs = replace(region, mask=Mask.CAUSAL if region.mask is Mask.STRICT else region.mask).pairs(tokens)
        flops_per_s = self._table(problem).flops_per_s(
            phase,
            "full" if region.mask is Mask.FULL else "causal",
            region.q.tokens(tokens),
            region.kv.tokens(tokens),
            batch_heads=batch_heads,
            dtype=problem.dtype,
        )
        return self.launch_s + FLOPS_PER_PAIR[phase] * pairs * batch_heads * problem.head_dim / flops_per_s


def _tables(path: str, config: Mapping[str, Any], sms: int | None) -> tuple[KernelTable, ...]:
    """The tables of the kernel that the device's config names, or all of them."""
    rates, kernel = config["rates"], config.get("kernel")
    if not isinstance(rates, Mapping) or not rates:
        rule = "must be a section of tables of kernel rates"
        raise RequestError(f"{path}.rates={rates}", rule, f"{path}.rates.flash_attn_3 and others would work")
    found = [KernelTable.build(f"{path}.rates.{name}", str(name), entry, sms) for name, entry in rates.items()]
    if kernel is not None and kernel not in {table.kernel for table in found}:
        raise unknown(f"{path}.kernel", str(kernel), {table.kernel for table in found})
    return tuple(table for table in found if kernel in (None, table.kernel))
