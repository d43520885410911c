"""Studies: what we make of each paper, and a fifth of our own. Each is `sections(runs)`, in a file of its own.

A study asks `runs` for records, and makes Section after Section of them. A new one is imported and listed here, and
has a notebook of the same name in analysis/notebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from analysis.runs import Runs
from analysis.section import Section

Study = Callable[[Runs], Iterator[Section]]
STUDIES: dict[str, tuple[str, Study]] = {}
"""By the name on the command line: the title, and what makes the sections."""
