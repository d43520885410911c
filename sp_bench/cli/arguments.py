"""What command lines have in common. Imports little, so that a wrong flag is answered at once."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_bench.errors import RequestError, unknown, unknown_key


def run_command(
    name: str, usage: str, run: Callable[[list[str]], int], argv: Sequence[str] | None, flags: Iterable[str] = ()
) -> int:
    """A command line, which `run` answers with its exit code: 0 with `usage` for --help, 2 with what can't be asked.

    `argv` is None for this process's own arguments. Those that start with - are refused unless they are among `flags`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(usage.rstrip())
        return 0
    try:
        for argument in arguments:
            if argument.startswith("-") and argument not in flags:
                raise unknown("flag", argument, [*flags, "--help"])
        return run(arguments)
    except RequestError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def keys_and_paths(arguments: Sequence[str], known: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The values of key=value, by key, and the other arguments, which name files or folders.

    Raises RequestError for a key that is not known, unless there is a file of that name.
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
    """The values of key=value, by key. Raises RequestError for anything else, and keys that have no default."""
    given = {}
    for argument in arguments:
        key, equals, given[key] = argument.partition("=")
        if not equals:
            first, default = next(iter(defaults.items()))
            raise RequestError(argument, "is not of the form key=value", f"{first}={default} would work")
        if key not in defaults:
            raise unknown_key(key, defaults)
    return given


def config_dir(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder that --config-dir names, None without it, and the other arguments.

    Raises RequestError where the folder is missing.
    """
    rest = list(arguments)
    if "--config-dir" not in rest:
        return None, rest
    at = rest.index("--config-dir")
    if at + 1 == len(rest):
        raise RequestError("--config-dir", "needs a folder", "--config-dir my_conf would work")
    own = Path(rest[at + 1])
    del rest[at : at + 2]
    return own, rest


def writable_folder(key: str, name: str) -> Path:
    """The folder that a key names, made if need be. Raises RequestError where no file can be written to it.

    Permission bits would not tell root of a read-only mount, nor anybody of a full disk, so it is tried.
    """
    folder, done = Path(name), "made"
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
    """What the points of a sweep have in common as a W&B group, which may have 128 characters: what was asked for.

    The same when it is started again with its records or runs elsewhere.
    """
    text = " ".join(a for a in arguments if a.partition("=")[0].partition(".")[0] not in ("results_dir", "logger"))
    return text if len(text) <= 128 else f"{text[:119]} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def in_group(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The config with its W&B group, unless it asks for one; its record has it too, for a later upload."""
    return {**config, "logger": {**config["logger"], "group": config["logger"].get("group") or group}}
