"""Optional packages, by the extra of this project that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from sp_bench.errors import RequestError

EXTRAS = {
    "run": ("torch",),
    "conform": ("torch",),
    "transformers": ("torch", "transformers"),
    "analysis": ("matplotlib", "pandas", "pyarrow", "seaborn"),
}
"""The packages of each extra that the code imports."""


def require(extra: str, purpose: str) -> None:
    """Raise RequestError if a package of the extra, which `purpose` needs, is not installed."""
    lacking = [package for package in EXTRAS[extra] if find_spec(package) is None]
    if lacking:
        rule = f"needs {', '.join(lacking)}, which this environment lacks"
        raise RequestError(purpose, rule, f'pip install "sp-bench[{extra}]" would work')
