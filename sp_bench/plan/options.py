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
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from sp_bench.errors import RequestError


def checked(owner: type, name: str, value: object) -> object:
    """The value of the option `name` of a method's class; a list of two counts as a tuple.

    Raises RequestError for a value that its type doesn't have.
    """
    possible = _possible(owner).get(name)
    if possible is None or possible.has(value):
        return tuple(value) if isinstance(value, list) and possible else value
    shown = f"method.{name}={value}"
    raise RequestError(
        shown.replace(" ", "") if isinstance(value, list | tuple) else shown,
        f"must be {_listed(possible.described)}",
        f"method.{name}={next(iter(possible.words or possible.flags), 1)} would work",
    )


class _Possible(NamedTuple):
    """The values that an option may have."""

    words: tuple[str, ...]
    flags: tuple[str, ...]
    """true and false, or none."""
    counts: bool
    """Whether it may be a count."""
    pairs: bool
    """Whether it may be two counts."""

    def has(self, value: object) -> bool:
        if type(value) is str:
            return value in self.words
        if type(value) is bool:
            return bool(self.flags)
        if isinstance(value, list | tuple):
            return self.pairs and len(value) == 2 and all(map(_is_count, value))
        return self.counts and _is_count(value)

    @property
    def described(self) -> list[str]:
        """All of them, each kind in words."""
        counts = ["an integer of at least 1"] * self.counts
        return [*self.words, *self.flags, *counts, *["two integers [a,b] of at least 1"] * self.pairs]


@cache
def _possible(owner: type) -> dict[str, _Possible]:
    """By the options whose types say which values they may have."""
    members = {name: _members(hint) for name, hint in get_type_hints(owner).items()}
    return {name: _of_types(kinds) for name, kinds in members.items() if all(map(_is_known, kinds))}


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_known(kind: Any) -> bool:
    return kind in (bool, int, tuple[int, int]) or get_origin(kind) is Literal


def _of_types(kinds: tuple[Any, ...]) -> _Possible:
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return _Possible((*words,), ("true", "false") if bool in kinds else (), int in kinds, tuple[int, int] in kinds)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
