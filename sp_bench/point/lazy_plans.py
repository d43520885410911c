"""Plans that are made when they are first asked for: many variants are ruled out before anyone looks at theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sp_bench.plan.ops import Plan


class LazyPlans(Mapping[str, Plan]):
    """The plans of a variant by phase. Each is made once, or again after it was forgotten."""

    def __init__(self, phases: Sequence[str], make: Callable[[str], Plan]) -> None:
        self._phases, self._make, self._made = tuple(phases), make, dict[str, Plan]()

    def __getitem__(self, phase: str) -> Plan:
        """The plan of a phase. Raises KeyError for a phase that isn't among those asked for."""
        if phase not in self._made:
            if phase not in self._phases:
                raise KeyError(phase)
            self._made[phase] = self._make(phase)
        return self._made[phase]

    def forget(self) -> None:
        """Let go of the plans, which would be made anew."""
        self._made.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._phases)

    def __len__(self) -> int:
        return len(self._phases)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, all of them."""
        return dict, (dict(self),)
