"""What blocks, folds and casts cost on a device: published or measured rates, interpolated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sp_bench.errors import RequestError
from sp_bench.plan import DTYPE_BYTES, FIELDS, PHASES, Kind, Mask, Problem, Region
from sp_bench.simulate.values import count, number, section, table

FLOPS_PER_PAIR = {"forward": 4, "backward": 10}
"""For each (query, key) pair, head and head_dim element: two matrix products forward, five backward."""
TABLES = tuple(f"{phase}_{shape}" for phase in PHASES for shape in ("full", "causal"))


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """One device's kernel rates and memory rate."""

    name: str
    head_dim: int
    """The head_dim that the rates were taken at."""
    rates: Mapping[str, Mapping[int, float]]
    """TFLOP/s by tokens of a block, for forward_full, forward_causal, backward_full, backward_causal."""
    dtypes: Mapping[str, float]
    """The dtypes that the rates hold for, each with a factor on them."""
    peak_tflops: Mapping[str, float]
    """Dense peak by dtype, for MFU; a dtype that is missing has no MFU."""
    memory_bytes: float | None
    """What a rank can hold; None for no limit."""
    memory_bytes_per_s: float
    launch_s: float
    """Seconds that each kernel costs beside its work."""

    @classmethod
    def build(cls, config: Any) -> Self:
        """The device of a conf/cluster file. Raises RequestError for a key or value that makes no sense."""
        path = "cluster.device"
        required = ("name", "head_dim", "rates", "dtypes", "peak_tflops", "memory_bytes_per_s", "launch_s")
        config = section(path, config, required, ("memory_bytes",))
        rates = section(f"{path}.rates", config["rates"], TABLES)
        memory = config.get("memory_bytes")
        return cls(
            name=str(config["name"]),
            head_dim=count(f"{path}.head_dim", config["head_dim"]),
            rates={
                name: {count(f"{path}.rates.{name}", tokens): rate for tokens, rate in entries.items()}
                for name, entries in ((name, table(f"{path}.rates.{name}", rates[name])) for name in TABLES)
            },
            dtypes=table(f"{path}.dtypes", config["dtypes"]),
            peak_tflops=table(f"{path}.peak_tflops", config["peak_tflops"]),
            memory_bytes=None if memory is None else number(f"{path}.memory_bytes", memory),
            memory_bytes_per_s=number(f"{path}.memory_bytes_per_s", config["memory_bytes_per_s"]),
            launch_s=number(f"{path}.launch_s", config["launch_s"], zero=True),
        )

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a dtype or head_dim whose kernel rates are not known."""
        if problem.dtype not in self.dtypes:
            raise RequestError(
                f"dtype={problem.dtype}",
                f"there are no kernel figures for it on {self.name}, so that it can't be simulated there",
                f"one of {', '.join(self.dtypes)} would work",
            )
        if problem.head_dim != self.head_dim:
            raise RequestError(
                f"head_dim={problem.head_dim}",
                f"the kernel figures of {self.name} are for head_dim {self.head_dim}, and rates differ by it",
                f"head_dim={self.head_dim} would work, or a cluster file with figures for {problem.head_dim}",
            )

    def notes(self, problem: Problem) -> list[str]:
        """Where the table is stretched beyond what was published."""
        smallest = min(min(entries) for entries in self.rates.values())
        if problem.block_tokens >= smallest:
            return []
        return [
            f"blocks of {problem.block_tokens} tokens are below the smallest of the kernel figures ({smallest}); their "
            "rate is taken to be that one's, which is too fast"
        ]

    def block_s(self, problem: Problem, phase: str) -> np.ndarray:
        """Seconds of one block without its fold, for q chunk below, equal to, above kv chunk: (3,)."""
        cases = problem.layout.cases(problem.causal)
        return np.array([sum(self._region_s(problem, phase, region) for region in case) for case in cases])

    def fold_s(self, problem: Problem, tensor: str, *, first: bool, arriving: bool) -> float:
        """Seconds of folding one chunk's partial into its accumulator, bound by memory.

        The partial is read in the dtype that it comes in and the accumulator read and written; the first one only
        written. Where the dtypes are equal, the first partial becomes the accumulator at no cost.
        """
        moved = 0
        for field in FIELDS[tensor]:
            held = problem.field_dtype(field, wire=False)
            part = problem.field_dtype(field, wire=True) if arriving else problem.dtype
            part = held if field.kind is Kind.STATISTIC else part
            if first and part == held:
                continue
            elements = problem.field_bytes(field, wire=False) // DTYPE_BYTES[held]
            moved += elements * (DTYPE_BYTES[part] + (1 if first else 2) * DTYPE_BYTES[held])
        return self._memory_s(moved)

    def cast_s(self, problem: Problem, tensor: str, *, wire: bool) -> float:
        """Seconds of casting an accumulator to its wire dtype, or to the compute dtype of a result."""
        moved = 0
        for field in FIELDS[tensor]:
            held = problem.field_dtype(field, wire=False)
            to = problem.field_dtype(field, wire=True) if wire else problem.dtype
            if field.kind is Kind.PARTIAL and to != held:
                elements = problem.field_bytes(field, wire=False) // DTYPE_BYTES[held]
                moved += elements * (DTYPE_BYTES[held] + DTYPE_BYTES[to])
        return self._memory_s(moved)

    def copy_s(self, moved_bytes: float) -> float:
        """Seconds of copying so many bytes on the device."""
        return self._memory_s(2 * moved_bytes)

    def _memory_s(self, moved_bytes: float) -> float:
        return self.launch_s + moved_bytes / self.memory_bytes_per_s if moved_bytes else 0.0

    def _region_s(self, problem: Problem, phase: str, region: Region) -> float:
        tokens = problem.block_tokens
        flops = FLOPS_PER_PAIR[phase] * region.pairs(tokens) * problem.batch * problem.block_heads * problem.head_dim
        shape = "full" if region.mask is Mask.FULL else "causal"
        side = min(region.q.tokens(tokens), region.kv.tokens(tokens))
        return self.launch_s + flops / (self._rate(f"{phase}_{shape}", side) * self.dtypes[problem.dtype])

    def _rate(self, name: str, tokens: int) -> float:
        """FLOP/s at a block of that many tokens, linear between the table's entries in log(tokens), flat outside."""
        known = sorted(self.rates[name])
        rates = [self.rates[name][size] for size in known]
        return 1e12 * float(np.interp(np.log2(max(tokens, 1)), np.log2(known), rates))
