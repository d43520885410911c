"""NCCL communicators of lanes, made among some ranks with a share of the SMs, a launch order and a policy.

Those that run at once need an NCCL that launches them in one order on all ranks. An NCCL that doesn't, or that lacks
the policy that is asked for, is refused before a communicator is made.
"""

from __future__ import annotations

import os
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl as library

from sp_bench.errors import RequestError
from sp_bench.lower import LAUNCH_ORDER, ORDERED_FROM
from sp_bench.run.groups import own_group
from sp_bench.run.patience import first_timeout
from sp_bench.run.sms import VARIABLE
from sp_bench.run.transport import Members


class Part(Enum):
    """The part of a lane's traffic that a communicator carries."""

    WHOLE = "all"
    NEAR = "messages inside a node"
    FAR = "messages between nodes, where ranks share nodes"

    def ctas(self, of_lane: int) -> int:
        """How many of a lane's CTAs it takes at most, as powers of two: 50 GB/s of a NIC take few, NVLink more."""
        return {Part.WHOLE: of_lane, Part.NEAR: max(1, of_lane // 2), Part.FAR: max(1, of_lane // 4)}[self]


def refuse_several(version: tuple[Any, ...]) -> None:
    """Raise RequestError for an NCCL that can't run several communicators at once, or was told not to order them."""
    if version[:2] < ORDERED_FROM:
        given, least = (".".join(map(str, numbers)) for numbers in (version, ORDERED_FROM))
        rule = f"lanes need communicators that run at once, which NCCL orders from {least} on"
        raise RequestError(
            f"NCCL {given}", rule, f"a torch built with NCCL {least}, or a method of one lane, would work"
        )
    if (order := os.environ.get(LAUNCH_ORDER, "1")) != "1":
        rule = "lanes need communicators that run at once, which NCCL then launches in any order"
        raise RequestError(f"{LAUNCH_ORDER}={order}", rule, f"{LAUNCH_ORDER}=1 would work")


CTA_POLICIES_FROM = {"default": (2, 27), "efficiency": (2, 27), "zero": (2, 28)}
"""The first NCCL with each policy."""


def cta_policy_value(policy: str, version: tuple[Any, ...]) -> int:
    """The value of a policy in a communicator's config. Raises RequestError if NCCL or torch doesn't have it."""
    name = f"NCCL_CTA_POLICY_{policy.upper()}"
    known = vars(dist.ProcessGroupNCCL)
    if version[:2] < CTA_POLICIES_FROM[policy] or name not in known:
        present, least = (".".join(map(str, numbers)) for numbers in (version, CTA_POLICIES_FROM[policy]))
        rule = f"takes NCCL {least} and a torch with ProcessGroupNCCL.{name}; here are NCCL {present}"
        rule += f", torch {torch.__version__}"
        raise RequestError(f"cta_policy={policy}", rule, "cta_policy=null would work")
    return known[name]


def lane_communicator(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta | None,
    ctas: int,
    lane: int,
    members: Members,
    part: Part = Part.WHOLE,
    *,
    cta_policy: str | None = None,
) -> dist.ProcessGroup:
    """A connected, high-priority NCCL communicator of a lane of `ctas` CTAs among some ranks of `group`, made once.

    Its members must call this, in the same order of calls. The connection to a peer opens at the first message to it.
    It is made with the timeout of first uses.
    Raises RequestError for a second one at once with an NCCL that can't run several, and for a policy that it lacks.
    """
    if lane or part is Part.NEAR:  # beside that of the first lane, or of messages between nodes
        refuse_several(library.version())
    os.environ.setdefault(LAUNCH_ORDER, "1")  # NCCL reads it at its first operation, or for each communicator as made
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if VARIABLE not in os.environ:  # NCCL reads it itself
        options.config.max_ctas = part.ctas(ctas)
    if cta_policy is not None:
        config: Any = options.config  # torch's stubs lack the policy
        config.cta_policy = cta_policy_value(cta_policy, library.version())
    if timeout is not None:
        timeout = first_timeout(timeout)
        options._timeout = timeout  # torch uses the argument below, and warns if this one differs
    purpose = f"lane {lane} of {part.ctas(ctas)} CTAs"
    purpose += f" for {part.value}" if part is not Part.WHOLE else ""
    purpose += f" with cta_policy={cta_policy}" if cta_policy else ""
    return own_group(group, members, purpose, backend="nccl", timeout=timeout, options=options, device=device)
