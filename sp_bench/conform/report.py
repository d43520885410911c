"""The rows of a subject as a table for a terminal, as Markdown and as JUnit XML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from rich.table import Table
from rich.text import Text

from sp_bench import markdown
from sp_bench.conform.catalogue import CHECKS
from sp_bench.conform.run import Row

STYLES = {"holds": "green", "fails": "bold red", "refused": "yellow", "not claimed": "dim", "not run": "dim"}
HEAD = ("check", "looks for", "result", "cases", "run with", "smallest failing case, or what is refused")


def cells(row: Row) -> list[str]:
    """A row in words."""
    cases = f"{row.cases - row.failed} of {row.cases}" if row.failed else str(row.cases or "-")
    return [row.check.name, row.check.looks_for, row.status, cases, run_with(row), remark(row)]


def run_with(row: Row) -> str:
    """The numbers of ranks and the masks that were run, and pairs of them that were not."""
    pairs = {(case.n, case.mask) for case in row.ran}
    sizes, masks = sorted({n for n, _ in pairs}), sorted({mask for _, mask in pairs})
    words = f"{', '.join(map(str, sizes))}: {', '.join(masks)}" if pairs else ""
    missing = [f"{n} {mask}" for n in sizes for mask in masks if (n, mask) not in pairs]
    return f"{words}, not {', '.join(missing)}" if missing else words


def remark(row: Row) -> str:
    """The smallest failing case and what is wrong with it, and how many cases are refused, and why."""
    words = [f"{row.smallest}: {row.why}"] if row.status == "fails" else []
    if row.other_layouts:
        would_hold = " or ".join(f"method.layout={name}" for name in row.other_layouts)
        words.append(f"tried as {row.layout}, {would_hold} would hold")
    if row.refused:
        reason, _ = max(row.refused.items(), key=lambda item: item[1])
        words.append(f"{sum(row.refused.values())} refused: {reason}")
    return "; ".join(words)


def table(title: str, rows: Sequence[Row]) -> Table:
    """The table of one subject for a terminal."""
    made = Table(*HEAD, title=f"{title}: {summary(rows)}", title_justify="left", show_lines=False)
    for row in rows:
        name, looks_for, status, cases, ran, last = cells(row)
        made.add_row(name, looks_for, Text(status, STYLES[row.status]), cases, ran, Text(last))
    return made


def summary(rows: Sequence[Row]) -> str:
    """How many checks came out how."""
    counts = {status: sum(row.status == status for row in rows) for status in STYLES}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def advice(title: str, rows: Sequence[Row]) -> str:
    """The layout that the function seems to be for, and the request that claims it; empty if no layout helps."""
    failing = [row for row in rows if row.status == "fails"]
    counts = Counter(name for row in failing for name in row.other_layouts)
    if not counts:
        return ""
    name, count = counts.most_common(1)[0]
    layouts = " and ".join(sorted({row.layout for row in failing if name in row.other_layouts}))
    return (
        f"{count} of the {len(failing)} failing checks hold with method.layout={name}, and fail as {layouts}. "
        f"If that is how its tokens are assigned, claim it: python -m sp_bench.conform {title} method.layout={name}"
    )


def as_markdown(tables: Mapping[str, Sequence[Row]]) -> str:
    """A section with a table for each subject; with several, a matrix of all first."""
    sections = []
    if len(tables) > 1:
        by_check = zip(*tables.values(), strict=True)
        matrix = [[rows[0].check.name, *(row.status for row in rows)] for rows in by_check]
        sections.append(markdown.table(["check", *(f"`{title}`" for title in tables)], matrix))
    for title, rows in tables.items():
        lines = [[f"`{name}`", *rest] for name, *rest in map(cells, rows)]
        sections += [f"## `{title}`", f"{summary(rows)}.", markdown.table(HEAD, lines)]
    return "\n\n".join(sections) + "\n"


def as_junit(tables: Mapping[str, Sequence[Row]]) -> str:
    """JUnit XML: a suite for each subject, a test case for each check; refused and not claimed ones are skipped."""
    root = ElementTree.Element("testsuites", name="sp_bench.conform")
    for title, rows in tables.items():
        counts = {status: str(sum(row.status == status for row in rows)) for status in STYLES}
        skipped = str(sum(int(counts[status]) for status in ("refused", "not claimed", "not run")))
        suite = ElementTree.SubElement(
            root, "testsuite", name=title, tests=str(len(rows)), failures=counts["fails"], errors="0", skipped=skipped
        )
        for row in rows:
            case = ElementTree.SubElement(suite, "testcase", classname=f"conform.{title}", name=row.check.name)
            if row.status == "fails":
                ElementTree.SubElement(case, "failure", message=_plain(remark(row))).text = _plain(remark(row))
            elif row.status != "holds":
                ElementTree.SubElement(case, "skipped", message=_plain(remark(row) or row.status))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _plain(text: str) -> str:
    """Without the characters that XML can't hold."""
    return "".join(c for c in text if c in "\t\n" or c >= " ")


def checks_table() -> str:
    """A table of the checks, with public bugs that each would have seen, in Markdown (docs/how-to/conform.md)."""
    rows = [[f"`{c.name}`", c.looks_for, ", ".join(map(_link, c.published))] for c in CHECKS]
    return markdown.table(["check", "holds if", "bugs of this kind in public code"], rows) + "\n"


def _link(thread: str) -> str:
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"
