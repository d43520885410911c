"""Routes on a torus, or a mesh without its wrap-around links: dimension by dimension, the shorter way round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def wires(shape: Sequence[int]) -> int:
    """How many links each GPU sends on: one in either direction of each dimension."""
    return 2 * len(shape)


def hops(shape: Sequence[int], wrap: bool, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """The links that flows from GPU a to GPU b of the same node cross, (F,) each, -1 for none.

    GPUs of a node count the last of D dimensions fastest. Link 2 (D g + d) + s leaves GPU g along dimension d, upwards
    (s = 0) or downwards (1).
    """
    node = int(np.prod(shape))
    links, first = [], 2 * len(shape) * (a // node * node)
    at = list(np.unravel_index(a % node, shape))
    for dimension, (size, target) in enumerate(zip(shape, np.unravel_index(b % node, shape), strict=True)):
        distance = target - at[dimension]
        if wrap:
            distance = (distance + size // 2) % size - size // 2
        way = np.sign(distance)
        for _ in range(size // 2 if wrap else size - 1):
            node_at = np.ravel_multi_index(at, shape)
            moves = at[dimension] != target
            links.append(np.where(moves, first + 2 * (len(shape) * node_at + dimension) + (way < 0), -1))
            at[dimension] = (at[dimension] + moves * way) % size
    return links
