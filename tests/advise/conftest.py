"""The pools of ranks that run what advice prints as Python."""

from tests.peers.conftest import world

__all__ = ["world"]
