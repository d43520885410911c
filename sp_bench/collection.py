"""Python's search for garbage, left out while a point is simulated, and of modules."""

from __future__ import annotations

import gc
import sys
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


@contextmanager
def importing() -> Iterator[None]:
    """Look for no cycles of garbage while modules are imported, nor ever in what they make: that takes up to a fifth of
    the time of a small point's whole command.
    """
    modules = len(sys.modules)
    with uncollected():
        yield
    if len(sys.modules) > modules:
        gc.freeze()
