"""Process groups that the suite makes for itself, among some ranks of the caller's group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sp_bench.run.home import home

_made: dict[str, Any] = {}
_made_in: Any = None
"""The groups by name, and the default group that they were made in."""


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

    The members call it, in the same order of calls; ranks outside needn't. torch.distributed.new_group can't do that:
    it has all ranks of the default group call it or, with use_local_synchronization, names groups by how many a rank
    has made so far, which differs from rank to rank where groups overlap. `device` makes NCCL connect at once.
    Only if the main thread calls it do the group's threads get the priority that a shaped host gives to transfers.
    """
    global _made, _made_in
    if _made_in is not dist.group.WORLD:
        _made, _made_in = {}, dist.group.WORLD
    ranks = [dist.get_global_rank(parent, member) for member in members]
    name = f"sp_bench {backend} {purpose} of {','.join(map(str, ranks))}"
    if name not in _made:
        whole, bound = _made_in, _made_in.bound_device_id
        if len(ranks) < dist.get_world_size():
            whole.bound_device_id = None  # from a bound group torch would split NCCL's, which takes all its ranks
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend),
            c10d._get_default_store(),
            group_name=name,  # pyright: ignore[reportArgumentType]  # a NewType of str in torch 2.13
            backend_options=options,
            timeout=timeout or dist.default_pg_timeout,
            device_id=device,
            group_desc=name,
        )
        whole.bound_device_id = bound
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        _made[name] = group
        home().put_transfers_first()  # gloo has started threads for the group
    return _made[name]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the operations of a CPU group may take."""
    return group._get_backend(torch.device("cpu")).options._timeout


def gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each rank of the group has, by rank. All must call it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found
