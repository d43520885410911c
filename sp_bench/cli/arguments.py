"""Shared parts of the command lines. Imports little, so that a wrong flag is answered at once."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_bench.errors import RequestError, unknown_key
from sp_bench.reading import read
from sp_bench.terminal import fitted, say


def run_command(
    name: str, usage: str, run: Callable[[list[str]], int], argv: Sequence[str] | None, flags: Iterable[str] = ()
) -> int:
    """Run a command line; return the exit code of run(arguments), or 2 if it raises RequestError.

    `argv` is None for this process's own arguments. --help prints `usage`. Other arguments that start with - must be
    among `flags`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(fitted(usage.rstrip(), reflow=100))
        return 0
    try:
        refuse_flags(arguments, [*flags, "--help"])
        return run(arguments)
    except RequestError as error:
        say(f"{name}: {error}")
        return 2


def refuse_flags(arguments: Sequence[str], flags: Sequence[str]) -> None:
    """Raise RequestError for an argument that starts with - and is none of the flags."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, _, value = argument.partition("=")
        if not name.startswith("-") or name in flags:
            continue
        word, known = name.strip("-"), {each.strip("-"): each for each in flags}
        if close := difflib.get_close_matches(word, known, n=1):
            raise RequestError(argument, "there is no such flag", f"did you mean {known[close[0]]}?")
        value = value or ("" if following.startswith("-") or "=" in following else following)
        hint = f"did you mean {word}={value}? " if value else ""
        raise RequestError(argument, "there is no such flag", f"{hint}known: {', '.join(sorted(flags))}")


def keys_and_paths(arguments: Sequence[str], known: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The values of key=value arguments by key, and the other arguments, which are paths.

    Raises RequestError for an unknown key, unless the argument is the path of a file.
    """
    given, paths, known = {}, [], list(known)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in known:
            given[key] = value
        elif equals and not os.path.exists(argument):
            raise unknown_key(key, known)
        else:
            paths.append(argument)
    return given, paths


def only_keys(arguments: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, str]:
    """The values of key=value arguments by key. Raises RequestError for other arguments, and keys without a default."""
    given, others = keys_and_paths(arguments, defaults)
    if others:
        key, default = next(iter(defaults.items()))
        raise RequestError(others[0], "is not of the form key=value", f"{key}={default} would work")
    return given


def flag(given: Mapping[str, Any], key: str) -> bool:
    """Whether `key` is true. Raises RequestError if it is neither true nor false."""
    return read(bool, {"true": True, "false": False}.get(str(given[key]).lower(), given[key]), key)


def config_dir(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder that --config-dir names, or None, and the other arguments.

    Raises RequestError if no folder follows.
    """
    rest = [word for argument in arguments for word in re.split("(?<=^--config-dir)=", argument)]
    if "--config-dir" not in rest:
        return None, rest
    at = rest.index("--config-dir")
    if at + 1 == len(rest):
        raise RequestError("--config-dir", "needs a folder", "--config-dir my_conf would work")
    own = Path(rest[at + 1])
    del rest[at : at + 2]
    return own, rest


def writable_folder(key: str, name: Any) -> Path:
    """The folder that a key names, made if necessary. Raises RequestError if it is no name, or no file can be written
    to it.

    A file is written as a test: permission bits don't show root a read-only mount, nor anybody a full disk.
    """
    if not isinstance(name, str | int | float) or isinstance(name, bool):
        raise RequestError(f"{key}={name}", "must be a folder", f"{key}=results would work")
    folder, done = Path(str(name)), "made"  # 5 is read as a number
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = "written"
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        rule = f"can't be {done} ({error.strerror})"
        raise RequestError(f"{key}={name}", rule, f"{key}=results would work") from None
    return folder


def sweep_name(arguments: Sequence[str]) -> str:
    """The W&B group of a sweep's points: its arguments, cut to the 128 characters that W&B allows.

    Keys of the results folder and the logger don't change it.
    """
    text = " ".join(a for a in arguments if a.partition("=")[0].partition(".")[0] not in ("results_dir", "logger"))
    return text if len(text) <= 128 else f"{text[:119]} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def in_group(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The config with a W&B group, unless it names one. The record keeps it for a later upload."""
    return {**config, "logger": {**config["logger"], "group": config["logger"].get("group") or group}}
