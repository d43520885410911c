"""The types of a record's fields, from the dataclass's annotations. Files are checked against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from sp_bench.records.record import Record


@cache
def columns() -> dict[str, type]:
    """The type of each field in order, without None: str, int, float, bool or, for nested ones, dict or list."""
    found = {}
    for name, (_, hint) in _types().items():
        (kind,) = set(get_args(hint) or (hint,)) - {NoneType}
        found[name] = get_origin(kind) or kind
    return found


def complaints(content: Mapping[str, Any]) -> list[str]:
    """The errors in the fields of a JSON object that should be a record. Fields may be missing."""
    types = _types()
    if unknown := sorted(set(content) - set(types)):
        return [f"unknown fields {', '.join(unknown)}"]
    return [
        f"{name}={value!r:.80} is not {types[name][0]}"
        for name, value in content.items()
        if not _is_a(value, types[name][1])
    ]


@cache
def _types() -> dict[str, tuple[str, Any]]:
    """The type of each field, as text and as a type."""
    hints = get_type_hints(Record)
    return {field.name: (str(field.type), hints[field.name]) for field in fields(Record)}


def _is_a(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return type(value) is not int or -(2**63) <= value < 2**63  # the range of a table's integers
