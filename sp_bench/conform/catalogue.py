"""The registry of checks: what each looks for, on which cases, and which published bugs it would have seen.

Imports no torch: ranks find the function of a check by its name in checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sp_bench.conform import cases
from sp_bench.conform.case import Case
from sp_bench.conform.claims import Claims

PROFILES = ("short", "long")
Cases = Callable[[Claims, Sequence[int], bool], Iterator[Case]]
"""(claims, numbers of ranks, long) -> the cases."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    looks_for: str
    """What holds, in a few words."""
    function: str
    """The function in checks.py, or that and its first argument: "tensor:dq"."""
    cases: Cases
    """Its cases; those of the short profile are a part of those of the long one."""
    claimed: Callable[[Claims], bool] = lambda claims: True
    """Whether the check is for a subject that claims this."""
    counted: bool = False
    """Whether it is only for subjects with a claimed volume."""
    loud: bool = False
    """Whether raising or dying is right, of a subject that gets the same case right where nothing is wrong with it."""
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


def _tensor(name: str, looks_for: str, published: tuple[str, ...]) -> Check:
    return Check(
        name=name, looks_for=looks_for, function=f"tensor:{name}", cases=cases.sizes_and_masks, published=published
    )


GATHERED = "pytorch/pytorch#120386"
STALE_KV = ("huggingface/diffusers#14265", "NVIDIA/TransformerEngine#1557")

CHECKS = (
    _tensor("out", "the forward", ("pytorch/pytorch#141429",)),
    _tensor("dq", "the gradient of q", STALE_KV),
    _tensor("dk", "the gradient of k", (*STALE_KV, GATHERED)),
    _tensor("dv", "the gradient of v", (*STALE_KV, GATHERED, "feifeibear/long-context-attention#149")),
    Check(
        name="kv_heads",
        looks_for="grouped queries, also key heads that ranks don't share evenly",
        function="exact",
        cases=cases.kv_heads,
        published=("vllm-project/vllm-omni#5716",),
    ),
    Check(
        name="heads",
        looks_for="numbers of heads that the ranks don't share evenly",
        function="exact",
        cases=cases.uneven_heads,
        claimed=lambda claims: not claims.head_parallel,
    ),
    Check(name="head_dim", looks_for="heads of 64, 80, 128, 192 and 256", function="exact", cases=cases.head_dims),
    Check(
        name="length",
        looks_for="sequences longer than 256 and than 2,048 tokens",
        function="exact",
        cases=cases.lengths,
        published=("vllm-project/vllm#54300",),
    ),
    Check(
        name="batch",
        looks_for="two sequences at a time",
        function="exact",
        cases=cases.batches,
        published=("deepspeedai/DeepSpeed#5808",),
    ),
    Check(
        name="dtypes",
        looks_for="each claimed dtype, within its tolerance",
        function="exact",
        cases=cases.dtypes,
        published=("zhuzilin/ring-flash-attention#42", "zhuzilin/ring-flash-attention#87"),
    ),
    Check(
        name="large_scores",
        looks_for="scores whose exponentials overflow fp32",
        function="large_scores",
        cases=cases.one,
        published=("zhuzilin/ring-flash-attention#30",),
    ),
    Check(
        name="uneven",
        looks_for="lengths that the ranks don't share evenly",
        function="exact",
        cases=cases.uneven,
        claimed=lambda claims: claims.uneven,
        published=("deepspeedai/DeepSpeed#7384", "deepspeedai/DeepSpeed#7842"),
    ),
    Check(
        name="documents",
        looks_for="packed documents, also with grouped queries and in a batch",
        function="exact",
        cases=cases.documents,
        claimed=lambda claims: claims.documents,
    ),
    Check(
        name="padding",
        looks_for="a tail of padding changes nothing",
        function="exact",
        cases=cases.padded,
        claimed=lambda claims: claims.documents,
    ),
    Check(
        name="window",
        looks_for="a sliding window",
        function="exact",
        cases=cases.windows,
        claimed=lambda claims: claims.window,
    ),
    Check(
        name="scale",
        looks_for="another scale than 1 / sqrt(D)",
        function="exact",
        cases=cases.scales,
        claimed=lambda claims: claims.scale,
    ),
    Check(
        name="strides",
        looks_for="inputs and output gradients that are not contiguous",
        function="strides",
        cases=cases.one,
        published=("Dao-AILab/flash-attention#355", "pytorch/pytorch#129515"),
    ),
    Check(
        name="repeated",
        looks_for="one instance called again, earlier results kept",
        function="repeated",
        cases=cases.one,
    ),
    Check(
        name="in_flight",
        looks_for="two forwards before their backwards, in either order",
        function="in_flight",
        cases=cases.one,
    ),
    Check(name="dropped", looks_for="a backward beside forwards that get none", function="dropped", cases=cases.one),
    Check(name="instances", looks_for="two instances in one process", function="two_instances", cases=cases.one),
    Check(
        name="sub_groups",
        looks_for="two groups of ranks at the same time",
        function="sub_groups",
        cases=cases.groups,
        claimed=lambda claims: claims.sub_groups,
        published=("hpcaitech/ColossalAI#6071",),
    ),
    Check(name="frozen", looks_for="each choice of inputs that need a gradient", function="frozen", cases=cases.one),
    Check(
        name="inputs_kept",
        looks_for="inputs unchanged, results with memory of their own",
        function="inputs_kept",
        cases=cases.one,
    ),
    Check(name="no_grad", looks_for="no_grad and inference_mode", function="no_grad", cases=cases.one),
    Check(name="autocast", looks_for="a caller under autocast", function="autocast", cases=cases.one),
    Check(
        name="compile",
        looks_for="a caller under torch.compile",
        function="compiled",
        cases=cases.plain,
    ),
    Check(
        name="checkpoint",
        looks_for="activation checkpointing",
        function="checkpointed",
        cases=cases.one,
    ),
    Check(name="determinism", looks_for="the same bits in ten runs", function="deterministic", cases=cases.three),
    Check(name="volume", looks_for="bytes sent as claimed", function="volume", cases=cases.volumes, counted=True),
    Check(name="memory", looks_for="no memory that grows with calls", function="memory", cases=cases.large),
    Check(
        name="shapes",
        looks_for="no memory that grows with new lengths or packs",
        function="memory_of_shapes",
        cases=cases.large_packed,
    ),
    Check(
        name="messages",
        looks_for="no message or receive left on the group",
        function="messages",
        cases=cases.three,
    ),
    Check(
        name="other_length",
        looks_for="another length on one rank ends in an error, or is right",
        function="other_length",
        cases=cases.several,
        loud=True,
    ),
)
"""All checks, in the order of the table."""


def check_named(name: str) -> Check:
    """The check of that name, which must exist."""
    return next(check for check in CHECKS if check.name == name)
