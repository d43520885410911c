"""The calls of attentions on a group, which all ranks must make alike.

Of a shape that is new to it a rank tells the others, through the store of torch.distributed, and waits for them. Of
shapes that it has it says nothing. But if it begins no call for a while, a thread looks whether others ask for a new
shape, or have begun another call.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sp_bench.errors import RequestError
from sp_bench.run.engine import Engine
from sp_bench.run.groups import timeout_of
from sp_bench.run.transport import give_up, refuse_broken

LOOK_S = 1.0
"""How often a rank looks whether it has begun a call since it looked before. If not, it may wait for others."""
COMPARED = 256
"""After so many calls ranks compare all that they have made, on the thread."""
REMEMBERED = 4096
"""Calls of which a rank knows what they were. Those that a GPU hasn't ended may be as many."""
RULE = "all ranks must make the same calls, with the same sequence"
WOULD_WORK = "the same on all would work"


class Refusal(NamedTuple):
    """Why ranks don't go on, in the words of a RequestError."""

    value: str
    rule: str
    would_work: str
    lost: bool = False
    """Whether a rank was in a call of its own, so that the group can't be used any more."""

    @property
    def error(self) -> RequestError:
        """The error that all ranks raise."""
        return RequestError(*self[:3])


class Agreement:
    """Ranks say what they are about to do, and go on if all say the same."""

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self.n, self.rank, self._timeout = group.size(), group.rank(), timeout_of(group)
        store: Any = c10d._get_default_store()
        store = store.clone()  # a wait holds up whatever else uses its connection
        self.store = c10d.PrefixStore(f"sp_bench {purpose} of {group.group_name}/", store)
        self.number = 0
        """That of the last agreement. All ranks make them in one order."""

    def make(self, mine: str | RequestError, rule: str, would_work: str) -> None:
        """Raise RequestError on all ranks if one has an error, or if what they say differs. All ranks must call it.

        Raises RuntimeError if they don't all come within the group's timeout.
        """
        self.number += 1
        refusal = self.say(self.number, mine, rule, would_work)
        if isinstance(mine, RequestError):
            raise mine
        if refusal:
            raise refusal.error

    def say(
        self, number: int, mine: str | RequestError, rule: str, would_work: str, *, lost: bool = False
    ) -> Refusal | None:
        """Why the ranks don't go on after what they said in an agreement; None if they do.

        The first to come writes down what it says; those that say something else, and the last, decide for all.
        """
        verdict = f"{number} verdict"
        if isinstance(mine, RequestError):
            value, rule = f"on rank {self.rank}, {mine}", "no rank goes on without the others"
            self._decide(verdict, Refusal(value, rule, "what it says would work"))
        elif other := self.differs(f"{number} first", mine):
            self._decide(verdict, Refusal(other, rule, would_work, lost))
        came = self.store.add(f"{number} came", 1)
        if came == self.n:
            self._decide(verdict, None)
            for name in ("asked", "first", "came", "verdict"):
                self.store.delete_key(f"{number - 1} {name}")  # all have read it
        try:
            self.store.wait([verdict], self._timeout)
        except RuntimeError as error:
            answered = f"{self.store.add(f'{number} came', 0)} of {self.n} ranks came"
            seconds = f"{self._timeout.total_seconds():.0f} s"
            raise RuntimeError(f"only {answered} in {seconds} to what rank {self.rank} does: {mine}") from error
        answered = json.loads(self.store.get(verdict))
        return Refusal(*answered) if answered else None

    def differs(self, key: str, mine: str) -> str:
        """The answers of this rank and the first one under a key, by rank; empty if they are the same."""
        first = self.store.compare_set(key, "", f"{self.rank} {mine}").decode()
        rank, _, theirs = first.partition(" ")
        pair = sorted([(int(rank), theirs), (self.rank, mine)])
        return ", ".join(f"{said} on rank {who}" for who, said in pair) if theirs != mine else ""

    def _decide(self, key: str, refusal: Refusal | None) -> None:
        """Decide for all ranks, if none has before."""
        self.store.compare_set(key, "", json.dumps(refusal))


class _Call(NamedTuple):
    """A call that this rank has begun."""

    number: int
    """How many it has begun with it."""
    words: str
    checksum: int
    """That of what all calls so far were."""


class Calls:
    """The calls of this rank on one group, by all attentions."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        self.agreement = agreement_of(group, "calls")
        self._beside = Agreement(group, "calls")
        """The thread's way to the store."""
        self._last = _Call(0, "", 0)
        self._count = 0
        self._known: dict[int, str] = {}
        """Calls that said nothing, by their numbers."""
        self._looked_at = self._last
        self._to_compare: _Call | None = None
        self._compared = self._last
        self._inside: Engine | None = None
        self._refusal: Refusal | None = None

    def begin(self, words: str) -> None:
        """Take note of a call with shapes that this rank has. Raises RequestError if ranks were found to differ."""
        self._check()
        self._count += 1
        self._known[self._count] = words
        self._known.pop(self._count - REMEMBERED, None)
        self._note(words)

    def agree(self, mine: str | RequestError) -> int:
        """Agree on a call with new shapes; its number among these. All ranks must call it.

        Raises RequestError on all ranks if one has an error, if they have different shapes, or if one is in a call
        with shapes that it has.
        """
        self._check()
        self._count += 1
        self.agreement.number += 1
        number = self.agreement.number
        self.agreement.store.set(f"{number} asked", str(self._count))
        refusal = self.agreement.say(number, mine, RULE, WOULD_WORK)
        if isinstance(mine, RequestError):
            raise mine
        if refusal:
            if refusal.lost:
                self._give_up(refusal)
            raise refusal.error
        self._note(mine)
        return number

    @contextmanager
    def running(self, engine: Engine) -> Iterator[None]:
        """While this rank runs a call. If that fails since ranks differ, RequestError says how."""
        self._inside = engine
        try:
            yield
        except RuntimeError as error:
            with suppress(RuntimeError):  # of the store
                self._look()  # another rank may have closed the connection before this one looked
            if self._refusal:
                raise self._refusal.error from error
            raise
        finally:
            self._inside = None

    def tick(self) -> None:
        """Look at other ranks if no call was begun since the last time, and compare calls now and then."""
        last, call = self._last, self._to_compare
        waits, self._looked_at = last is self._looked_at, last
        if call is not None:
            self._to_compare = None
            self._compare(call)
        if waits:
            self._look()

    def _note(self, words: str) -> None:
        checksum = zlib.crc32(words.encode(), self._last.checksum)
        self._last = _Call(self._count, words, checksum)
        if self._count % COMPARED == 0:
            self._to_compare = self._last

    def _check(self) -> None:
        if self._refusal:
            raise self._refusal.error
        refuse_broken(self._group())

    def _look(self) -> None:
        """Give up if others ask for a new shape in a call that this rank has begun, or are in another call."""
        if self._refusal or not self._last.number:
            return
        store, number = self._beside.store, self.agreement.number + 1
        asked = int(store.get(f"{number} asked")) if store.check([f"{number} asked"]) else 0
        if asked in self._known:
            mine = f"{self._known[asked]}, as before,"
            refusal = self._beside.say(number, mine, RULE, WOULD_WORK, lost=True)
            if refusal:
                self._lose(refusal)
            return
        self._compare(self._last)

    def _compare(self, call: _Call) -> None:
        """Give up if another rank has begun as many calls and they were others."""
        store = self._beside.store
        mine = f"{call.words} (call {call.number}, {call.checksum:08x} with those before)"
        if call is not self._compared:
            store.delete_key(f"call {self._compared.number}")  # ranks that come later compare others
            if other := self._beside.differs(f"call {call.number}", mine):
                store.compare_set("differs", "", json.dumps(Refusal(other, RULE, WOULD_WORK, lost=True)))
        self._compared = call
        if store.check(["differs"]):
            self._lose(Refusal(*json.loads(store.get("differs"))))

    def _give_up(self, refusal: Refusal) -> None:
        self._refusal = refusal
        give_up(self._group(), str(refusal.error))

    def _lose(self, refusal: Refusal) -> None:
        """Let no call on the group go on."""
        self._give_up(refusal)
        if self._inside:
            self._inside.transport.interrupt()
        if not self._inside or self._inside.queues:
            logging.getLogger("sp_bench").error("the next call will raise: %s", refusal.error)


_agreements: WeakKeyDictionary[dist.ProcessGroup, dict[str, Agreement]] = WeakKeyDictionary()
_of: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup, purpose: str) -> Agreement:
    """The agreements of a group's ranks for a purpose, which are numbered on as long as it lives."""
    made = _agreements.setdefault(group, {})
    if purpose not in made:
        made[purpose] = Agreement(group, purpose)
    return made[purpose]


def calls_of(group: dist.ProcessGroup) -> Calls:
    """The calls on a group. The first time a thread begins to watch them."""
    _begin_to_watch()
    if group not in _of:
        _of[group] = Calls(group)
    return _of[group]


@cache
def _begin_to_watch() -> None:
    threading.Thread(target=_watch, name="sp_bench-calls", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        for calls in list(_of.values()):
            with suppress(RuntimeError):  # the store is gone, with the rank that holds it
                calls.tick()
