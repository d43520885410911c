"""A device that works behind the caller and has graphs, with CUDA's rules for what can be captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.run.queued import Batch, Event, Rank, Stream


class NotCapturable(AssertionError):
    """Errors of CUDA in a capture."""


@dataclass
class Graph:
    """The work queued on each stream, and the memory that it uses, which nothing else gets."""

    origin: Stream
    queued: dict[int, list[Any]]
    """By the number of the stream."""
    pool: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Raise NotCapturable for a wait on what is outside, or a stream that doesn't end with the first one."""
        recorded = {id(event) for entries in self.queued.values() for event in _events(entries, "record")}
        for entries in self.queued.values():
            if any(id(event) not in recorded for event in _events(entries, "wait")):
                raise NotCapturable("a stream waits for an event from outside (cudaErrorStreamCaptureIsolation)")
        awaited = {id(event) for event in _events(self.queued[self.origin.number], "wait")}
        for number, entries in self.queued.items():
            works = [i for i, entry in enumerate(entries) if not (isinstance(entry, tuple) and entry[0] == "record")]
            ends = _events(entries[works[-1] :], "record") if works else []
            if works and number != self.origin.number and not any(id(event) in awaited for event in ends):
                raise NotCapturable("a stream is not joined (cudaErrorStreamCaptureUnjoined)")


class Capturing(Rank):
    """A rank's device (run.devices.Device) with graphs."""

    messages = 0

    def capture(self, queue: Callable[[], Any]) -> tuple[Graph, Any]:
        streams = self._all_streams()
        queued, free = {s: len(s.queue) for s in streams}, {s: s.free for s in streams}
        for stream in streams:
            stream.free = {}
        self.finished, self.capturing = None, True
        graph, failed = Graph(self.current(), {}), True
        try:
            result, failed = queue(), False
        finally:
            self.capturing = False
            if failed:
                for stream in streams:
                    while len(stream.queue) > queued[stream]:
                        stream.queue.pop()
                    stream.free = free[stream]
                self.finished = None
        for stream in streams:
            taken = [stream.queue.pop() for _ in range(len(stream.queue) - queued[stream])][::-1]
            graph.queued[stream.number] = taken
            graph.pool.append(stream.free)
            stream.free = free[stream]
        self.finished = None
        graph.check()
        return graph, result

    def replay(self, graph: Graph) -> None:
        """Queue it again, each stream's from where the current one is, which then waits for the others."""
        if self.finished is not None:
            self.wait(self.current(), self.finished)
        begun, events = self.record(self.current()), dict[int, Event]()
        self.messages += 1
        for stream in self._all_streams():
            if stream is not self.current():
                self.wait(stream, begun)
            stream.queue.extend(self._again(entry, events) for entry in graph.queued.get(stream.number, ()))
        self.finished = self.record(self.current())

    def synchronize(self) -> None:
        if self.capturing:
            raise NotCapturable("the caller waits for the device in a capture")
        super().synchronize()

    def _again(self, entry: Any, events: dict[int, Event]) -> Any:
        if isinstance(entry, Batch):
            ways = entry.sends, entry.receives
            return Batch(*({(*key, self.messages): x for key, x in way.items()} for way in ways))
        if isinstance(entry, tuple) and entry[0] in ("record", "wait"):
            return entry[0], events.setdefault(id(entry[1]), Event())
        return entry

    def _all_streams(self) -> list[Stream]:
        return [self.current(), *self._lanes.values()]


def _events(entries: list[Any], what: str) -> list[Event]:
    return [entry[1] for entry in entries if isinstance(entry, tuple) and entry[0] == what]
