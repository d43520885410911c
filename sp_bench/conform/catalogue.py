"""The registry of checks: what each looks for, on which cases, and which published bugs it would have seen.

Imports no torch: ranks find the function of a check by its name in checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from sp_bench.conform.case import Case
from sp_bench.conform.claims import Claims

SIZES = (1, 2, 3, 4, 6, 8)
"""The numbers of ranks that are run."""
PROFILES = ("short", "long")
LEAK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    looks_for: str
    """What holds, in a few words."""
    function: str
    """The function in checks.py, or that and its first argument: "tensor:dq"."""
    cases: Callable[[Claims, bool], Iterator[Case]]
    """(claims, long) -> the cases; the short profile is a part of the long one."""
    claimed: Callable[[Claims], bool] = lambda claims: True
    """Whether the check is for a subject that claims this."""
    counted: bool = False
    """Whether it is only for subjects with a claimed volume."""
    published: tuple[str, ...] = ()
    """Bugs of this kind in public code: repository and number of the issue or pull request."""

    @property
    def leaves_messages(self) -> bool:
        """Whether a failure leaves messages on the group."""
        return self.function == "messages"

    @property
    def worlds(self) -> int:
        """How many groups of ranks share the world."""
        return 2 if self.function == "sub_groups" else 1


def _case(claims: Claims, n: int, **changes: object) -> Case:
    """A case with as many heads as ranks, in the first claimed dtype and mask."""
    heads = n if n > 1 else 2
    base = Case(n=n, heads=heads, kv_heads=heads, tokens=8, head_dim=16, dtype=claims.dtypes[0], mask=claims.masks[0])
    return base.simpler(**changes)


def _sizes_and_masks(claims: Claims, long: bool) -> Iterator[Case]:
    """All sizes; masks in turns, or all."""
    for i, n in enumerate(SIZES):
        for mask in claims.masks if long or n in (1, 4) else claims.masks[i % len(claims.masks) :][:1]:
            yield _case(claims, n, mask=mask)
            if long:
                yield _case(claims, n, mask=mask, tokens=32, batch=2, heads=2 * n, kv_heads=2 * n)


def _kv_heads(claims: Claims, long: bool) -> Iterator[Case]:
    for n, mask in product(SIZES[1:] if long else (2, 4), claims.masks):
        yield _case(claims, n, mask=mask, heads=2 * n, kv_heads=n)
        yield _case(claims, n, mask=mask, heads=2 * n, kv_heads=1)
        if n in (4, 6, 8):
            yield _case(claims, n, mask=mask, heads=n, kv_heads=n // 2)


def _uneven_heads(claims: Claims, long: bool) -> Iterator[Case]:
    pairs = [(2, 3), (4, 6), (3, 4)] + [(6, 8), (8, 12), (3, 2), (8, 3), (2, 1)] * long
    return (_case(claims, n, heads=h, kv_heads=h) for n, h in pairs)


def _head_dims(claims: Claims, long: bool) -> Iterator[Case]:
    for n, dim, mask in product((2, 4, 8) if long else (2,), (64, 80, 128), claims.masks if long else claims.masks[:1]):
        yield _case(claims, n, head_dim=dim, mask=mask)


def _batches(claims: Claims, long: bool) -> Iterator[Case]:
    return (_case(claims, n, batch=2, mask=m) for n, m in product((2, 3, 4, 8) if long else (2, 3), claims.masks))


def _dtypes(claims: Claims, long: bool) -> Iterator[Case]:
    for n, dtype, mask in product(
        (2, 4, 8) if long else (2,), claims.dtypes, claims.masks if long else claims.masks[:1]
    ):
        yield _case(claims, n, dtype=dtype, mask=mask)


def _uneven(claims: Claims, long: bool) -> Iterator[Case]:
    for n, more in product((2, 3, 4, 8) if long else (3, 4), (1, 2, 5) if long else (1,)):
        yield _case(claims, n, more=more)


def _documents(claims: Claims, long: bool) -> Iterator[Case]:
    for n, documents, mask in product((2, 3, 4, 8) if long else (2, 4), (1, 3, 5) if long else (3,), claims.masks):
        yield _case(claims, n, documents=documents, mask=mask)


def _padded(claims: Claims, long: bool) -> Iterator[Case]:
    for n, mask in product((2, 3, 4, 8) if long else (3,), claims.masks):
        yield _case(claims, n, documents=2, padded=True, mask=mask)


def _one(claims: Claims, long: bool) -> Iterator[Case]:
    """Two ranks; in the long profile others, and each mask."""
    return (_case(claims, n, mask=mask) for n, mask in product((2, 3, 4) if long else (2,), claims.masks[: 1 + long]))


def _three(claims: Claims, long: bool) -> Iterator[Case]:
    """Three ranks, where each has two others."""
    return (_case(claims, n, mask=mask) for n, mask in product((3, 4, 8) if long else (3,), claims.masks[: 1 + long]))


def _grouped(claims: Claims, long: bool) -> Iterator[Case]:
    return (_case(claims, n, mask=mask) for n, mask in product((2, 3, 4) if long else (2, 3), claims.masks[: 1 + long]))


def _volumes(claims: Claims, long: bool) -> Iterator[Case]:
    for n, mask in product((2, 3, 4, 6, 8) if long else (2, 4), claims.masks):
        yield _case(claims, n, mask=mask)
        yield _case(claims, n, mask=mask, heads=2 * n, kv_heads=n)


def _large(claims: Claims, long: bool) -> Iterator[Case]:
    return (_case(claims, n, tokens=LEAK_TOKENS, head_dim=64) for n in ((2, 4) if long else (2,)))


def _tensor(name: str, looks_for: str, published: tuple[str, ...]) -> Check:
    return Check(name=name, looks_for=looks_for, function=f"tensor:{name}", cases=_sizes_and_masks, published=published)


GATHERED = "pytorch/pytorch#120386"
STALE_KV = ("huggingface/diffusers#14265", "NVIDIA/TransformerEngine#1557")

CHECKS = (
    _tensor("out", "the forward, on every number of ranks, with each mask", ("pytorch/pytorch#141429",)),
    _tensor("dq", "the gradient of q", STALE_KV),
    _tensor("dk", "the gradient of k", (*STALE_KV, GATHERED)),
    _tensor("dv", "the gradient of v", (*STALE_KV, GATHERED, "feifeibear/long-context-attention#149")),
    Check(
        name="kv_heads",
        looks_for="grouped queries (GQA, MQA), also fewer key heads than ranks",
        function="exact",
        cases=_kv_heads,
        published=("vllm-project/vllm-omni#5716",),
    ),
    Check(
        name="heads",
        looks_for="numbers of heads that the ranks don't share evenly",
        function="exact",
        cases=_uneven_heads,
        claimed=lambda claims: not claims.head_parallel,
    ),
    Check(name="head_dim", looks_for="heads of 64, 80 and 128", function="exact", cases=_head_dims),
    Check(
        name="batch",
        looks_for="two sequences at a time",
        function="exact",
        cases=_batches,
        published=("deepspeedai/DeepSpeed#5808",),
    ),
    Check(
        name="dtypes",
        looks_for="each claimed dtype, within its tolerance",
        function="exact",
        cases=_dtypes,
        published=("zhuzilin/ring-flash-attention#42", "zhuzilin/ring-flash-attention#87"),
    ),
    Check(
        name="large_scores",
        looks_for="scores whose exponentials overflow fp32",
        function="large_scores",
        cases=_one,
        published=("zhuzilin/ring-flash-attention#30",),
    ),
    Check(
        name="uneven",
        looks_for="lengths that the ranks don't share evenly",
        function="exact",
        cases=_uneven,
        claimed=lambda claims: claims.uneven,
        published=("deepspeedai/DeepSpeed#7384", "deepspeedai/DeepSpeed#7842"),
    ),
    Check(
        name="documents",
        looks_for="packed documents don't see each other",
        function="exact",
        cases=_documents,
        claimed=lambda claims: claims.documents,
    ),
    Check(
        name="padding",
        looks_for="a tail of padding changes nothing",
        function="exact",
        cases=_padded,
        claimed=lambda claims: claims.documents,
    ),
    Check(
        name="strides",
        looks_for="inputs and output gradients that are not contiguous",
        function="strides",
        cases=_one,
        published=("Dao-AILab/flash-attention#355", "pytorch/pytorch#129515"),
    ),
    Check(
        name="repeated", looks_for="one instance called again, earlier results kept", function="repeated", cases=_one
    ),
    Check(
        name="in_flight",
        looks_for="two forwards before their backwards, in either order",
        function="in_flight",
        cases=_one,
    ),
    Check(name="dropped", looks_for="a backward beside forwards that get none", function="dropped", cases=_one),
    Check(name="instances", looks_for="two instances in one process", function="two_instances", cases=_one),
    Check(
        name="sub_groups",
        looks_for="two groups of ranks at the same time",
        function="sub_groups",
        cases=_grouped,
        claimed=lambda claims: claims.sub_groups,
        published=("hpcaitech/ColossalAI#6071",),
    ),
    Check(name="frozen", looks_for="inputs that need no gradient", function="frozen", cases=_one),
    Check(
        name="inputs_kept",
        looks_for="inputs unchanged, results with memory of their own",
        function="inputs_kept",
        cases=_one,
    ),
    Check(name="no_grad", looks_for="no_grad and inference_mode", function="no_grad", cases=_one),
    Check(name="autocast", looks_for="a caller under autocast", function="autocast", cases=_one),
    Check(
        name="compile",
        looks_for="a caller under torch.compile",
        function="compiled",
        cases=lambda claims, long: _one(claims, False),
    ),
    Check(
        name="checkpoint",
        looks_for="activation checkpointing",
        function="checkpointed",
        cases=_one,
    ),
    Check(name="determinism", looks_for="the same bits in ten runs", function="deterministic", cases=_three),
    Check(name="volume", looks_for="bytes sent as claimed", function="volume", cases=_volumes, counted=True),
    Check(name="memory", looks_for="no memory that grows with calls", function="memory", cases=_large),
    Check(
        name="messages",
        looks_for="no message or receive left on the group",
        function="messages",
        cases=_three,
    ),
)
"""All checks, in the order of the table."""


def check_named(name: str) -> Check:
    """The check of that name, which must exist."""
    return next(check for check in CHECKS if check.name == name)
