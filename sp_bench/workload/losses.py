"""Losses over an assigned sequence: each rank's sum over the count of all tokens, so that ranks' losses add up.

Normalising by a rank's own count would weigh tokens differently where ranks own unequal numbers of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

IGNORED = -100
"""The label of a token that has no next one."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TM: Tensor, weight_VM: Tensor, labels_T: Tensor, count: int, chunk: int) -> Tensor:
        wide = torch.promote_types(weight_VM.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_TM.device)
        dhidden_TM, dweight_VM = torch.empty_like(hidden_TM), torch.zeros_like(weight_VM, dtype=wide)
        weight = weight_VM.to(hidden_TM.dtype)
        for begin in range(0, hidden_TM.shape[0], chunk):
            part = slice(begin, begin + chunk)
            hidden, labels = hidden_TM[part], labels_T[part]
            probabilities = F.log_softmax((hidden @ weight.T).to(wide), dim=-1)
            total += F.nll_loss(probabilities, labels, ignore_index=IGNORED, reduction="sum")
            kept = labels != IGNORED
            dlogits = probabilities.exp_()
            dlogits[torch.arange(len(labels), device=labels.device), labels.where(kept, 0)] -= 1
            dlogits = (dlogits * (kept / count)[:, None]).to(hidden.dtype)
            dhidden_TM[part] = dlogits @ weight
            dweight_VM += (dlogits.T @ hidden).to(wide)
        ctx.save_for_backward(dhidden_TM, dweight_VM)
        ctx.weight_dtype = weight_VM.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        dhidden_TM, dweight_VM = ctx.saved_tensors
        scale = grad_outputs[0]
        dhidden_TM, dweight_VM = dhidden_TM * scale.to(dhidden_TM.dtype), dweight_VM * scale
        return dhidden_TM, dweight_VM.to(ctx.weight_dtype), None, None, None


def cross_entropy(hidden_BSM: Tensor, weight_VM: Tensor, labels_BS: Tensor, count: int, chunk: int) -> Tensor:
    """The cross-entropy of this rank's tokens with their labels, over the `count` of labels of all ranks.

    Logits exist for `chunk` tokens at a time: their gradients are computed with them, in the forward.
    """
    hidden_TM, labels_T = hidden_BSM.flatten(0, 1), labels_BS.flatten()
    return _ChunkedCrossEntropy.apply(hidden_TM, weight_VM, labels_T, count, chunk)  # pyright: ignore[reportReturnType]


def next_tokens(tokens_BS: Tensor, lengths: tuple[int, ...] | None = None) -> Tensor:
    """The label of each token of the whole sequence: the next one of its document; IGNORED where there is none.

    Call it before the sequence is assigned: on a rank the next token may be another rank's. `lengths` are those of
    packed documents.
    """
    labels_BS = torch.full_like(tokens_BS, IGNORED)
    labels_BS[:, :-1] = tokens_BS[:, 1:]
    if lengths:
        labels_BS[:, torch.tensor(lengths).cumsum(0) - 1] = IGNORED
    return labels_BS


def squared_error(hidden_BSM: Tensor, head_CM: Tensor, wanted_BSC: Tensor, count: int) -> Tensor:
    """The squared error of this rank's patches, over the `count` of elements of all ranks."""
    found_BSC = F.linear(hidden_BSM, head_CM.to(hidden_BSM.dtype))
    return (found_BSC.to(wanted_BSC.dtype) - wanted_BSC).square().sum() / count
