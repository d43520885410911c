"""Numbers that know where they come from: a record, a formula, or a table of a paper.

Reports show only such numbers. A number that is computed from others has the sources of all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sp_bench.records import Record

KINDS = ("measured", "measured alone", "simulated", "reported", "computed", "paper")
"""The kinds of numbers: wall time of a run, or of single ranks without their peers, a simulated time, what others
published in a record of theirs, a count or the value of a formula, or a value that a paper prints."""
RECORD_KINDS = {"measure": "measured", "alone": "measured alone", "simulate": "simulated", "report": "reported"}


@dataclass(frozen=True)
class Source:
    """A place where a number can be looked up."""

    id: str
    """A record's run_id, or words joined by hyphens. Unique in a report."""
    kind: str
    """record, formula, or paper."""
    text: str
    """The way to get the number again: the command, the formula, or the table's file."""


def formula(id: str, text: str, reference: str) -> Source:
    """A formula as a source; `reference` is the paper, equation or function that states it."""
    return Source(id, "formula", f"{text} [{reference}]")


@dataclass(frozen=True)
class Number:
    """A value, its kind and its sources. A value of None means that there is no number; `why` may say why."""

    value: float | None
    kind: str
    sources: tuple[Source, ...]
    why: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}: must be one of {', '.join(KINDS)}")
        if not self.sources:
            raise ValueError("a number without a source")

    @property
    def known(self) -> float:
        """The value. Raises ValueError if there is none."""
        if self.value is None:
            raise ValueError(self.why or f"there is no number from {self.sources[0].id}")
        return self.value

    def times(self, factor: float) -> Number:
        """The number in another unit: multiplied by `factor`."""
        return Number(None if self.value is None else self.value * factor, self.kind, self.sources, self.why)

    def over(self, other: Number) -> Number:
        """The quotient of this number and `other`, with the sources of both."""
        return derived(lambda a, b: a / b, self, other)

    def minus(self, other: Number) -> Number:
        """The difference of this number and `other`, with the sources of both."""
        return derived(lambda a, b: a - b, self, other)

    def text(self, format: str = ".4g") -> str:
        """The value as text; a dash where there is no value."""
        return "-" if self.value is None or math.isnan(self.value) else written(self.value, format)


def written(value: float, format: str = ".4g") -> str:
    """A value as text: 19860 where the format would print 1.986e+04."""
    text = f"{value:{format}}"
    return f"{float(text):.0f}" if "e+0" in text and abs(value) < 1e7 else text


def derived(function: Any, *numbers: Number) -> Number:
    """`function` of the numbers' values. The result has no value if one of the numbers has none.

    Its kind is that of ours where a number of the paper is among them. Raises ValueError for times of several modes.
    """
    kinds = {number.kind for number in numbers}
    if len(modes := kinds & set(RECORD_KINDS.values())) > 1:
        raise ValueError(f"{' and '.join(sorted(modes))} times don't make one number")
    sources = tuple(sources_of(numbers))
    kind = min(kinds, key=KINDS.index)
    if missing := [number for number in numbers if number.value is None]:
        return Number(None, kind, sources, missing[0].why)
    return Number(float(function(*(number.value for number in numbers))), kind, sources)


def computed(value: float, *sources: Source) -> Number:
    """A count, or the value of a formula."""
    return Number(value, "computed", sources)


def tally(value: float, numbers: Iterable[Number]) -> Number:
    """A count of something about the numbers, with their sources. Numbers without a value are allowed."""
    numbers = list(numbers)
    kind = min((number.kind for number in numbers), key=KINDS.index)
    return Number(float(value), kind, tuple(sources_of(numbers)))


def count(numbers: Iterable[Number], test: Callable[[float], bool] = lambda value: True) -> Number:
    """The count of the numbers that pass a test; without a test, of all."""
    numbers = list(numbers)
    return tally(sum(test(number.known) for number in numbers), numbers)


def _of_all(function: Callable[[Any], Any]) -> Callable[[Iterable[Number]], Number]:
    return lambda numbers: derived(lambda *values: function(values), *numbers)


total = _of_all(sum)
mean, median = _of_all(np.mean), _of_all(np.median)
least, most = _of_all(min), _of_all(max)
"""One number of several: their sum, arithmetic mean, median, smallest and largest."""


def ends(numbers: Iterable[Number], low: str = "low", high: str = "high") -> dict[str, Number]:
    """The smallest and the largest number by the names that a text has for them."""
    numbers = list(numbers)
    return {low: least(numbers), high: most(numbers)}


def valued(numbers: Iterable[Number]) -> list[Number]:
    """The numbers that have a value."""
    return [number for number in numbers if number.value is not None]


def step_ms(record: Record) -> Number:
    """The time of a record's step in ms."""
    return of_record(record, "step_ms_median")


def gigabytes(record: Record, field: str = "peak_mem_bytes_max") -> Number:
    """A record's field in GB, 1e9 bytes; by default its peak memory."""
    return of_record(record, field).times(1e-9)


def of_record(record: Record, field: str) -> Number:
    """A field of a record as a number. Where the record has no value, its error says why."""
    counted = field in COUNTED and (record.mode == "simulate" or field not in COUNTED_WHERE_MEASURED)
    kind = "computed" if counted else RECORD_KINDS[record.mode]
    return Number(getattr(record, field), kind, (record_source(record),), record.error or "")


COUNTED = (
    *("comm_bytes_per_gpu", "comm_bytes_busiest_gpu", "comm_bytes_expected", "comm_bytes_lower_bound"),
    "comm_bytes_least",
    *("comm_bytes_statistics", "comm_bytes_across_nodes_max", "peak_mem_bytes_max", "peak_mem_bytes_expected"),
    *("work_imbalance", "work_imbalance_lower_bound", "documents", "longest_document", "seqlen"),
)
"""Fields that are counted from plans."""
COUNTED_WHERE_MEASURED = ("comm_bytes_per_gpu", "comm_bytes_busiest_gpu", "peak_mem_bytes_max")
"""Fields of COUNTED that a measured record takes from the tensors that were sent or held."""


def record_source(record: Record, own: Path | None = None) -> Source:
    """The record as a source. Its text is the command that makes the record again; `own` is that of `command`."""
    return Source(record.run_id, "record", f"python -m sp_bench {command(record.config or {}, own)}")


NOT_IN_COMMANDS = ("logger", "baseline", "reuse", "timeout_s", "trace", "results_dir")
SOMEBODYS = "--config-dir DIR"
"""In a command whose point needs a file that isn't here."""


def command(config: Any, own: Path | None = None) -> str:
    """The command-line arguments that compose to `config`. Defaults of conf/config.yaml are left out.

    `own` is a folder with cluster/ ... of one's own, as --config-dir names it. A file that neither it nor the suite has
    is named as it is, behind --config-dir DIR: the config alone says what it had.
    """
    return _command(json.dumps(config), own)


@lru_cache(maxsize=4096)
def _command(config_text: str, own: Path | None) -> str:
    """`command`, found once for all numbers of a record."""
    from sp_bench.analysis.runs import choices, composed

    config = json.loads(config_text)  # its keys are text, as those of a record that is read
    groups = {key: value["name"] for key, value in config.items() if isinstance(value, dict) and "name" in value}
    chosen_groups = {key: name for key, name in groups.items() if name in choices(key, own)}
    chosen = tuple(f"{key}={name}" for key, name in chosen_groups.items() if key != "logger")
    plain, usual = composed((), own), composed(chosen, own)
    arguments, beside = [], ""
    for key, value in config.items():
        if key in NOT_IN_COMMANDS:
            continue
        if key == "data":
            arguments += _data(value) if value != plain.get(key) else []
        elif key not in groups:
            arguments += _changed(key, value, usual.get(key))
        elif value != plain.get(key):
            arguments.append(f"{key}={groups[key]}")
            arguments += _changed(key, value, usual[key]) if key in chosen_groups else []
            if groups[key] not in choices(key):
                beside = f"--config-dir {own} " if key in chosen_groups else f"{SOMEBODYS} "
    return beside + " ".join(arguments)


def _data(value: Mapping[str, Any]) -> list[str]:
    """The choice of a file of conf/data of this kind, and what differs from it: the fewest arguments that do."""
    from sp_bench.analysis.runs import choices, group

    files = {name: group("data", name) for name in choices("data")}
    alike = {name: file for name, file in files.items() if file["kind"] == value["kind"]}
    return min(([f"data={name}", *_changed("data", dict(value), file)] for name, file in alike.items()), key=len)


def _changed(path: str, value: Any, plain: Any) -> list[str]:
    """The arguments that turn the value `plain` at `path` into `value`."""
    from sp_bench.analysis.runs import argument

    if isinstance(value, dict) and isinstance(plain, dict):
        return sum((_changed(f"{path}.{key}", value[key], plain.get(str(key))) for key in value), [])
    return [] if value == plain else [f"{path}={argument(value)}"]


def about_number(number: Number) -> str:
    """The number's kind and sources in one line, for a tooltip."""
    shown = "; ".join(source.text for source in number.sources[:4])
    more = f"; {len(number.sources) - 4} more" if len(number.sources) > 4 else ""
    return f"{number.kind}: {shown}{more}{f' ({number.why})' if number.why else ''}"


def sources_of(numbers: Iterable[Number]) -> list[Source]:
    """The sources of all the numbers, each once."""
    return list(dict.fromkeys(source for number in numbers for source in number.sources))
