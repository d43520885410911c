"""sp_bench: compare sequence-parallel attention methods, measured where possible and simulated at any scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sp_bench import checkout as checkout

if TYPE_CHECKING:
    from sp_bench.packing import documents
    from sp_bench.run.attention import SequenceParallelAttention

__version__ = "0.1.0"
__all__ = ["SequenceParallelAttention", "__version__", "documents"]


def __getattr__(name: str) -> Any:
    # Simulating must not pay for an import of torch.
    if name == "SequenceParallelAttention":
        from sp_bench.extras import require

        require("run", name)
        from sp_bench.run.attention import SequenceParallelAttention

        return SequenceParallelAttention
    if name == "documents":
        from sp_bench.packing import documents

        return documents
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
