"""Config files, those installed with the suite and the user's own, and files that are written whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.checkout import PACKAGE, place

ROOT = PACKAGE.parent
"""The folder that Python imports the package from: a checkout, or site-packages."""
CONF = place("conf")
"""The suite's Hydra groups."""
GLOBAL = "# @package _global_"
"""How a file of a group begins whose keys are those of the whole config."""


def user_conf() -> Path:
    """The folder of the user's Hydra groups, $XDG_CONFIG_HOME/sp_bench or ~/.config/sp_bench. It may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sp_bench"


def conf_folders() -> list[Path]:
    """The folders that have groups: the suite's, which has precedence, and the user's if it exists."""
    return [CONF, *([user_conf()] if user_conf().is_dir() else [])]


def conf_files(group: str, own: Path | None = None) -> dict[str, Path]:
    """The files of a group, by the names of its choices in alphabetical order.

    `own` is another folder that has groups: after the suite's own, before the user's.
    """
    suite, *users = conf_folders()
    folders = [suite, *([own] if own else []), *users]
    by_name = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(by_name.items()))


def yaml_of(path: Path) -> Any:
    """The content of a YAML file, by the parser in C where PyYAML has it, which takes a tenth of the time."""
    import yaml

    return yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def point_keys() -> Mapping[str, Any]:
    """The keys of every point with their defaults: conf/config.yaml."""
    return yaml_of(CONF / "config.yaml")


def conf_content(path: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """The content of a file of a group, merged into that of the `files` that its defaults name."""
    own = yaml_of(path)
    content: dict[str, Any] = {}
    for base in own.pop("defaults", []):
        if base != "_self_":
            content = _merged(content, conf_content(files[base], files))
    return _merged(content, own)


def suite_config(chosen: Mapping[str, str]) -> dict[str, Any] | None:
    """The config that Hydra composes of these choices of groups, if all files of it are the suite's; else None.

    The suite's own files take little of what Hydra offers: a group's content stands under its name, but for that of the
    package `_global_`, and a file's defaults are others of its group. Hydra takes half a second for them.
    """
    own = dict(point_keys())
    defaults = own.pop("defaults")
    if set(chosen) - {group for each in defaults if each != "_self_" for group in each}:
        return None
    content: dict[str, Any] = {}
    for each in defaults:
        if each == "_self_":
            content = _merged(content, own)
            continue
        ((group, name),) = each.items()
        files = {path.stem: path for path in (CONF / group).glob("*.yaml")}
        path = files.get(chosen.get(group, name))
        if path is None:
            return None
        section = conf_content(path, files)
        content = _merged(content, section if path.read_text().startswith(GLOBAL) else {group: section})
    return content


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; `above` has precedence."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merged(below[key], value) if both else value
    return merged


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, even if this process is killed. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
