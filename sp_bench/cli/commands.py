"""The commands: `sp-bench NAME ...`, or python -m MODULE. Imports little: each module when its command is run.

A module is a command if it has a line `COMMAND = (name, usage, does)`: its name, its arguments with the keys that are
its own, and what it does in at most 62 characters. Such modules are sp_bench/NAME.py, sp_bench/NAME/__main__.py,
analysis/NAME.py and slurm/NAME.py. Their text is read, so that none is imported for the list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from sp_bench.checkout import PACKAGE, place
from sp_bench.errors import RequestError
from sp_bench.terminal import say

_LINE = re.compile(r"^COMMAND = (\(.*?\))$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command of `sp-bench`."""

    main_in: str
    """The module with main(arguments)."""
    usage: str
    does: str

    @property
    def module(self) -> str:
        """The module that `python -m` runs."""
        return self.main_in.removesuffix(".__main__")

    def run(self, arguments: Sequence[str]) -> int:
        """Run it; return the exit code."""
        try:
            module = import_module(self.main_in)
        except RequestError as error:  # an extra that isn't installed
            say(f"{self.module}: {error}")
            return 2
        return module.main(list(arguments))


def _found() -> Iterator[tuple[str, Command]]:
    """The names and commands of all modules that have one."""
    folders = {"sp_bench": PACKAGE, "sp_bench.analysis": place("analysis"), "sp_bench.slurm": place("slurm")}
    for package, folder in folders.items():
        for path in (*folder.glob("*.py"), *folder.glob("*/__main__.py")):
            if line := _LINE.search(path.read_text()):
                name, usage, does = ast.literal_eval(line[1])
                module = ".".join(path.relative_to(folder).with_suffix("").parts)
                yield name, Command(f"{package}.{module}", usage, does)


COMMANDS = dict(sorted(_found(), key=lambda each: (each[0] != "run", each[0])))
"""All commands, by name: `run`, which is the default, and the others in order."""


def commands_with(key: str) -> list[str]:
    """The commands, as they are typed, that have a key which points don't have."""
    return [
        f"sp-bench {name}" for name, command in COMMANDS.items() if re.search(rf"\b{re.escape(key)}=", command.usage)
    ]
