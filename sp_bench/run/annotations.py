"""The names by which operations of a plan stand in a trace of torch's profiler. Imports no torch."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"sp_bench (\w+) (\d+)")


class Mark(NamedTuple):
    """An operation in a trace."""

    phase: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    """Its index in the phase's plan."""


def annotation(phase: str, index: int) -> str:
    """The name of an operation's range."""
    return f"sp_bench {phase} {index}"


def marked(name: str) -> Mark | None:
    """The operation that a range's name stands for; None if it is another's."""
    match = _NAME.fullmatch(name)
    return Mark(match[1], int(match[2])) if match else None
