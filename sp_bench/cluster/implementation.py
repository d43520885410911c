"""The code that runs a plan on a simulated device, and its costs beside block kernels and transfers.

A plan executed by this suite and the same method in another package have the same blocks and transfers. They differ in
what is around them: how results are merged, how often a kernel is called, and what the host does meanwhile.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sp_bench.reading import NotNegative, Positive, Section


class Implementation(Section, frozen=True, kw_only=True):
    """The content of a conf/implementation file."""

    name: str
    fold_bytes_per_element: Positive | None = None
    """Bytes of device memory that merging one element of a partial moves, by however many kernels; None: by one fused
    kernel (DeviceCosts.fold_s)."""
    slice_bytes_per_element: NotNegative = 0.0
    """Bytes on top where a block has a part of the rows alone: their sum is written back into the whole."""
    joins_blocks: bool = False
    """Whether blocks of one query chunk with nothing to wait for between them are one kernel call, merged once."""
    merges: bool = True
    """Whether partial outputs are merged and gradients added. A benchmark whose kernels overwrite one buffer does
    neither; its outputs are not those of attention."""
    merges_at_once: bool = False
    """Whether all partials that a reduce-scatter brings are merged by one kernel, and packed by one for each dtype."""
    sends_whole_chunks: bool = False
    """Whether a chunk travels whole where a rank needs some rows of it (Problem.whole_chunks)."""
    adds_narrow: bool = False
    """Whether reduce-scatters add gradients in the dtype that is sent, as NCCL does, which rounds at every hop."""
    repeats_keys: tuple[str, ...] = ()
    """The kernels whose backward gets keys and values repeated for all query heads, where a rank calls it several
    times; the gradients of heads that share a key head are then added (DeviceCosts.keys_s)."""
    host_s_per_block: NotNegative = 0.0
    """Seconds that the host takes to queue a block with its fold and its transfers. A device that is faster waits."""
    transfer_slowdown: NotNegative | None = None
    """How much longer kernels take while their rank's transfers are in flight; None: the device's figure."""
    sources: dict[str, Any] = msgspec.field(default_factory=dict)


OURS = Implementation(name="ours", merges_at_once=True)
"""This suite's executor: partials are merged by one fused kernel each, those of a reduce-scatter by one for all."""
