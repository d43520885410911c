"""Text in the width of the terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO

KEY_VALUE = r"[\w.+-]+=[^\s;,:`]+"
COMMAND = re.compile(
    rf"`[^`]+`|(?:[\w./]*python -m [\w.]+|sp-bench|srun|pip install)(?: (?:-\S+|{KEY_VALUE}|[A-Z]{{2,}}\b))*"
    rf"|(?P<keys>{KEY_VALUE}(?: {KEY_VALUE})+)"
)
"""The parts of a line that are copied: a command with its arguments, or several `keys` with values."""
GLUE = "\0"


def fitted(text: str, *, width: int | None = None, reflow: int = 0) -> str:
    """Text whose lines fit a width: the terminal's, or 80 where there is none. Commands and words stay whole.

    A long line goes on below its last column. Lines of at least `reflow` characters, if given, are joined first with
    what goes on below them.
    """
    width, lines = width or shutil.get_terminal_size().columns, []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        last = before.rpartition("\n")[2]
        goes_on = reflow and len(last) >= reflow and not COMMAND.fullmatch(last.strip())
        if goes_on and line.strip() and _indent(line) == _hang(before):
            lines[-1] = f"{before}\n{line}"
        else:
            lines.append(line)
    return "\n".join(_wrapped(line, width) for line in lines)


def say(text: str, file: TextIO | None = None) -> None:
    """Print text that fits the terminal, to stderr if no file is given."""
    print(fitted(text), file=file or sys.stderr, flush=True)


def _wrapped(lines: str, width: int) -> str:
    """One line, or several that are one paragraph, within a width."""
    if max(map(len, lines.split("\n"))) <= width:
        return lines
    whole = re.sub(r"\n\s*", " ", lines)
    first, rest = " " * _indent(whole), " " * _hang(whole)
    glued = COMMAND.sub(
        lambda found: found[0] if found["keys"] and len(rest + found[0]) > width else found[0].replace(" ", GLUE),
        whole.strip(),
    )
    kept = textwrap.wrap(
        glued, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(kept).replace(GLUE, " ")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _hang(lines: str) -> int:
    """The column in which a line goes on: that of the last of its columns that begins in the first half, or its own."""
    line = lines.partition("\n")[0]
    gaps = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}(?=\S)", line) if gap.end() <= 40]
    return gaps[-1] if gaps else _indent(line)
