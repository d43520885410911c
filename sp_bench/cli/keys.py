"""The keys of a point, those of conf/config.yaml and of all choices of its groups; and what an unknown one may mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sp_bench.cli.commands import commands_with
from sp_bench.errors import RequestError
from sp_bench.point.masks import OF_MASKS
from sp_bench.resources import GLOBAL, conf_content, yaml_of

MOST_NAMED = 4


class Keys:
    """The keys that exist, and the choices of its group that have each. `folders` are like conf/, the suite's first."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self.values: dict[str, Any] = yaml_of(folders[0] / "config.yaml")
        """The keys of every point, with their defaults."""
        defaults = [each for each in self.values.pop("defaults") if isinstance(each, dict)]
        self.chosen: dict[str, str] = {group: name for each in defaults for group, name in each.items()}
        """The default choice of each group."""

    def options(self, method: str) -> list[str]:
        """The options of a method."""
        choices = self._of_group("method").items()
        return sorted(key.removeprefix("method.") for key, names in choices if method in names)

    def unknown(self, key: str, value: str, given: Mapping[str, str]) -> RequestError:
        """The error for a key that a point doesn't have, with those that may be meant and the choices they need.

        `value` is what was given for it, `given` all keys and choices that were.
        """
        chosen, group = {**self.chosen, **given}, key.partition(".")[0]
        if names := self._choices.get(key):
            rule = f"is a key of {group}={_listed(names)}, not of {group}={chosen[group]}"
            return RequestError(key, rule, f"did you mean {self._argument(key, value, chosen)}?")
        rule, last = "there is no such key", _last(key)
        if alike := [each for each in self._choices if _last(each) == last]:
            suggestions = " or ".join(self._argument(each, value, chosen) for each in alike[:MOST_NAMED])
            return RequestError(key, rule, f"did you mean {suggestions}?")
        if commands := commands_with(key):
            rule = f"is a key of {_listed(commands)}, not of a point"
            return RequestError(key, rule, f"did you mean {commands[0]} {key}={value} ...?")
        if near := self._nearest(key):
            return RequestError(key, rule, f"did you mean {self._argument(near, value, chosen)}?")
        return RequestError(key, rule, "`sp-bench help` lists all keys")

    @cached_property
    def _choices(self) -> dict[str, set[str]]:
        """All keys. Those that every point has are without choices."""
        choices: dict[str, set[str]] = {key: set() for key in _flat(self.values)}
        for group in self.chosen:
            choices = self._of_group(group) | choices
        return choices

    def _of_group(self, group: str) -> dict[str, set[str]]:
        files = {path.stem: path for folder in reversed(self._folders) for path in (folder / group).glob("*.yaml")}
        choices: dict[str, set[str]] = {}
        for name, path in files.items():
            top = "" if path.read_text().startswith(GLOBAL) else f"{group}."
            for key in _flat(conf_content(path, files)):
                if key not in ("name", "kind"):
                    choices.setdefault(top + key, set()).add(name)
        return choices

    def _argument(self, key: str, value: str, chosen: Mapping[str, str]) -> str:
        """The key and its value as arguments, with the choices that they need."""
        group, names, needed = key.partition(".")[0], self._choices[key], []
        if group in OF_MASKS and chosen.get("mask") not in OF_MASKS[group]:
            needed.append(f"mask={OF_MASKS[group][0]}")
        if names and chosen.get(group) not in names:
            needed.append(f"{group}={self.chosen[group] if self.chosen[group] in names else min(names)}")
        return " ".join((*needed, f"{key}={value}"))

    def _nearest(self, key: str) -> str | None:
        """The key that `key` begins or, by its whole or its last name, is nearest to."""
        begun = sorted((each for each in self._choices if each.startswith(key)), key=len)
        by_last = {_last(each): each for each in reversed(self._choices)}
        nearest = begun or difflib.get_close_matches(key, [*self._choices, *by_last], n=1, cutoff=0.7)
        return by_last.get(nearest[0], nearest[0]) if nearest else None


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _flat(content: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The keys of a mapping, and of those in it as a.b. Keys that are numbers are data."""
    for key, value in content.items():
        if isinstance(key, str):
            yield path + key
            if isinstance(value, Mapping):
                yield from _flat(value, f"{path}{key}.")


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
