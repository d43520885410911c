"""The texts of `sp-bench --help` and `sp-bench help`, from the table of commands and the comments of conf/."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sp_bench.cli.commands import COMMANDS
from sp_bench.errors import RequestError
from sp_bench.resources import CONF, conf_files, place

WIDTH = 80
NOT_OF_POINTS = ("slurm", "sweep")


class Line(NamedTuple):
    """A key of a config file."""

    key: str
    value: str
    about: str


def overview() -> str:
    """The commands, on one screen."""
    commands = "\n".join(f"  {name:<13} {command.does}" for name, command in COMMANDS.items())
    return f"""\
sp-bench [COMMAND] [-m] [--config-dir DIR] [key=value ...]

A point is measured where this machine has the hardware, else simulated. Try
  sp-bench method=mesh gpus=256
  sp-bench -m method=mesh,ring gpus=32,64 mesh.ulysses=auto
Commands (each answers --help; python -m sp_bench COMMAND is the same)
{commands}
Flags of run: -m; --config-dir DIR, like conf/; --all, every quantity; --json,
records to stdout; --cfg, the composed config. `sp-bench help` lists all keys,
`sp-bench help KEY` explains one, such as gpus, cluster or method.tile.
Exit codes: 0 ok, 2 a request that can't be served, 143 SIGTERM, 1 others."""


def all_keys() -> str:
    """All keys of a point with their defaults, then the choices of each group."""
    keys = _keys_text(CONF / "config.yaml").partition("\n\n")[2].strip()
    groups = (
        textwrap.fill(f"{group}: {', '.join(conf_files(group))}", WIDTH, subsequent_indent="  ") for group in _groups()
    )
    return "\n".join(("Keys, with their defaults:", keys, "", "Groups, with their choices:", *groups))


def explained(word: str) -> str:
    """Explain a key, a group or an option of a method: its values and default. Raises RequestError for others."""
    if word in _groups():
        return _group(word)
    lines = _choices_of_lines()
    meant = {line: names for line, names in lines.items() if _is_meant(word, line.key, names)}
    if not meant:
        words = {*_groups(), *COMMANDS, *(part for line in lines for part in (line.key, line.key.rpartition(".")[2]))}
        close = "".join(f"did you mean {near}? " for near in difflib.get_close_matches(word, words, n=1))
        raise RequestError(word, "there is no such key or command", f"{close}`sp-bench help` lists all keys")
    return "\n".join([*(_explained(line, names) for line, names in meant.items()), *_workloads(word)])


def _workloads(word: str) -> list[str]:
    """The workloads, each with the first sentence of its module, if the word is their key; otherwise nothing."""
    texts = (path.read_text() for path in sorted(place(word).glob("*.py"))) if word == "workload" else ()
    said = (re.match(r'"""workload=(\w+): (.*?)\.\s', text, re.DOTALL) for text in texts)
    return [
        textwrap.fill(f"{one[1]}: {one[2]}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        for one in said
        if one
    ]


def _is_meant(word: str, key: str, names: list[str]) -> bool:
    """Whether a word means a key: by its name, that of a section of it, or METHOD.OPTION."""
    rest = key.partition(".")[2]
    return f"{key}.".startswith(f"{word}.") or bool(names and word in (rest, *(f"{name}.{rest}" for name in names)))


def _choices_of_lines() -> dict[Line, list[str]]:
    """The keys of all config files, with the choices of their group whose files have them with that value."""
    choices: dict[Line, list[str]] = {line: [] for line in _lines(CONF / "config.yaml")}
    top = {line.key for line in choices}
    for group in _groups():
        for name, path in conf_files(group).items():
            whole = path.read_text().startswith("# @package _global_")
            for line in _lines(path):
                key = line.key if whole else f"{group}.{line.key}"
                if key not in top and line.key not in ("name", "kind"):
                    choices.setdefault(line._replace(key=key), []).append(name)
    return choices


def _explained(line: Line, names: list[str]) -> str:
    """A key with its default, what it says, and the choices of its group that have it."""
    of = f"of {line.key.partition('.')[0]}={', '.join(names)}" if names else ""
    lines = [f"{line.key}{f', default {line.value}' if line.value else ''}"]
    for text in filter(None, (line.about, of)):
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _group(group: str) -> str:
    """The choices of a group, each with the first sentence that its file has about it."""
    files = conf_files(group)
    longest = max(map(len, files))
    room = WIDTH - longest - 4
    default = re.search(rf"- {group}: (\w+)", (CONF / "config.yaml").read_text())
    assert default
    rows = (
        f"  {name:<{longest}}  {textwrap.shorten(_about(group, path), room, placeholder=' ...')}".rstrip()
        for name, path in files.items()
    )
    return "\n".join((f"{group}, default {default[1]}; a choice's own keys are {group}.KEY", *rows))


def _about(group: str, path: Path) -> str:
    """The first sentence about a choice: its comment or, of a method, the docstring of its module."""
    module = place("methods") / f"{path.stem}.py"
    if group == "method" and module.exists():
        text = module.read_text().removeprefix('"""').partition("\n\n")[0].replace("\n", " ")
    else:
        comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
        text = " ".join(line for line in comments if not line.startswith("@"))
    return re.split(r"(?<! al)\. ", text)[0].rstrip(".")


def _keys_text(path: Path) -> str:
    """A config file with each key's comment on its line."""
    return re.sub(r"\n {12,}# ", " ", path.read_text())


def _lines(path: Path) -> Iterator[Line]:
    """The keys of a config file with their values and comments; that of a nested one is a.b."""
    parents: list[str] = []
    for text in _keys_text(path).splitlines():
        if match := re.fullmatch(r"((?:  )*)(\w+):\s*(.*?)\s*(?:# (.*))?", text):
            indent, key, value, about = match.groups()
            parents = [*parents[: len(indent) // 2], key]
            if parents[0] != "defaults":
                yield Line(".".join(parents), value, about or "")


def _groups() -> list[str]:
    """The groups that points have."""
    return sorted(path.name for path in CONF.iterdir() if list(path.glob("*.yaml")) and path.name not in NOT_OF_POINTS)
