"""FlashMLA, for decode steps over latent keys on Hopper (DeepSeek-AI 2025, github.com/deepseek-ai/FlashMLA).

Its rules are those of csrc/api/dense_decode.h: bf16 or fp16, keys of 576 or 512 elements whose first 512 are the
values, pages of 64 tokens. flash_mla/flash_mla_interface.py has the interface: the metadata of its scheduler depend on
the lengths of the caches, and may be used again while these and the shapes stay. Its lse is natural.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_bench.kernels.cuda import unit_stride
from sp_bench.kernels.entries import ABSORBED, Entries
from sp_bench.kernels.steps import StepKernel

PAGE = 64
"""Tokens of its pages."""


class FlashMla(StepKernel):
    """flash_mla_with_kvcache of bf16 caches. All rows of an entry are heads of one token, as they see the same keys."""

    name = "flash_mla"
    majors = (9,)
    package = "flash_mla"
    packages: ClassVar[Mapping[str, str]] = {"flash_mla": "flash-mla"}
    install = "pip install git+https://github.com/deepseek-ai/FlashMLA"

    @classmethod
    def refuses_widths(cls, head_dim: int, value_dim: int) -> str:
        if (head_dim, value_dim) == ABSORBED:
            return ""
        return f"it takes latent keys of {ABSORBED[0]} with values of {ABSORBED[1]}, not {head_dim} with {value_dim}"

    @classmethod
    def takes_pages(cls, page: int) -> bool:
        """Whether they have 64 tokens."""
        return page == PAGE

    def forward_pages(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        metadata, splits = self._metadata(q, entries)
        out, lse = self.functions.flash_mla_with_kvcache(
            unit_stride(q).transpose(1, 2),
            unit_stride(k),
            entries.table,
            entries.counts,
            v.shape[3],
            metadata,
            splits,
            softmax_scale=1 / math.sqrt(q.shape[3]),
            causal=False,
        )
        return out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()

    def _metadata(self, q: Tensor, entries: Entries) -> Any:
        """(metadata, splits) of its scheduler: the second are None since its release of 2026, which makes both at the
        first call.
        """
        rows = q.shape[1]
        return self.planned(entries, (rows, q.dtype), lambda: self.functions.get_mla_metadata(entries.counts, rows, 1))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """FULL blocks alone, whose keys are padded to pages."""
        assert not causal, "a decode step has no causal blocks"
        batch, keys = k.shape[:2]
        pages = -(-keys // PAGE)
        padded = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, pages * PAGE - keys)) if keys % PAGE else k
        pool = padded.reshape(batch * pages, PAGE, *k.shape[2:])
        places = tuple(range(i * pages, (i + 1) * pages) for i in range(batch))
        entries = Entries((keys,) * batch, places, PAGE, q.device)
        results = self.forward_pages(q, pool, pool[..., : v.shape[3]], entries)
        self._planned.clear()  # such entries are of one call
        return results
