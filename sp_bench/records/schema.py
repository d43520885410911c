"""The types of a record's fields, from the annotations of the dataclass: what a file is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sp_bench.records.record import Record


@cache
def columns() -> dict[str, type]:
    """A record's fields in their order: str, int, float or bool, or for nested ones dict or list; all but None."""
    hints, found = get_type_hints(Record), {}
    for field in fields(Record):
        (kind,) = (part for part in _parts(hints[field.name]) if part is not type(None))
        found[field.name] = get_origin(kind) or kind
    return found


def complaints(content: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields of a JSON object that should be a record; a field that isn't there may be."""
    checks = _checks()
    if unknown := sorted(set(content) - set(checks)):
        return [f"unknown fields {', '.join(unknown)}"]
    return [
        f"{name}={value!r:.80} is not {checks[name][0]}"
        for name, value in content.items()
        if not checks[name][1](value)
    ]


@cache
def _checks() -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """For each field its type as text, and what accepts its values."""
    hints = get_type_hints(Record)
    return {field.name: (str(field.type), _accepts(hints[field.name])) for field in fields(Record)}


def _accepts(annotation: Any) -> Callable[[Any], bool]:
    parts = [_accepts_part(part) for part in _parts(annotation)]
    return parts[0] if len(parts) == 1 else lambda value: any(accepts(value) for accepts in parts)


def _accepts_part(kind: Any) -> Callable[[Any], bool]:
    if kind is Any:
        return lambda value: True
    if kind is int:  # of 64 bits, as tables hold them
        return lambda value: type(value) is int and -(2**63) <= value < 2**63
    if kind is float:
        return lambda value: type(value) is float or type(value) is int
    if get_origin(kind) is list:
        (entry,) = map(_accepts, get_args(kind))
        return lambda value: isinstance(value, list) and all(map(entry, value))
    if get_origin(kind) is dict:
        _, entry = map(_accepts, get_args(kind))  # JSON's keys are text
        return lambda value: isinstance(value, dict) and all(map(entry, value.values()))
    return lambda value: isinstance(value, kind)


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
