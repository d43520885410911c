"""The points that share a process: on a GPU they hold their memory side by side, since they are timed in turn."""

from __future__ import annotations

from collections.abc import Sequence

USABLE = 0.85
"""The share of a GPU's memory that points can have beside CUDA's context, NCCL's buffers, kernels' workspaces and
fragments."""


def packs(sizes: Sequence[int], capacity: float | None) -> list[list[int]]:
    """The indices of points of these bytes, in order, in as few packs as first-fit finds; one pack without a capacity.

    A point that is larger than the capacity has a pack to itself, and is tried: its size is an upper bound.
    """
    if capacity is None:
        return [list(range(len(sizes)))]
    bins: list[list[int]] = []
    room: list[float] = []
    for index, size in enumerate(sizes):
        fits = next((i for i, left in enumerate(room) if size <= left), None)
        if fits is None:
            bins.append([])
            room.append(capacity)
            fits = len(bins) - 1
        bins[fits].append(index)
        room[fits] -= size
    return bins
