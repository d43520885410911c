"""What ranks do in the tests of plug-ins. Imported inside the ranks: no pytest."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import group_of

RANKS = 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama(implementation: str) -> Any:
    """A small Llama, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=implementation)).train()


def batch(seqlen: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Whole input_ids (1, S), and position_ids of packed documents, if any."""
    ids = torch.randint(64, (1, seqlen), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(n) for n in lengths])[None] if lengths else None


def eager(ids: Tensor, position_ids: Tensor | None, lengths: tuple[int, ...]) -> tuple[Tensor, float, list[Tensor]]:
    """Logits, loss and gradients of eager attention on one process."""
    model = llama("eager")
    logits = model(ids, position_ids=position_ids, use_cache=False).logits
    labels = ids[:, 1:].clone()
    if lengths:
        labels[:, torch.tensor(lengths).cumsum(0)[:-1] - 1] = -100
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0])
    loss.backward()
    return logits.detach(), float(loss), [p.grad for p in model.parameters()]


def differences(cases: list[tuple[str, int, tuple[int, ...]]]) -> list[tuple[float, float, float]]:
    """For each (method, seqlen, documents): relative errors of logits, loss and gradients against eager attention."""
    group, found = group_of(RANKS, "a plug-in"), []
    if group is None:
        return []
    from sp_bench.integrations.transformers import register

    for method, seqlen, lengths in cases:
        ids, position_ids = batch(seqlen, lengths)
        logits, loss, gradients = eager(ids, position_ids, lengths)
        parallel = register(method, group=group)
        model = llama("sp_bench")
        out = model(**parallel.deal(ids, position_ids=position_ids))
        out.loss.backward()
        total = out.loss.detach().clone()
        mine = [p.grad for p in model.parameters()]
        for x in (total, *mine):
            dist.all_reduce(x, group=group)
        worst = max(float((x - y).norm() / y.norm()) for x, y in zip(mine, gradients, strict=True))
        apart = parallel.gather(out.logits) - logits
        found.append((float(apart.abs().max() / logits.abs().max()), abs(float(total) / loss - 1), worst))
    return found


def refusals() -> list[str]:
    """What calls that can't be served are refused with, alone in a process."""
    from sp_bench.errors import RequestError
    from sp_bench.integrations.transformers import register

    parallel, found = register("ring"), []
    q = torch.zeros(1, 4, 8, 8)
    module = torch.nn.Identity()
    calls = (
        lambda: parallel(module, q, q, q, torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])),
        lambda: parallel(module, q[:, :, :1], q, q, None),
        lambda: parallel(module, q, q, q, None, dropout=0.1),
        lambda: parallel(module, q, q, q, None, sliding_window=4),
        lambda: parallel(module, q, q, q, None, softcap=30.0),
        lambda: parallel.deal(q[0, 0, :1].long(), position_ids=torch.tensor([[0, 1, 3, 0, 1, 2, 3, 4]])),
        lambda: register("rings"),
    )
    for call in calls:
        try:
            call()
        except RequestError as error:
            found.append(str(error))
    return found
