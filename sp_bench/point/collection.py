"""Python's search for garbage, left out while a point is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no cycles of garbage meanwhile; a decorator, too.

    The operations and chunks of plans are many thousands of objects that live as long as their point. To look through
    them again and again, as Python does while more are made, takes a fifth of a point's time and finds next to nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
