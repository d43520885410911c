"""What command lines have in common. Imports little, so that a wrong flag is answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sp_bench.errors import RequestError


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
