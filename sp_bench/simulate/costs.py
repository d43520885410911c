"""What blocks and folds cost on a device: published or measured rates, interpolated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sp_bench.errors import RequestError
from sp_bench.plan import DTYPE_BYTES, FIELDS, Kind, Mask, Problem, Regions

BACKWARD_FLOPS = 10
FORWARD_FLOPS = 4
"""FLOPs for each (query, key) pair, head and head_dim element: two matrix products forward, five backward."""


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """One device's kernel rates and memory rate."""

    name: str
    rates: Mapping[str, Mapping[int, float]]
    """TFLOP/s by tokens of a block, for forward_full, forward_causal, backward_full, backward_causal."""
    dtypes: Mapping[str, float]
    """The dtypes that the rates hold for, each with a factor on them."""
    peak_tflops: Mapping[str, float]
    """Dense peak by dtype, for MFU; a dtype that is missing has no MFU."""
    memory_bytes_per_s: float
    launch_s: float
    """Seconds that each kernel costs beside its work."""

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Self:
        """The device of a conf/cluster file."""
        rates = {
            name: {int(tokens): float(rate) for tokens, rate in table.items()}
            for name, table in config["rates"].items()
        }
        return cls(**{**config, "rates": rates})

    def refuse(self, dtype: str) -> None:
        """Raise RequestError for a dtype whose kernel rates are not known."""
        if dtype not in self.dtypes:
            raise RequestError(
                f"dtype={dtype}",
                f"there are no kernel figures for it on {self.name}, so that it can't be simulated there",
                f"one of {', '.join(self.dtypes)} would work",
            )

    def block_s(self, problem: Problem, phase: str) -> np.ndarray:
        """Seconds of one block without its fold, for q chunk below, equal to, above kv chunk: (3,)."""
        cases = problem.layout.cases(problem.causal)
        return np.array([sum(self._region_s(problem, phase, (region,)) for region in case) for case in cases])

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
        return self.launch_s + moved / self.memory_bytes_per_s if moved else 0.0

    def _region_s(self, problem: Problem, phase: str, regions: Regions) -> float:
        seconds = 0.0
        for region in regions:
            tokens = problem.local_seqlen
            per_pair = FORWARD_FLOPS if phase == "forward" else BACKWARD_FLOPS
            flops = per_pair * region.pairs(tokens) * problem.batch * problem.heads * problem.head_dim
            shape = "full" if region.mask is Mask.FULL else "causal"
            side = min(region.q.tokens(tokens), region.kv.tokens(tokens))
            seconds += self.launch_s + flops / (self._rate(f"{phase}_{shape}", side) * self.dtypes[problem.dtype])
        return seconds

    def _rate(self, table: str, tokens: int) -> float:
        """FLOP/s at a block of that many tokens, linear between the table's entries in log(tokens), flat outside."""
        known = sorted(self.rates[table])
        rates = [self.rates[table][size] for size in known]
        return 1e12 * float(np.interp(np.log2(max(tokens, 1)), np.log2(known), rates))
