"""Findings: one check each, with a status and, unless all is well, its fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STATUSES = ("ok", "warn", "fail")
"""fail: points can't be measured, or their results would be wrong. warn: they would be slower than they need be."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    section: str
    check: str
    status: str
    found: str
    fix: str = ""
    """The remedy; empty if and only if the status is ok."""

    def __post_init__(self) -> None:
        assert self.status in STATUSES and bool(self.fix) == (self.status != "ok"), self


def finding(section: str, check: str, found: str, status: str = "ok", fix: str = "") -> Finding:
    """A finding. `fix` is dropped if the status is ok, so that a check can state it in advance."""
    return Finding(section=section, check=check, status=status, found=found, fix=fix if status != "ok" else "")


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """The number of findings by status."""
    by_status = Counter(one.status for one in findings)
    return {status: by_status[status] for status in STATUSES}


def as_text(findings: Sequence[Finding]) -> str:
    """The findings by section, one a line, each fix below its finding."""
    lines, width = [], max((len(one.check) for one in findings), default=0)
    for section in dict.fromkeys(one.section for one in findings):
        lines.append(section)
        for one in findings:
            if one.section == section:
                lines.append(f"  {one.status:<4}  {one.check:<{width}}  {one.found}")
                lines += [f"        fix: {one.fix}"] * bool(one.fix)
    total = counts(findings)
    lines.append(", ".join(f"{number} {status}" for status, number in total.items()))
    return "\n".join(lines)


def as_json(findings: Sequence[Finding], **facts: Any) -> Mapping[str, Any]:
    """The findings with their counts, and the facts they follow from."""
    return {"counts": counts(findings), "findings": [asdict(one) for one in findings], **facts}


def on_hosts(hosts: Sequence[str], of: int) -> str:
    """The hosts of a finding as a suffix; empty if it holds on all of them."""
    return "" if len(hosts) == of else f" (on {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"
