"""Process groups that the suite makes for itself, among some ranks of the caller's group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sp_bench.run.home import home

_made: dict[tuple[str, torch.device | None], dist.ProcessGroup] = {}
_made_in: Any = None
"""The groups by name and device of this rank, and the default group that they were made in."""
_calls: Counter[str] = Counter()
"""How many groups were made among the same ranks so far."""
_names: Counter[str] = Counter()
"""How many groups of a name were made so far. What they have left in the store is never taken for another's."""
_owner: Hashable = None
_owners: dict[tuple[str, torch.device | None], set[Hashable]] = {}
"""The holder of each group; None for who never releases it."""


def world() -> dist.ProcessGroup:
    """The default group. Only ranks have one."""
    group = dist.group.WORLD
    assert group is not None, "no group of ranks has been made in this process"
    return group


def own_group(
    parent: dist.ProcessGroup,
    members: Sequence[int],
    purpose: str,
    *,
    backend: str,
    timeout: timedelta | None = None,
    options: Any = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """The group of these ranks of `parent` for that purpose; made at first use, then shared.

    The members call it, in the same order of calls and each time with the same purpose; ranks outside needn't.
    torch.distributed.new_group can't do that: it has all ranks of the default group call it or, with
    use_local_synchronization, names groups by how many a rank has made so far, which differs from rank to rank where
    groups overlap. `device` is this rank's own, for which the group is: NCCL connects it at once. Members find each
    other by the name, so it never holds anything of one rank, such as its device.
    It lasts as long as its owners (`owned_by`); without one, as long as the process.
    Only if the main thread calls it do the group's threads get the priority that a shaped host gives to transfers.
    Raises RuntimeError, on all members, if they ask for different groups, or if one doesn't ask within the timeout.
    """
    global _made, _made_in, _calls, _names, _owners
    if _made_in is not dist.group.WORLD:
        _made, _made_in, _calls, _names, _owners = {}, dist.group.WORLD, Counter(), Counter(), {}
    ranks = [dist.get_global_rank(parent, member) for member in members]
    among = ",".join(map(str, ranks))
    name = f"sp_bench {backend} {purpose} of {among}"
    if (name, device) not in _made:
        whole, bound = _made_in, _made_in.bound_device_id
        store, timeout = c10d._get_default_store(), timeout or dist.default_pg_timeout
        _calls[among] += 1
        _agree(c10d.PrefixStore(f"sp_bench group {_calls[among]} of {among}/", store), ranks, name, timeout)
        if len(ranks) < dist.get_world_size():
            whole.bound_device_id = None  # from a bound group torch would split NCCL's, which takes all its ranks
        _names[name] += 1
        unique = f"{name}, {_names[name]}" if _names[name] > 1 else name  # for another device, or after a release
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend),
            store,
            group_name=unique,  # pyright: ignore[reportArgumentType]  # a NewType of str in torch 2.13
            backend_options=options,
            timeout=timeout,
            device_id=device if backend == dist.Backend.NCCL else None,
            group_desc=unique,
        )
        whole.bound_device_id = bound
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        _made[name, device] = group
        home().put_transfers_first()  # gloo has started threads for the group
    _owners.setdefault((name, device), set()).add(_owner)
    return _made[name, device]


@contextmanager
def owned_by(owner: Hashable) -> Iterator[None]:
    """Have the groups that are asked for inside belong to an owner, which may share them with others."""
    global _owner
    before, _owner = _owner, owner
    try:
        yield
    finally:
        _owner = before


def release(owner: Hashable) -> None:
    """Destroy the groups that only this owner has asked for. All their members must call it once nothing uses them."""
    if not dist.is_initialized() or _made_in is not dist.group.WORLD:
        return
    for key, owners in list(_owners.items()):
        owners.discard(owner)
        if not owners:  # in the order in which they were made, which no rank can leave another waiting in
            del _owners[key]
            dist.destroy_process_group(_made.pop(key))


def _agree(store: Any, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
    """Raise RuntimeError unless all ranks come with that name. The first one compares, so that each asks little."""
    me = dist.get_rank()
    store.set(f"asked by {me}", name)
    if me == ranks[0]:
        asked: dict[str, list[int]] = {}
        for rank in ranks:
            asked.setdefault(_awaited(store, f"asked by {rank}", rank, timeout), []).append(rank)
        said = "; ".join(f"rank {', '.join(map(str, who))}: {what}" for what, who in asked.items())
        store.set("verdict", said if len(asked) > 1 else "")
    verdict = _awaited(store, "verdict", ranks[0], timeout)
    if verdict:
        raise RuntimeError(f"ranks ask for different groups, which none could join ({verdict})")


def _awaited(store: Any, key: str, rank: int, timeout: timedelta) -> str:
    """The value that a rank has put under the key. Raises RuntimeError if it doesn't within the timeout."""
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank} didn't come to make a group in {timeout.total_seconds():.0f} s") from error
    return store.get(key).decode()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the operations of a group may take, on CPUs where it has a backend for them."""
    kinds: Any = group._device_types
    kind = min(kinds, key=lambda kind: kind.type != "cpu")
    return group._get_backend(kind).options._timeout


def gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of each rank of the group, by rank. All must call it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return values
