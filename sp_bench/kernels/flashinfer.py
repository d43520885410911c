"""FlashInfer's attention of a batch over caches in pages (Ye et al. 2025), for decode steps.

The interface is that of flashinfer-python 0.2 to 0.6.
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

HEAD_DIMS = (64, 128, 256)
"""Widths that all of its kernels are made for (include/flashinfer/utils.cuh, DISPATCH_HEAD_DIM)."""
WORKSPACE_BYTES = 128 * 2**20
"""Room for the results of parts of caches; its documentation recommends so much."""


class FlashInfer(StepKernel):
    """BatchDecodeWithPagedKVCacheWrapper, in its form for tensor cores, which takes any number of rows for a key head.
    Of latent keys it is BatchMLAPagedAttentionWrapper (flashinfer/mla), which has the latent and the rest apart.

    Rows are query heads that share a key head there, as `share` of them are in a model: (E, H R, D), of which R behind
    each other have one key head. Its lse is a logarithm to the base 2.
    """

    name = "flashinfer"
    package = "flashinfer"
    packages: ClassVar[Mapping[str, str]] = {"flashinfer": "flashinfer-python"}
    install = "pip install flashinfer-python"
    in_pages = True

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[torch.device, Tensor] = {}

    @classmethod
    def refuses_widths(cls, head_dim: int, value_dim: int) -> str:
        if (head_dim, value_dim) in {ABSORBED, *((width, width) for width in HEAD_DIMS)}:
            return ""
        widths, latent = ", ".join(map(str, HEAD_DIMS)), "{} with {}".format(*ABSORBED)
        return f"it takes a head_dim of {widths} with values as wide, or {latent}, not {head_dim} with {value_dim}"

    @classmethod
    def takes_pages(cls, page: int) -> bool:
        """True: they may have any number of tokens, one too."""
        return True

    def forward_pages(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        count, rows, heads, width = q.shape
        by_head = unit_stride(q).transpose(1, 2).reshape(count, heads * rows, width)
        if (width, latent := v.shape[3]) == ABSORBED:
            parts = by_head[..., :latent], by_head[..., latent:], v[:, :, 0], k[:, :, 0, latent:]
            out, lse = self._wrapper(q, entries, latent).run(*parts, return_lse=True)
        else:
            out, lse = self._wrapper(q, entries).run(by_head, (unit_stride(k), unit_stride(v)), return_lse=True)
        lse_EHR = lse.unflatten(1, (heads, rows)) * math.log(2)
        return out.unflatten(1, (heads, rows)).transpose(1, 2).contiguous(), lse_EHR

    def _wrapper(self, q: Tensor, entries: Entries, latent: int = 0) -> Any:
        """Its wrapper with the plan of these entries and rows; of keys with so many elements of a latent, if any."""
        if q.device not in self._workspaces:
            self._workspaces[q.device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        plan = self._plan_of_latents if latent else self._plan
        return self.planned(entries, (q.shape[1:], q.dtype), lambda: plan(q, entries))

    def _plan(self, q: Tensor, entries: Entries) -> Any:
        _, rows, heads, width = q.shape
        wrapper = self.functions.BatchDecodeWithPagedKVCacheWrapper(
            self._workspaces[q.device], "NHD", use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(
            entries.ends,
            entries.in_line,
            entries.last,
            rows * heads,
            heads,
            width,
            entries.page,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        return wrapper

    def _plan_of_latents(self, q: Tensor, entries: Entries) -> Any:
        """All rows of an entry are heads of one token, as they see the same keys."""
        (count, rows, _, width), (_, latent) = q.shape, ABSORBED
        wrapper = self.functions.mla.BatchMLAPagedAttentionWrapper(self._workspaces[q.device])
        tokens = torch.arange(count + 1, dtype=torch.int32)
        scale = 1 / math.sqrt(width)
        shape = (rows, latent, width - latent, entries.page)
        wrapper.plan(tokens, entries.ends, entries.in_line, entries.counts, *shape, False, scale, q.dtype, q.dtype)
        return wrapper

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """FULL blocks alone, whose keys are pages of one token."""
        assert not causal, "a decode step has no causal blocks"
        keys = k.shape[1]
        lengths, places = (keys,) * len(k), tuple(range(i * keys, (i + 1) * keys) for i in range(len(k)))
        of_keys, of_values = (x.flatten(0, 1)[:, None] for x in (k, v))
        return self.forward_pages(q, of_keys, of_values, Entries(lengths, places, 1, q.device))
