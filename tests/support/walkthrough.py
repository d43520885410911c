"""Pages of docs/ that a reader follows step by step, and following them as written.

A fenced block of a page is a step if it is one of these:

    ```console                  lines that start with "$ " are commands; other lines must be in the output of the last
                                one, and ... stands for anything
    ```yaml title="a/b.yaml"    a file to write; any language
    ```diff title="a/b.py"      lines to add (+) to a file, each group behind the line before it, and to remove (-)
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A fenced block."""

    kind: str
    """The block's language."""
    path: str
    """The file that its title names; empty without one."""
    text: str


def steps(page: Path) -> Iterator[Step]:
    """The steps of a page, in order."""
    for kind, path, text in FENCE.findall(page.read_text()):
        if kind == "console" or path:
            yield Step(kind, path, text)


def follow(page: Path, folder: Path, environment: Mapping[str, str]) -> int:
    """Do all that a page says, in `folder`; returns how many commands were run. Fails where one does or says less."""
    commands = 0
    for step in steps(page):
        path = folder / step.path
        if step.kind == "console":
            commands += run(step.text, folder, environment)
        elif step.kind == "diff":
            path.write_text(patched(path.read_text(), step.text))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
    return commands


def run(text: str, folder: Path, environment: Mapping[str, str]) -> int:
    """Run the commands of a console block, and hold their outputs against what the block shows."""
    first, *blocks = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first.strip(), f"no command before {first!r}"
    for block in blocks:
        command, _, shown = re.sub(r"\\\n\s*", "", block).partition("\n")
        line = re.sub(r"^(python|pytest)\b", lambda word: WORDS[word[0]], command.strip())
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        for wanted in filter(None, map(words, shown.splitlines())):
            pattern = ".*".join(map(re.escape, wanted.split("...")))
            assert re.search(pattern, words(done.stdout)), f"{command}\ndoesn't print: {wanted}\n{done.stdout}"
    return len(blocks)


PYTHON = shlex.quote(sys.executable)
WORDS = {"python": PYTHON, "pytest": f"{PYTHON} -m pytest -p no:cacheprovider"}


def words(text: str) -> str:
    """The text with single spaces, and without the lines of tables."""
    return " ".join(re.sub(r"[│┃]", " ", text).split())


def patched(text: str, changes: str) -> str:
    """A file's text with the changes of a diff block. Fails where a line that it names is not there."""
    lines, at = text.splitlines(), -1
    for change in changes.splitlines():
        sign, line = change[:1], change[1:]
        if sign == "+":
            at += 1
            lines.insert(at, line)
            continue
        assert line in lines[at + 1 :], f"no line {line!r}"
        at = lines.index(line, at + 1)
        if sign == "-":
            del lines[at]
            at -= 1
    return "\n".join(lines) + "\n"
