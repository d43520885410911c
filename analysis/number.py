"""Numbers that know where they are from: a record, a formula, or a table of a paper.

A report shows no other. What is worked out of several numbers has the sources of all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench.records import Record

KINDS = ("measured", "measured alone", "simulated", "computed", "paper")
"""What a number is: wall time of a whole run or of single ranks without their peers, a model's time, counted or a
formula's value, or as a paper prints it."""
RECORD_KINDS = {"measure": "measured", "alone": "measured alone", "simulate": "simulated"}


@dataclass(frozen=True)
class Source:
    """Where a number can be looked up."""

    id: str
    """A record's run_id, or a short name in words joined by hyphens. Unique in a report."""
    kind: str
    """record, formula, or paper."""
    text: str
    """What a reader needs to get the number again: the command, the formula, or the table's file."""


def formula(id: str, text: str, reference: str) -> Source:
    """A formula, and the paper, equation or function that it is from."""
    return Source(id, "formula", f"{text} [{reference}]")


@dataclass(frozen=True)
class Number:
    """A value, what kind of number it is, and its sources. None is "there is none"; `why` may say why."""

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
        """In another unit."""
        return Number(None if self.value is None else self.value * factor, self.kind, self.sources, self.why)

    def over(self, other: Number) -> Number:
        """The quotient."""
        return derived(lambda a, b: a / b, self, other)

    def text(self, format: str = ".4g") -> str:
        """As shown; a dash where there is none."""
        return "-" if self.value is None or math.isnan(self.value) else f"{self.value:{format}}"


def derived(function: Any, *numbers: Number) -> Number:
    """`function` of the values of the numbers, or none if one of them is.

    Of paper and ours the kind is ours. Raises ValueError for times of several modes in one number.
    """
    kinds = {number.kind for number in numbers}
    if len(modes := kinds & set(RECORD_KINDS.values())) > 1:
        raise ValueError(f"{' and '.join(sorted(modes))} times don't make one number")
    sources = tuple(dict.fromkeys(source for number in numbers for source in number.sources))
    kind = min(kinds, key=KINDS.index)
    if missing := [number for number in numbers if number.value is None]:
        return Number(None, kind, sources, missing[0].why)
    return Number(float(function(*(number.value for number in numbers))), kind, sources)


def of_record(record: Record, field: str) -> Number:
    """A field of a record. Where the point has none, the record's error says why."""
    counted = field in COUNTED and (record.mode == "simulate" or field not in COUNTED_WHERE_MEASURED)
    kind = "computed" if counted else RECORD_KINDS[record.mode]
    return Number(getattr(record, field), kind, (record_source(record),), record.error or "")


COUNTED = (
    *("comm_bytes_per_gpu", "comm_bytes_busiest_gpu", "comm_bytes_expected", "comm_bytes_lower_bound"),
    *("comm_bytes_statistics", "comm_bytes_across_nodes_max", "peak_mem_bytes_max", "peak_mem_bytes_expected"),
)
"""Fields that are counted from plans: no model of time is in them, and no measurement but in the following."""
COUNTED_WHERE_MEASURED = ("comm_bytes_per_gpu", "comm_bytes_busiest_gpu", "peak_mem_bytes_max")
"""Of a measured record, from the tensors that were sent or held."""


def record_source(record: Record) -> Source:
    """The record as a source; its text is the command that makes it again."""
    return Source(record.run_id, "record", f"python -m sp_bench {command(record.config or {})}")


NOT_IN_COMMANDS = ("logger", "baseline", "reuse", "timeout_s", "trace", "results_dir")


def command(config: Any) -> str:
    """The arguments that compose to a config, as far as they differ from conf/config.yaml's defaults."""
    from sp_bench.analysis.runs import argument, defaults, group

    usual, found = defaults(), []
    groups = {key: value for key, value in config.items() if isinstance(value, dict) and "name" in value}
    for key, value in config.items():
        if key in NOT_IN_COMMANDS or value == usual.get(key):
            continue
        if key not in groups:
            found += _changed(key, value, usual.get(key))
            continue
        found.append(f"{key}={value['name']}")
        if key == "method":
            options = {option: chosen for option, chosen in value.items() if option != "name"}
            plain = usual["method"] if value["name"] == usual["method"]["name"] else {}
            found += [f"method.{o}={argument(v)}" for o, v in options.items() if v != plain.get(o, "auto")]
        elif key == "cluster":
            found += _changed(key, value, group(key, value["name"]))
    return " ".join(found)


def _changed(path: str, value: Any, plain: Any) -> list[str]:
    """The arguments that make `plain` the value."""
    from sp_bench.analysis.runs import argument

    if isinstance(value, dict) and isinstance(plain, dict):
        return sum((_changed(f"{path}.{key}", value[key], plain.get(str(key))) for key in value), [])
    return [] if value == plain else [f"{path}={argument(value)}"]


def of_paper(value: float | None, path: str | Path, where: str = "") -> Number:
    """A number as printed. `path` is the file under analysis/papers that holds it."""
    name = Path(path).name
    id = "-".join([name.removesuffix(".csv"), *re.findall(r"[\w.]+", where)])
    return Number(value, "paper", (Source(id, "paper", f"analysis/papers/{name} {where}".strip()),))


def about_number(number: Number) -> str:
    """Its kind and sources in a line, for a tooltip."""
    shown = "; ".join(source.text for source in number.sources[:4])
    more = f"; {len(number.sources) - 4} more" if len(number.sources) > 4 else ""
    return f"{number.kind}: {shown}{more}{f' ({number.why})' if number.why else ''}"


def sources_of(numbers: Iterable[Number]) -> list[Source]:
    """All sources, each once."""
    return list(dict.fromkeys(source for number in numbers for source in number.sources))
