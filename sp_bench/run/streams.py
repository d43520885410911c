"""Streams of one rank: how blocks and lanes tell each other how far they are."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from sp_bench.hosts.inside import transfers_go_first


class Aborted(RuntimeError):
    """Another stream of this rank failed; that stream raises the cause."""


def lane_threads(lanes: int) -> ThreadPoolExecutor:
    """A thread for the transfers of each lane."""
    return ThreadPoolExecutor(lanes, "sp_bench-lane", initializer=transfers_go_first)


class Progress:
    """The last operation that each stream has ended. Operations of one stream end in plan order."""

    def __init__(self, streams: tuple[str, ...]) -> None:
        self._ended = dict.fromkeys(streams, -1)
        self._changed = threading.Condition()
        self.cause: BaseException | None = None
        """What the first stream to fail raised."""

    def wait(self, waits: tuple[tuple[str, int], ...]) -> None:
        """Return when every (stream, index) has ended. Raises Aborted if another stream failed."""
        if not waits:
            return
        with self._changed:
            self._changed.wait_for(lambda: self.cause or self._reached(waits))
            if self.cause:
                raise Aborted("another stream of this rank failed") from self.cause

    def end(self, stream: str, index: int) -> None:
        """Operation `index` of `stream` has ended."""
        with self._changed:
            self._ended[stream] = index
            self._changed.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Wake all streams with Aborted."""
        with self._changed:
            self.cause = self.cause or cause
            self._changed.notify_all()

    def _reached(self, waits: tuple[tuple[str, int], ...]) -> bool:
        return all(self._ended[stream] >= index for stream, index in waits)
