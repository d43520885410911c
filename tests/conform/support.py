"""Subjects of the tests by name, and the row of one check."""

from __future__ import annotations

from sp_bench.conform.cases import SIZES
from sp_bench.conform.catalogue import check_named
from sp_bench.conform.ranks import Worlds
from sp_bench.conform.run import Row, rows_of
from sp_bench.conform.subjects import Subject, subjects_named
from tests.conform import attentions, narrow


def named(name: str, **options: object) -> Subject:
    """An attention of these tests, or what else has that name."""
    of = next((module.__name__ + ":" for module in (narrow, attentions) if hasattr(module, name)), "")
    (subject,) = subjects_named(of + name, options)
    return subject


def row(worlds: Worlds, subject: Subject, check: str, sizes: tuple[int, ...] = SIZES, shrink_s: float = 0) -> Row:
    (found,) = rows_of(subject, worlds, sizes=sizes, checks=[check_named(check)], shrink_s=shrink_s)
    return found


def failures(rows: list[Row]) -> list[str]:
    return [f"{row.check.name}: {row.smallest}: {row.why}" for row in rows if row.status == "fails"]
