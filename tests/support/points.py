"""Requests of points, as the command line composes them."""

from __future__ import annotations

from sp_bench.cli.compose import Composer
from sp_bench.point.request import Request, resolve


def point(*overrides: str) -> Request:
    """The request of a point. Hydra is closed again, which would else be open for later tests."""
    with Composer() as composer:
        return resolve(composer.compose(overrides))
