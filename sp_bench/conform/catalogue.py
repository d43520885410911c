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


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    looks_for: str
    """The property that is checked, in a few words."""
    function: str
    """The function in checks.py, or that and its first argument: "tensor:dq"."""
    cases: Cases = cases.one
    """Its cases; those of the short profile are a part of those of the long one."""
    published: tuple[str, ...] = ()
    """Bugs of this kind in public code: repository and number of the issue or pull request."""
    claim: str = ""
    """The claim that it is of; "not" before one that leaves it out, and empty for all subjects."""
    loud: bool = False
    """Whether raising or dying is right, of a subject that gets the same case right where nothing is wrong with it."""

    def claimed(self, claims: Claims) -> bool:
        """Whether it is for a subject that claims this."""
        name = self.claim.removeprefix("not ")
        return not name or getattr(claims, name) is (name == self.claim)

    @property
    def worlds(self) -> int:
        """How many groups of ranks share the world."""
        return 2 if self.function == "sub_groups" else 1


FUSED = "zhuzilin/ring-flash-attention"
GATHERED = "pytorch/pytorch#120386"
STALE_KV = ("huggingface/diffusers#14265", "NVIDIA/TransformerEngine#1557")
DV = (*STALE_KV, GATHERED, "feifeibear/long-context-attention#149")
UNEVEN = ("deepspeedai/DeepSpeed#7384", "deepspeedai/DeepSpeed#7842")
STRIDES = ("Dao-AILab/flash-attention#355", "pytorch/pytorch#129515")

CHECKS = (
    Check("out", "the forward", "tensor:out", cases.sizes_and_masks, ("pytorch/pytorch#141429",)),
    Check("dq", "the gradient of q", "tensor:dq", cases.sizes_and_masks, STALE_KV),
    Check("dk", "the gradient of k", "tensor:dk", cases.sizes_and_masks, (*STALE_KV, GATHERED)),
    Check("dv", "the gradient of v", "tensor:dv", cases.sizes_and_masks, DV),
    Check(
        "kv_heads",
        "grouped queries, also key heads that ranks don't share evenly",
        "exact",
        cases.kv_heads,
        ("vllm-project/vllm-omni#5716",),
    ),
    Check(
        "heads",
        "numbers of heads that the ranks don't share evenly",
        "exact",
        cases.uneven_heads,
        claim="not head_parallel",
    ),
    Check("head_dim", "heads of 64, 80, 128, 192 and 256", "exact", cases.head_dims),
    Check(
        "length",
        "sequences longer than 256 and than 2,048 tokens",
        "exact",
        cases.lengths,
        ("vllm-project/vllm#54300",),
    ),
    Check("batch", "two sequences at a time", "exact", cases.batches, ("deepspeedai/DeepSpeed#5808",)),
    Check("dtypes", "each claimed dtype, within its tolerance", "exact", cases.dtypes, (f"{FUSED}#42", f"{FUSED}#87")),
    Check("large_scores", "scores whose exponentials overflow fp32", "large_scores", published=(f"{FUSED}#30",)),
    Check("uneven", "lengths that the ranks don't share evenly", "exact", cases.uneven, UNEVEN, "uneven"),
    Check(
        "documents",
        "packed documents, also with grouped queries and in a batch",
        "exact",
        cases.documents,
        claim="documents",
    ),
    Check("padding", "a tail of padding changes nothing", "exact", cases.padded, claim="documents"),
    Check("window", "a sliding window", "exact", cases.windows, claim="window"),
    Check("scale", "another scale than 1 / sqrt(D)", "exact", cases.scales, claim="scale"),
    Check("strides", "inputs and output gradients that are not contiguous", "strides", published=STRIDES),
    Check("repeated", "one instance called again, earlier results kept", "repeated"),
    Check("in_flight", "two forwards before their backwards, in either order", "in_flight"),
    Check("dropped", "a backward beside forwards that get none", "dropped"),
    Check("instances", "two instances in one process", "two_instances"),
    Check(
        "sub_groups",
        "two groups of ranks at the same time",
        "sub_groups",
        cases.groups,
        ("hpcaitech/ColossalAI#6071",),
        "sub_groups",
    ),
    Check("frozen", "each choice of inputs that need a gradient", "frozen"),
    Check("inputs_kept", "inputs unchanged, results with memory of their own", "inputs_kept"),
    Check("no_grad", "no_grad and inference_mode", "no_grad"),
    Check("autocast", "a caller under autocast", "autocast"),
    Check("compile", "a caller under torch.compile", "compiled", cases.plain),
    Check("checkpoint", "activation checkpointing", "checkpointed"),
    Check("determinism", "the same bits in ten runs", "deterministic", cases.three),
    Check("volume", "bytes sent as claimed", "volume", cases.volumes),
    Check("memory", "no memory that grows with calls", "memory", cases.large),
    Check("shapes", "no memory that grows with new lengths or packs", "memory_of_shapes", cases.large_packed),
    Check("messages", "no message or receive left on the group", "messages", cases.three),
    Check(
        "other_length",
        "another length on one rank ends in an error, or is right",
        "other_length",
        cases.several,
        loud=True,
    ),
)
"""All checks, in the order of the table."""


def check_named(name: str) -> Check:
    """The check of that name, which must exist."""
    return next(check for check in CHECKS if check.name == name)
