"""The values that options of methods may have, by the types of their fields.

    bool                           true or false
    Literal["q", "kv"]             one of these
    int                            a count, of at least 1
    tuple[int, int]                two counts, as a list or a tuple
    Literal["auto"] | int          either

A field with `str` in its type is checked by its method.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sp_bench.errors import RequestError


def checked(owner: type, name: str, value: object) -> object:
    """The value of the option `name` of a method's class; a list of two counts as a tuple.

    Raises RequestError for a value that its type doesn't have.
    """
    kinds = _kinds(owner).get(name, ())
    if not kinds:
        return value
    if any(_has(kind, value) for kind in kinds):
        return tuple(value) if isinstance(value, list) else value
    shown = f"method.{name}={value}"
    raise RequestError(
        shown.replace(" ", "") if isinstance(value, list | tuple) else shown,
        f"must be {_listed([word for kind in kinds for word in _words(kind)])}",
        f"method.{name}={_example(kinds)} would work",
    )


@cache
def _kinds(owner: type) -> dict[str, tuple[Any, ...]]:
    """The types that each option may have; none for one that its method checks."""
    kinds_of = {name: _members(hint) for name, hint in get_type_hints(owner).items()}
    return {name: kinds for name, kinds in kinds_of.items() if all(map(_is_known, kinds))}


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_known(kind: Any) -> bool:
    return kind in (bool, int, tuple[int, int]) or get_origin(kind) is Literal


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _has(kind: Any, value: object) -> bool:
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if kind is bool:
        return type(value) is bool
    if kind is int:
        return _is_count(value)
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_count, value))


def _words(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    if kind is bool:
        return ("true", "false")
    return ("an integer of at least 1",) if kind is int else ("two integers [a,b] of at least 1",)


def _example(kinds: tuple[Any, ...]) -> str:
    """A value that works for any problem: a word, or 1."""
    words = [word for kind in kinds for word in _words(kind) if get_origin(kind) is Literal or kind is bool]
    return words[0] if words else "1"


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
