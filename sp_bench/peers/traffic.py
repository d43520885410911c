"""Count the bytes that a rank sends, in any code: a dispatch mode sees the operations of torch.distributed.

Collectives count as in plans: the fewest bytes the operation needs. Each rank's data goes to each other rank once. A
library may route it otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
"""Operations that send no data."""


class Traffic(TorchDispatchMode):
    """A context that adds up the bytes this rank sends to other ranks, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes: Counter[tuple[str]] = Counter()
        self.unknown: set[str] = set()
        """Operations that can't be counted."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.namespace, func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, namespace: str, name: str, args: Sequence[Any]) -> None:
        if name in SILENT:
            return
        if size_of := _SIZES.get((namespace, name)):
            self.sent_bytes[(name.strip("_"),)] += size_of(args)
        else:
            self.unknown.add(name)


def _bytes(tensors: Tensor | Iterable[Any]) -> int:
    """The size of a tensor, or of all tensors in nested lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes, tensors))


def _group(group: Any) -> dist.ProcessGroup:
    """The group of an operation, whose arguments have its name or a boxed form of it."""
    if isinstance(group, str):
        return _resolve_process_group(group)  # pyright: ignore[reportArgumentType]
    return dist.ProcessGroup.unbox(group)


def _is_root(group: Any, root: int) -> bool:
    """Whether this rank is the root of an operation."""
    return _group(group).rank() == root


def _gathered(x: Any, group: Any) -> int:
    """Bytes sent if each other rank gets all of `x`."""
    return _bytes(x) * (_group(group).size() - 1)


def _scattered(x: Any, group: Any) -> int:
    """Bytes sent if each other rank gets an equal part of `x`."""
    size = _group(group).size()
    return _bytes(x) * (size - 1) // size


def _split(x: Tensor, splits: Sequence[int], group: Any) -> int:
    """Bytes sent if ranks get rows of `x` by `splits`, or equal parts without splits."""
    if not splits:
        return _scattered(x, group)
    rows = sum(splits)
    return _bytes(x) * (rows - splits[_group(group).rank()]) // rows if rows else 0


_SIZES: dict[tuple[str, str], Callable[[Sequence[Any]], int]] = {
    ("c10d", "send"): lambda args: _bytes(args[0]),
    ("c10d", "alltoall_base_"): lambda args: _split(args[1], args[4], args[2]),
    ("c10d", "alltoall_"): lambda args: _bytes(args[1]) - _bytes(args[1][_group(args[2]).rank()]),
    ("c10d", "_allgather_base_"): lambda args: _gathered(args[1], args[2]),
    ("c10d", "allgather_"): lambda args: _gathered(args[1], args[2]),
    ("c10d", "_reduce_scatter_base_"): lambda args: _scattered(args[1], args[2]),
    ("c10d", "reduce_scatter_"): lambda args: _scattered(args[1], args[2]),
    ("c10d", "allreduce_"): lambda args: 2 * _scattered(args[0], args[1]),
    ("c10d", "broadcast_"): lambda args: _gathered(args[0], args[1]) * _is_root(args[1], args[2]),
    ("c10d", "scatter_"): lambda args: _scattered(args[1], args[2]) * _is_root(args[2], args[3]),
    ("c10d", "gather_"): lambda args: _bytes(args[1]) * (not _is_root(args[2], args[3])),
    ("c10d", "reduce_"): lambda args: _bytes(args[0]) * (not _is_root(args[1], args[3])),
    ("_c10d_functional", "all_gather_into_tensor"): lambda args: _gathered(args[0], args[2]),
    ("_c10d_functional", "reduce_scatter_tensor"): lambda args: _scattered(args[0], args[3]),
    ("_c10d_functional", "all_reduce"): lambda args: 2 * _scattered(args[0], args[2]),
    ("_c10d_functional", "all_to_all_single"): lambda args: _split(args[0], args[2], args[3]),
}
"""The bytes that each operation sends, from its arguments."""
