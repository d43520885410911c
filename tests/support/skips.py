"""Why tests may be skipped."""

from __future__ import annotations

NEEDS_A_GPU = "needs a GPU"
"""The reason of the only skips that CI has, whose machines have none."""
