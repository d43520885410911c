"""What the suite ships beside its code, wherever it is installed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

PACKAGE = Path(str(files("sp_bench")))
ROOT = PACKAGE.parent
"""Where Python finds the package: a checkout, or site-packages."""
CONF = PACKAGE / "conf"
"""The Hydra groups."""
