"""Values as a user writes them: 256k, 1M, true."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sp_bench.errors import RequestError, unknown, unknown_key

_UNITS = {"": 1, "k": 2**10, "M": 2**20}


def whole(key: str, value: Any, *, least: int = 1) -> int:
    """An integer of at least `least`; 8k, 256k and 1M are powers of two. Raises RequestError for anything else."""
    number = value if type(value) is int else None
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)([kKmM]?)", value.strip())):
        number = int(match[1]) * _UNITS[match[2] if match[2] in _UNITS else match[2].swapcase()]
    if number is None:
        raise RequestError(f"{key}={value}", "must be a whole number", f"{key}=8, {key}=8k or {key}=1M would work")
    if number < least:
        raise RequestError(f"{key}={value}", f"must be at least {least}", f"{key}={least} would work")
    return number


def seconds(key: str, value: Any) -> float:
    """A positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise RequestError(f"{key}={value}", "must be a positive number of seconds", f"{key}=60 would work")
    return float(value)


def truth(key: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError(f"{key}={value}", "must be true or false", f"{key}=true would work")
    return value


def choice(key: str, value: Any, choices: Sequence[str]) -> str:
    """One of some words."""
    if value not in choices:
        raise unknown(key, str(value), choices)
    return value


def known_keys(prefix: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise RequestError, with the nearest name, for a key that there is not."""
    for key in given:
        if key not in known:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in known])
