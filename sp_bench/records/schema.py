"""The types of a record's fields, from the annotations of the dataclass: what a file is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

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
    kinds = _kinds()
    if unknown := sorted(set(content) - set(kinds)):
        return [f"unknown fields {', '.join(unknown)}"]
    return [
        f"{name}={value!r:.80} is not {kinds[name][0]}"
        for name, value in content.items()
        if not _is_a(value, kinds[name][1])
    ]


@cache
def _kinds() -> dict[str, tuple[str, Any]]:
    """For each field its type as text, and the type."""
    hints = get_type_hints(Record)
    return {field.name: (str(field.type), hints[field.name]) for field in fields(Record)}


def _is_a(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return type(value) is not int or -(2**63) <= value < 2**63  # as tables hold them


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
