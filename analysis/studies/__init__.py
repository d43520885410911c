"""Studies: what we make of each paper, and a fifth of our own. Each is `sections(runs)`, in a file of its own.

A study asks `runs` for records, and makes Section after Section of them. A new one is imported and listed here, and
has a notebook of the same name in analysis/notebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies import choosing, mesh, ring, striped, tokenring

Study = Callable[[Runs], Iterator[Section]]
STUDIES: dict[str, tuple[str, Study]] = {
    "ring": ("Ring Attention", ring.sections),
    "striped": ("Striped Attention", striped.sections),
    "tokenring": ("TokenRing", tokenring.sections),
    "mesh": ("Mesh-Attention", mesh.sections),
    "choosing": ("Which method and tile to choose", choosing.sections),
}
"""By the name on the command line: the title, and what makes the sections."""
