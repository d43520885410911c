"""Studies: one for each paper, and four of our own. A study is a module with SECTIONS, which make its sections.

A section's function asks `runs` for records and returns a Section. A new study is imported and listed here, and has a
notebook of the same name in analysis/notebooks.
"""

from __future__ import annotations

from collections.abc import Callable

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies import (
    choosing,
    documents,
    honest,
    mesh,
    published,
    ring,
    striped,
    tokenring,
    training_tables,
)

STUDIES: dict[str, tuple[str, tuple[Callable[[Runs], Section], ...]]] = {
    "ring": ("Ring Attention", ring.SECTIONS),
    "striped": ("Striped Attention", striped.SECTIONS),
    "tokenring": ("TokenRing", tokenring.SECTIONS),
    "mesh": ("Mesh-Attention", mesh.SECTIONS),
    "choosing": ("Which method and tile to choose", choosing.SECTIONS),
    "documents": ("Packed documents", documents.SECTIONS),
    "honest": ("Which method, honestly", honest.SECTIONS),
    "training": ("Published training steps", training_tables.SECTIONS),
    "published": ("Published measurements", published.SECTIONS),
}
"""Titles and section functions, by the name on the command line."""
