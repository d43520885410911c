"""Jobs of ranks in the tests of calibration. Imported inside the ranks: no pytest."""

from __future__ import annotations

import torch.distributed as dist

from sp_bench.calibrating.links import messages_lasting


def messages_of_10_ms(seconds: float, least: int) -> int:
    """That last so long on rank 0, twice that on rank 1, and so on."""
    return messages_lasting((dist.get_rank() + 1) * seconds, 0.01, least=least)
