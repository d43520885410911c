"""Numbers of a conf/cluster file, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sp_bench.errors import RequestError, unknown_key


def section(path: str, value: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """A mapping with these keys and no others. Raises RequestError with the nearest name."""
    if not isinstance(value, Mapping):
        known = ", ".join(required or optional)
        raise RequestError(f"{path}={value}", "must be a section of keys", f"a section with {known} would work")
    for key in value:
        if key not in required + optional:
            raise unknown_key(f"{path}.{key}", [f"{path}.{name}" for name in required + optional])
    for key in required:
        if key not in value:
            raise RequestError(f"{path}.{key}", "is missing", f"all of {', '.join(required)} are needed")
    return value


def number(path: str, value: Any, *, zero: bool = False) -> float:
    """A finite number above 0, or from 0 on. Raises RequestError for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        rule = "must be a finite number of at least 0" if zero else "must be a finite number above 0"
        raise RequestError(f"{path}={value}", rule, f"{path}=1.0 would work")
    return float(value)


def count(path: str, value: Any) -> int:
    """A whole number of at least 1. Raises RequestError for anything else."""
    if type(value) is not int or value < 1:
        raise RequestError(f"{path}={value}", "must be a whole number of at least 1", f"{path}=8 would work")
    return value


def table(path: str, value: Any) -> dict[Any, float]:
    """A mapping to numbers above 0. Raises RequestError for anything else."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{path}={value}", "must be a table of numbers", f"{path}={{512: 100}} would work")
    return {key: number(f"{path}.{key}", entry) for key, entry in value.items()}
