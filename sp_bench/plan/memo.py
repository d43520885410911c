"""Results that are found once and kept: of the last few problems, or as long as their object is in use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar
from weakref import proxy

P = ParamSpec("P")
V = TypeVar("V")
KEPT = 16
"""How many problems there may be of which a plan keeps what is found: it may serve any number of packs."""


def keep(found: dict[Any, V], key: Hashable, value: V, most: int = KEPT) -> V:
    """The value, kept under its key in place of the oldest of so many others."""
    if len(found) >= most:
        del found[next(iter(found))]
    found[key] = value
    return value


def cached(method: Callable[P, V]) -> Callable[P, V]:
    """A bound method with its results kept, for an attribute of its own object.

    With functools.cache the two would keep each other, until Python looks for garbage, which it doesn't while a point
    is simulated.
    """
    function, owner = method.__func__, method.__self__  # pyright: ignore[reportFunctionMemberAccess]
    kept: Any = cache(partial(function, proxy(owner)))
    return kept
