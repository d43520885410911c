"""Jobs of ranks in the tests of plug-ins. Imported inside the ranks: no pytest."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.errors import RequestError
from tests.integrations.models import apart, eager, ids, model, positions, refused, summed
from tests.support.ranks import group_of

RANKS = 4


def llama(implementation: str) -> Any:
    """A small Llama, the same on all ranks."""
    return model("llama", implementation)


def differences(cases: list[tuple[str, int, tuple[int, ...]]]) -> list[float]:
    """For each (method, seqlen, documents): the error of logits, loss and gradients against eager attention."""
    group, found = group_of(RANKS, "a plug-in"), []
    if group is None:
        return []
    from sp_bench.integrations.transformers import register

    alone, ours = llama("eager"), None
    for method, seqlen, lengths in cases:
        whole, told = ids(seqlen=seqlen), positions(*lengths) if lengths else None
        logits, loss, wanted = eager(alone, whole, told)
        parallel = register(method, group=group)
        ours = ours or llama("sp_bench")
        ours.zero_grad()
        out = ours(**parallel.shard(whole, position_ids=told))
        out.loss.backward()
        total = out.loss.detach().clone()
        dist.all_reduce(total, group=group)
        errors = ([parallel.gather(out.logits)], [logits]), ([total], [loss]), (summed(ours, group), wanted)
        found.append(max(apart(*each) for each in errors))
    return found


def _registered(what: str, n: int = 2, method: str = "ring") -> tuple[Any, Any]:
    """(the group, the plug-in), or Nones on ranks beyond."""
    group = group_of(n, what)
    if group is None:
        return None, None
    from sp_bench.integrations.transformers import register

    return group, register(method, group=group)


def padded_heads() -> float:
    """The error of a model whose 4 heads 3 ranks split with heads of zeros."""
    group, found = group_of(3, "padded heads"), 0.0
    if group is None:
        return found
    from sp_bench.integrations.transformers import register

    parallel = register("ulysses", group=group, pad_heads=True)
    alone, ours = llama("eager"), llama("sp_bench")
    logits, _, wanted = eager(alone, ids())
    out = ours(**parallel.shard(ids()))
    out.loss.backward()
    return apart([parallel.gather(out.logits), *summed(ours, group)], [logits, *wanted])


PACKS = ((20, 28), (5, 30, 13))


def two_batches(*, checkpointing: bool) -> dict[str, float]:
    """Errors where two packed batches are sharded, then run forward, before one backward."""
    group, parallel = _registered("two batches")
    if group is None:
        return {}
    alone, ours = llama("eager"), llama("sp_bench")
    if checkpointing:
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = [(ids(seed=3 + i), positions(*pack)) for i, pack in enumerate(PACKS)]
    sharded = [parallel.shard(whole, position_ids=told) for whole, told in batches]
    outs = [ours(**each) for each in sharded]
    (outs[0].loss + outs[1].loss).backward()
    wanted = [eager(alone, whole, told) for whole, told in batches]
    both = [x + y for x, y in zip(wanted[0][2], wanted[1][2], strict=True)]
    return {
        "logits": max(apart([parallel.gather(out.logits)], [each[0]]) for out, each in zip(outs, wanted, strict=True)),
        "gathered by what was sharded": apart([parallel.gather(outs[0].logits * 1, sharded[0])], [wanted[0][0]]),
        "gradients": apart(summed(ours, group), both),
    }


def not_told_which() -> str:
    """How a tensor is refused that may be of either of two batches."""
    group, parallel = _registered("gather")
    if group is None:
        return ""
    given = parallel.shard(ids())
    parallel.shard(ids(rows=2, seqlen=24), position_ids=torch.cat([positions(10, 14), positions(24)]))
    return refused(lambda: parallel.gather(given["input_ids"] * 1))


def rows_that_differ() -> float:
    """The error of a batch whose rows have different documents."""
    group, parallel = _registered("rows that differ")
    if group is None:
        return 0.0
    whole, told = ids(rows=2), torch.cat([positions(*pack) for pack in PACKS])
    logits, loss, wanted = eager(llama("eager"), whole, told)
    ours = llama("sp_bench")
    out = ours(**parallel.shard(whole, position_ids=told))
    out.loss.backward()
    total = out.loss.detach().clone()
    dist.all_reduce(total, group=group)
    found = [parallel.gather(out.logits), total, *summed(ours, group)]
    return apart(found, [logits, loss, *wanted])


def not_causal(*, packed: bool) -> float:
    """The error of layers that are not causal, with documents or a whole sequence that ranks don't divide."""
    group, parallel = _registered("not causal", method="ring" if packed else "zigzag")
    if group is None:
        return 0.0
    lengths = (20, 28) if packed else (47,)
    given = parallel.shard(ids(seqlen=sum(lengths)), position_ids=positions(*lengths))
    batch, generator = given["sp_bench"], torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, sum(lengths), heads, 8, generator=generator) for heads in (4, 2, 2))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sees = document[:, None] == document[None]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=sees, enable_gqa=True
    ).transpose(1, 2)
    mine = [batch.shard(x.flatten(2)).unflatten(2, x.shape[2:]).transpose(1, 2) for x in (q, k, v)]
    layer = torch.nn.Identity()
    layer.is_causal = False  # pyright: ignore[reportArgumentType]
    out = parallel(layer, *mine, None, sp_bench=batch)[0]
    return apart([parallel.gather(out, given)], [wanted])


def other_batches() -> list[str]:
    """How ranks are refused that have other lengths, documents, tokens or labels, and one whose positions are wrong."""
    group, parallel = _registered("other batches")
    if group is None:
        return []
    odd = dist.get_rank(group) == 1
    whole, wrong = ids(), torch.tensor([[0, 2, *range(46)]])
    calls = (
        lambda: parallel.shard(ids(seqlen=40) if odd else whole),
        lambda: parallel.shard(whole, position_ids=positions(*PACKS[odd])),
        lambda: parallel.shard(ids(seed=1 + odd)),
        lambda: parallel.shard(whole, labels=ids(seed=1 + odd)),
        lambda: parallel.shard(whole, position_ids=wrong if odd else None),
    )
    found = [refused(call) for call in calls]
    return [*found, refused(lambda: parallel.shard(whole))]


def other_shapes() -> list[str]:
    """How SequenceParallelAttention refuses ranks whose sequences or heads differ."""
    group = group_of(2, "other shapes")
    if group is None:
        return []
    from sp_bench import SequenceParallelAttention

    attention, odd = SequenceParallelAttention("ring", group=group), dist.get_rank(group) == 1

    def x(tokens: int, heads: int = 2) -> Tensor:
        return torch.zeros(1, tokens, heads, 8)

    calls = (
        lambda: attention(*[x(8 + odd)] * 3),
        lambda: attention(*[x(8, 2 + 2 * odd)] * 3),
        lambda: attention(x(8), x(8 + odd), x(8)),
        lambda: attention(*[x(8)] * 3),
    )
    return [refused(call) for call in calls]


def padded() -> list[str]:
    """How a padding mask is refused that is passed to a model, and what all ones give."""
    from sp_bench.integrations.transformers import register

    parallel, ours = register("ring"), llama("sp_bench")
    left, whole = torch.ones(1, 48, dtype=torch.long), torch.ones(1, 48, dtype=torch.long)
    left[:, :3] = 0
    given = parallel.shard(ids())
    return [refused(partial(ours, **given, attention_mask=mask)) for mask in (left, whole)]


class DropsLabels:
    """Mixed into a model: what passes on neither shift_labels nor num_items_in_batch, as some of transformers 4."""

    def forward(self, *args: Any, **given: Any) -> Any:
        labels = given.pop("labels")
        given = {key: value for key, value in given.items() if key not in ("shift_labels", "num_items_in_batch")}
        out = super().forward(*args, **given)  # pyright: ignore[reportAttributeAccessIssue]
        out.loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=64)  # pyright: ignore
        return out


class OwnLoss(DropsLabels):
    """Mixed into a model: what computes the loss itself, from labels that it shifts."""

    @property
    def loss_function(self) -> Any:
        return lambda logits, labels, **_: torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        """It uses its own."""


def losses() -> tuple[float, str]:
    """The error of the summed loss of a model that drops arguments, and how one with its own loss is refused."""
    group, parallel = _registered("losses")
    if group is None:
        return 0.0, ""
    from transformers import LlamaForCausalLM

    found: list[Any] = []
    for mixed in (DropsLabels, OwnLoss):
        ours = llama("sp_bench")
        ours.__class__ = type("Llama", (mixed, LlamaForCausalLM), {"forward": _forward(mixed)})
        given = parallel.shard(ids())
        try:
            total = ours(**given).loss.detach().clone()
            dist.all_reduce(total, group=group)
            found.append(apart([total], [eager(llama("eager"), ids())[1]]))
        except RequestError as error:
            found.append(str(error))
    return found[0], found[1]


def _forward(mixed: type) -> Any:
    def forward(self: Any, position_ids: Any = None, **given: Any) -> Any:
        return mixed.forward(self, position_ids=position_ids, **given)

    return forward


def sharded_by_caller() -> list[str]:
    """How tokens that the caller sharded are refused: without positions, those of `positions`, and other cases."""
    group, _ = _registered("sharded_by_caller")
    if group is None:
        return []
    from sp_bench import SequenceParallelAttention
    from sp_bench.integrations.transformers import register

    def calls(case: str, layout: str, seqlen: int = 48) -> Any:
        register("ring", group=group, layout=layout)
        attention = SequenceParallelAttention("ring", group=group, layout=layout)
        ours, mine = model(case, "sp_bench"), attention.positions(seqlen)[None]
        return partial(ours, input_ids=ids(seqlen=seqlen)[:, mine[0]], use_cache=False), mine

    found = []
    for layout in ("striped", "contiguous"):
        call, mine = calls("llama", layout)
        found += [refused(call), refused(partial(call, position_ids=mine))]
    from_0 = torch.arange(20)[None]  # right on the first rank
    call, mine = calls("llama", "contiguous", 40)
    found.append(refused(partial(call, position_ids=from_0)))
    found.append(refused(partial(call, position_ids=mine, labels=from_0)))
    found.append(refused(partial(call, position_ids=mine, labels=from_0, shift_labels=from_0)))
    for case in ("phi3, frequencies by the length", "llama4, queries scaled by position"):
        call, mine = calls(case, "contiguous")
        found.append(refused(partial(call, position_ids=mine)))
    return found


def frequencies() -> list[str]:
    """How frequencies are refused that ranks would choose apart: the first has 24 tokens, and 24 is the limit."""
    group = group_of(2, "frequencies")
    if group is None:
        return []
    from sp_bench.integrations.transformers import register

    parallel = register("ring", group=group, layout="contiguous")
    ours = model("phi3, frequencies by the length", "sp_bench")
    return [refused(partial(ours, **parallel.shard(ids(seqlen=seqlen)))) for seqlen in (48, 24)]


def packings(count: int) -> dict[str, tuple[int, int]]:
    """Bytes in shared memory and engines after half and after all of `count` packings, trained in turn."""
    group, parallel = _registered("packings")
    if group is None:
        return {}
    from sp_bench import SequenceParallelAttention

    attention, ours = SequenceParallelAttention("ring", group=group), llama("sp_bench")
    plugin = parallel.attention(attention.mask)._engines
    found, before = {}, _alive()
    for i in range(count):
        whole = ids(seqlen=200 + i % 60)
        first = 1 + 37 * i % 191
        ours(**parallel.shard(whole, position_ids=positions(first, whole.shape[1] - first))).loss.backward()
        q = torch.randn(1, 60 + i % 60, 2, 16, requires_grad=True)
        attention(q, q, q).sum().backward()
        if i + 1 in (count // 2, count):
            for name, engines in (("plug-in", plugin), ("attention", attention._engines)):
                found[f"{name}, {i + 1}"] = engines.nbytes, len(engines)
    found["tensors"] = _alive() - before, count
    return found


def _alive() -> int:
    """Bytes of all tensors that Python knows, each memory once."""
    import gc

    storages = {}
    for x in gc.get_objects():
        if isinstance(x, Tensor) and x.layout is torch.strided:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def refusals() -> list[str]:
    """The errors of calls that can't be served, alone in a process."""
    from sp_bench.integrations.transformers import register

    parallel = register("ring")
    q, layer = torch.zeros(1, 4, 8, 8), torch.nn.Identity()
    calls = (
        lambda: parallel(layer, q, q, q, torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])),
        lambda: parallel(layer, q, q, q, torch.zeros(1, 1, 8, 8)),
        lambda: parallel(layer, q[:, :, :1], q, q, None),
        lambda: parallel(layer, q, q, q, None, dropout=0.1),
        lambda: parallel(layer, q, q, q, None, softcap=30.0),
        lambda: parallel(layer, q, q, q, None, position_bias=torch.zeros(4)),
        lambda: parallel(layer, q, q, q, None, sliding_window=4, is_causal=False),
        lambda: parallel.shard(q[0, 0, :1].long(), position_ids=torch.tensor([[0, 1, 3, 0, 1, 2, 3, 4]])),
        lambda: parallel.shard(q[0, 0, :1].long(), position_ids=torch.zeros(3, 1, 8, dtype=torch.long)),
        lambda: parallel(layer, q[:, :, :4], q[:, :, :4], q[:, :, :4], None, **parallel.shard(q[0, 0, :1].long())),
        lambda: register("rings"),
    )
    return [refused(call) for call in calls]
