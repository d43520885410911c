"""The quantities of a record as data, from the rows of records.quantities and of Record itself.

From them are its JSON Schema (docs/reference/record.schema.json) and its page (docs/reference/record_fields.md).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from sp_bench import markdown
from sp_bench.plan.problem import DTYPE_BYTES
from sp_bench.records.record import MODES, REPORTED, SCHEMA_VERSION, STATUSES, Record
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


INTRODUCTION = """# Fields of a record

In a record's file the fields of all parts stand side by side. null is "not known". Times are in ms, sizes in bytes.
This page is printed by `python -m sp_bench.records fields`."""


def fields_page() -> str:
    """A table for each part: name, type, meaning, label in tables and pages, and place in a W&B run."""
    parts = itertools.groupby(quantities().values(), key=lambda one: one.part)
    return "\n\n".join([INTRODUCTION, *(_part(list(of_part)) for _, of_part in parts)])


def _part(of_part: list[Quantity]) -> str:
    first = of_part[0]
    about = textwrap.fill(" ".join((first.row_of.__doc__ or "").split("\n\n")[0].split()), 120)
    rows = [
        (
            f"`{one.name}`",
            one.type_name.replace(" | None", " or null"),
            one.meaning,
            one.shown.label if one.shown else "",
            one.wandb or "",
        )
        for one in of_part
    ]
    head = ("field", "type", "meaning", "label", "in W&B")
    return f"## {first.part}: {first.row_of.how}\n\n{about}\n\n" + markdown.table(head, rows)


IDENTIFIER = "https://json-schema.org/draft/2020-12/schema"
_VALUES = {
    "schema_version": {"const": SCHEMA_VERSION},
    "status": {"enum": [*STATUSES]},
    "mode": {"enum": [*MODES, REPORTED]},
    "dtype": {"enum": [*DTYPE_BYTES]},
}
"""Rules that the types of fields don't say."""


def json_schema() -> dict[str, Any]:
    """The schema of a record's file. A field's description has its unit."""
    schema = msgspec.json.schema(Record)["$defs"]["Record"]
    known = quantities()
    for name, field in schema["properties"].items():
        field |= _VALUES.get(name, {}) | {"description": known[name].meaning}
        if field.get("type") == "integer" and name in ("gpus", "seqlen", "batch", "heads", "kv_heads", "head_dim"):
            field["minimum"] = 1
    reported = {"properties": {"mode": {"const": REPORTED}}}
    schema |= {
        "$schema": IDENTIFIER,
        "title": f"A record of sp_bench, version {SCHEMA_VERSION}",
        "description": "One benchmark point. Times are in ms, sizes in bytes; null is not known.",
        "required": [*schema["required"], "schema_version"],
        "additionalProperties": False,
        "if": reported,
        "then": {"required": ["source"], "properties": {"source": {"type": "string"}}},
        "else": {"properties": {"source": {"type": "null"}}},
    }
    return schema
