"""The files of published measurements, and the folder that a validation writes its own to."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from sp_bench.cli.arguments import only_keys, writable_folder
from sp_bench.resources import place

DATA = place("analysis/published")
RESULTS = "docs/results"


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a file of analysis/published, by the names of its columns."""
    with (DATA / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def folder_of(arguments: Sequence[str]) -> Path:
    """The folder of out=FOLDER. Raises RequestError for other arguments, and one that can't be written to."""
    return writable_folder("out", only_keys(arguments, {"out": RESULTS}).get("out", RESULTS))
