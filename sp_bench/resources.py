"""The files that the suite ships beside its code, wherever it is installed, and the user's own beside them."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

PACKAGE = Path(str(files("sp_bench")))
ROOT = PACKAGE.parent
"""Where Python finds the package: a checkout, or site-packages."""
CONF = PACKAGE / "conf"
"""The Hydra groups."""


def user_conf() -> Path:
    """The user's own Hydra groups, which need not exist: $XDG_CONFIG_HOME/sp_bench, by default ~/.config/sp_bench."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sp_bench"


def conf_folders() -> list[Path]:
    """The folders that are searched for groups: the suite's, which goes first, and the user's where it exists."""
    return [CONF, *([user_conf()] if user_conf().is_dir() else [])]


def conf_files(group: str) -> dict[str, Path]:
    """The files of a group by the names of its choices, in their order."""
    found = {path.stem: path for folder in reversed(conf_folders()) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))
