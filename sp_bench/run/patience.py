"""How long transfers may take: the first ones on a connection longer than later ones.

NCCL connects two ranks of a communicator at the first message between them, and the rings of a collective at the first
one. Among hundreds of ranks that takes minutes, and no later transfer does. A timeout that allows for it would let a
rank that hangs be noticed only after as long. Imports no torch before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch.distributed as dist

FIRST_USE = timedelta(minutes=15)
"""How much longer the first use of a communicator or connection may take."""


@dataclass
class _Used:
    """The operations of a group that have been used."""

    opened: set[Hashable] = field(default_factory=set)
    timeout: timedelta | None = None
    """The timeout of its next operation; None: as it was made."""


_used: WeakKeyDictionary[dist.ProcessGroup, _Used] = WeakKeyDictionary()


def first_timeout(timeout: timedelta) -> timedelta:
    """The timeout of first uses, from that of later ones. A group is made with it."""
    return timeout + FIRST_USE


def before_use(group: dist.ProcessGroup, uses: Set[Hashable], timeout: timedelta) -> None:
    """Set the timeout of a group's next operation: the longer one if any of its `uses` is new, such as a peer."""
    usage, wanted = _used_of(group), timeout
    if not uses <= usage.opened:
        wanted = first_timeout(timeout)
        usage.opened |= uses
    if wanted is not usage.timeout and wanted != usage.timeout:
        from torch.distributed import distributed_c10d as c10d

        c10d._set_pg_timeout(wanted, group)
        usage.timeout = wanted


def use_of(group: dist.ProcessGroup, uses: Set[Hashable], timeout: timedelta) -> Callable[[], None]:
    """`before_use` as a bound call, which does nothing where the group's timeout is what it should be."""
    usage, begun = _used_of(group), False

    def before() -> None:
        nonlocal begun
        if not begun or usage.timeout is not timeout:
            before_use(group, uses, timeout)
            begun = True

    return before


def _used_of(group: dist.ProcessGroup) -> _Used:
    usage = _used.get(group)
    if usage is None:
        usage = _used[group] = _Used()
    return usage
