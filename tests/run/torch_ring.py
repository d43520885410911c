"""torch's own ring attention on a rank, to agree with: a private interface, used nowhere else.

Imported inside the ranks: no pytest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.attention_cases import Case
from tests.support.ranks import group_of

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward_block(query: Tensor, key: Tensor, value: Tensor, **asked: object) -> tuple[Tensor, ...]:
    return _FORWARD(query, key, value, dropout_p=0.0, **asked)


def backward_block(query: Tensor, key: Tensor, value: Tensor, **asked: object) -> tuple[Tensor, ...]:
    return _BACKWARD(query=query, key=key, value=value, dropout_p=0.0, **asked)


def torch_attention(
    group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, case: Case
) -> list[Tensor]:
    """(out, dq, dk, dv) of this rank's (B, S, H, D) tensors, contiguous or zigzag by the case's layout."""
    # Importing it takes a second, which ranks outside the group don't spend.
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

    options = context_parallel._cp_options
    options.enable_load_balance = case.layout == "zigzag"
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    out, lse = context_parallel._templated_ring_attention(group, 2, forward_block, q, k, v, is_causal=case.causal)
    grads = context_parallel._templated_ring_attention_backward(
        group, 2, backward_block, dout, "grad_out", q, k, v, out, lse, is_causal=case.causal
    )
    return [x.transpose(1, 2) for x in (out, *grads[:3])]


def disagreement(case: Case) -> dict[str, float] | None:
    """The largest relative difference between ours and torch's on this rank, by tensor."""
    group = group_of(case.n, case)
    if group is None:
        return None
    attn = case.attention(group)
    generator = torch.Generator().manual_seed(1)
    shape = (1, case.n * case.tokens, 4, 16)
    q, k, v, dout = (attn.shard(torch.randn(shape, generator=generator)) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attn(*leaves)
    out.backward(dout)
    ours = [out.detach(), *(x.grad for x in leaves)]
    theirs = torch_attention(group, q, k, v, dout, case)
    return {
        name: float((mine - yours).norm() / yours.norm())
        for name, mine, yours in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True)
    }
