"""The page of a record's quantities (docs/reference/record_fields.md)."""

from __future__ import annotations

import itertools
import textwrap

from sp_bench import markdown
from sp_bench.records.record import Record
from sp_bench.records.schema import Quantity, quantities

INTRODUCTION = """# Fields of a record

In a record's file the fields of all parts stand side by side. null is "not known". Times are in ms, sizes in bytes.
This page is printed by `python -m sp_bench.records fields`."""


def fields_page() -> str:
    """A table for each part: name, type, meaning, label in tables and pages, and place in a W&B run."""
    parts = itertools.groupby(quantities().values(), key=lambda one: one.part)
    return "\n\n".join([INTRODUCTION, *(_part(list(of_part)) for _, of_part in parts)])


def _part(of_part: list[Quantity]) -> str:
    first = of_part[0]
    (part,) = (cls for cls in Record.__mro__ if cls.__name__ == first.part)
    about = textwrap.fill(" ".join((part.__doc__ or "").split("\n\n")[0].split()), 120)
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
    return f"## {first.part}: {first.how}\n\n{about}\n\n" + markdown.table(head, rows)
