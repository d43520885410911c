"""The section `device` of a cluster file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sp_bench.cluster.decoding import CacheReads
from sp_bench.cluster.kernel_table import Rates
from sp_bench.errors import RequestError, unknown
from sp_bench.reading import Count, NotNegative, Positive, Section, figure

_TFLOPS = figure(1e-4, 2e4, "TFLOP/s of each GPU, or of each CPU core")
_MEMORY_RATE = figure(1e8, 5e13, "bytes/s of each GPU's memory, reads plus writes")


class DeviceSection(Section, frozen=True, kw_only=True):
    """The section `device` of a cluster file: fields as in DeviceCosts, and `sms`, the number of multiprocessors.

    Rates that are missing are memory_bytes_per_s, and a missing layer_launch_s is launch_s.
    """

    name: str
    rates: Annotated[
        dict[str, Rates],
        Meta(min_length=1, description="a section of tables of kernel rates", examples=["{flash_attn_3: {...}}"]),
    ]
    kernel: str | None = None
    """The kernel whose tables are used first where kernel=auto; None: the first table that fits."""
    sms: Annotated[Count, figure(1, 1000, "multiprocessors of each GPU")] | None = None
    peak_tflops: dict[str, Annotated[Positive, _TFLOPS]]
    matmul_tflops: dict[str, Annotated[Positive, _TFLOPS]] | None = None
    """TFLOP/s of large matrix products; None: no training step is simulated."""
    memory_bytes: Annotated[Positive, figure(1e9, 5e12, "bytes of each GPU's memory")] | None = None
    memory_bytes_per_s: Annotated[Positive, _MEMORY_RATE]
    fold_bytes_per_s: Annotated[Positive, _MEMORY_RATE] | None = None
    sum_bytes_per_s: Annotated[Positive, _MEMORY_RATE] | None = None
    repeat_bytes_per_s: Annotated[Positive, _MEMORY_RATE] | None = None
    launch_s: Annotated[NotNegative, figure(0, 1e-2, "seconds of each kernel")]
    elementwise_bytes_per_s: Annotated[Positive, _MEMORY_RATE] | None = None
    layer_launch_s: Annotated[NotNegative, figure(0, 1e-1, "seconds of each kernel")] | None = None
    host_bytes_per_s: Annotated[Positive, figure(1e9, 1e12, "bytes/s from a GPU to its host")] | None = None
    """Bytes/s of copies to pinned memory of the host, or from it, of each GPU while all copy; None: not known."""
    caches: CacheReads | None = None
    """Seconds of a decode step's kernel calls by the bytes that they read; None: they read at memory_bytes_per_s."""
    transfer_slowdown: Annotated[NotNegative, figure(0, 3, "times a kernel's time beside transfers, in addition")] = 0.0

    def __post_init__(self) -> None:
        """Raises RequestError for a kernel without rates, or rates without the configuration that waves need."""
        kernels = {rates.kernel or name for name, rates in self.rates.items()}
        if self.kernel is not None and self.kernel not in kernels:
            raise unknown("kernel", self.kernel, kernels)
        for name, rates in self.rates.items():
            if self.sms and not (rates.heads and rates.tile_tokens):
                missing = f"rates.{name}.{'tile_tokens' if rates.heads else 'heads'}"
                rule = "is missing: a device with sms needs the configuration of its rates"
                raise RequestError(missing, rule, "heads and tile_tokens, or a device without sms, would work")
