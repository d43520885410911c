"""The quantities of a record as data: read from the rows of records.quantities and of Record itself."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from sp_bench.records.record import Record
from sp_bench.records.rows import SUMMARY, Result, Setting


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One field of a record."""

    name: str
    hint: Any
    """Its type, with None where it may not be known."""
    kind: type
    """Its type without None: str, int, float, bool or, for nested ones, dict or list."""
    row_of: type
    """The part of a record that declares it."""
    how: str
    """The source of values."""
    shown: Setting | Result | None
    """How it is shown; None if the record alone has it."""

    @property
    def part(self) -> str:
        """The name of the part that it is a row of."""
        return self.row_of.__name__

    @property
    def meaning(self) -> str:
        """The docstring below it. The source that it stands in is parsed when it is first asked for."""
        return _rows(self.row_of)[self.name]

    @property
    def type_name(self) -> str:
        """The type in words, such as int or None."""
        text = self.hint.__name__ if isinstance(self.hint, type) and not get_args(self.hint) else str(self.hint)
        return text.replace("typing.", "")

    @property
    def wandb(self) -> str | None:
        """The place in a W&B run. Unmarked numbers are what came out; unmarked texts and nested values stay here."""
        if self.shown:
            return self.shown.wandb
        return SUMMARY if self.kind in (int, float) else None


@cache
def quantities() -> dict[str, Quantity]:
    """Every field of a record by its name, in the order of the file."""
    hints, marked = get_type_hints(Record), get_type_hints(Record, include_extras=True)
    part_of = {name: part for part in Record.__mro__[-2::-1] for name in inspect.get_annotations(part)}
    by_name = {}
    for field in fields(Record):
        hint = hints[field.name]
        (kind,) = set(get_args(hint) or (hint,)) - {NoneType} if get_origin(hint) not in (list, dict) else (hint,)
        marks = getattr(marked[field.name], "__metadata__", ())
        by_name[field.name] = Quantity(
            name=field.name,
            hint=hint,
            kind=get_origin(kind) or kind,
            row_of=part_of[field.name],
            how=part_of[field.name].how,
            shown=next((mark for mark in marks if isinstance(mark, Setting | Result)), None),
        )
    return by_name


@cache
def _rows(part: type) -> dict[str, str]:
    """The fields that a part declares, and the docstring below each; empty where there is none."""
    body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for row, below in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name) and row.target.id != "how":
            text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
            docs[row.target.id] = " ".join(text.split())
    return docs


def columns() -> dict[str, type]:
    """The type of each field in order, without None: str, int, float, bool or, for nested ones, dict or list."""
    return {name: quantity.kind for name, quantity in quantities().items()}


def complaints(content: Mapping[str, Any]) -> list[str]:
    """The errors in the fields of a JSON object that should be a record. Fields may be missing."""
    known = quantities()
    if unknown := sorted(set(content) - set(known)):
        return [f"unknown fields {', '.join(unknown)}"]
    return [
        f"{name}={value!r:.80} is not {known[name].type_name}"
        for name, value in content.items()
        if not _is_a(value, known[name].hint)
    ]


def _is_a(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return type(value) is not int or -(2**63) <= value < 2**63  # the range of a table's integers
