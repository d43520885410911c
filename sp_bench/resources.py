"""Config files: those installed with the suite, and the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sp_bench.checkout import PACKAGE, place

ROOT = PACKAGE.parent
"""The folder that Python imports the package from: a checkout, or site-packages."""
CONF = place("conf")
"""The suite's Hydra groups."""


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
    found = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def conf_content(path: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """The content of a file of a group, merged into that of the `files` that its defaults name."""
    import yaml

    own = yaml.safe_load(path.read_text())
    content: dict[str, Any] = {}
    for base in own.pop("defaults", []):
        if base != "_self_":
            content = _merged(content, conf_content(files[base], files))
    return _merged(content, own)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; `above` has precedence."""
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        found[key] = _merged(below[key], value) if both else value
    return found
