"""PyTorch's context parallel attention: torch.distributed.tensor.experimental, `context_parallel`.

Its ring attention is a private template that takes a block kernel. The public `context_parallel()` passes CUDA kernels
only. We call the template: on a GPU with the flash attention that `context_parallel()` passes (kernel aten_flash), on a
CPU with the CPU kernel of our own methods. Everything else is torch's: transfers of KV, merging, load balance, the
backward. Its tensors are (B, H, S, D). Source:
https://github.com/pytorch/pytorch, torch/distributed/tensor/experimental/_context_parallel/_attention.py.

Layout: zigzag if causal, otherwise contiguous, as its load balancer needs. Accumulates in fp32 whatever the dtype.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sp_bench.peers.peer import Attention


BLOCK_KERNELS = {"cpu": "aten_cpu", "cuda": "aten_flash"}
"""The kernel of its blocks, by device."""


@dataclass(frozen=True, kw_only=True)
class TorchContextParallel(Peer):
    """Context parallel attention. Algorithms are torch's rotate methods: gather KV (the default), or pass it round."""

    name: ClassVar[str] = "torch_context_parallel"
    distribution: ClassVar[str] = "torch"
    module: ClassVar[str] = "torch.distributed.tensor.experimental._context_parallel._attention"
    algorithms: ClassVar[tuple[str, ...]] = ("all_gather", "all_to_all")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def wanted_layout(self) -> str:
        return "zigzag" if self.causal else "contiguous"

    def refuse_absence(self) -> None:
        """Raise RequestError if torch lacks the module. Looks for its file: finding the module would import torch."""
        spec = importlib.util.find_spec("torch")
        assert spec and spec.origin, "sp_bench depends on torch"
        inside = self.module.split(".")[1:]
        if not Path(spec.origin).parent.joinpath(*inside).with_suffix(".py").exists():
            rule = f"torch {self.version} has no {self.module}"
            raise RequestError(f"impl={self.name}", rule, "torch>=2.10 would work")

    def kernel_on(self, device: str) -> str:
        return BLOCK_KERNELS[device]

    def refuse_device(self, device: str) -> None:
        """Refuse nothing: torch has kernels for both."""

    def notes(self, device: str) -> list[str]:
        kernel = "torch's own flash attention" if device == "cuda" else "the CPU kernel of our own methods"
        return [f"{self.name} is torch {self.version}'s private template, with {kernel}"]

    def attention(self, problem: Problem, device: torch.device, group: ProcessGroup | None = None) -> Attention:
        from sp_bench.peers.torch_ring import TorchRing
        from sp_bench.run.groups import world

        about = self.causal, self.algorithm, group or world(), self.kernel_on(device.type)
        return lambda q, k, v: TorchRing.apply(q, k, v, *about)
