"""How the SMs of a GPU are shared between block kernels and the lanes' transfers.

A persistent block kernel has one CTA for each SM from its start to its end (FlashAttention-3's forward without a mask:
a grid of as many CTAs as SMs). A transfer that becomes ready meanwhile would wait for the end of the block. So such a
kernel leaves as many SMs free as all lanes together take, and lanes take few. Beside other kernels a transfer of high
priority gets the SMs that the next wave would have had, and lanes may take more.

NCCL rounds the channels of sends and receives up to a power of two, after it has applied max_ctas (src/graph/paths.cc,
ncclTopoComputeP2pChannels). So only powers of two are asked for: a lane then takes no more than it was given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from sp_bench.errors import RequestError
from sp_bench.kernels.contract import BlockKernel
from sp_bench.plan.ops import Plan

FEW_LANES, FREE_SMS, MOST_CTAS = 4, 4, 32
"""Up to so many lanes get equal shares of the SMs; SMs that no lane takes; what NCCL takes at most by itself."""
BESIDE_PERSISTENT = 16
"""SMs that persistent kernels leave to all lanes together. An SM moves some 20 GB/s, NVLink 4 about 370 GB/s."""
VARIABLE = "NCCL_MAX_CTAS"


@dataclass(frozen=True)
class SmShares:
    """The shares of a GPU that a point's lanes and blocks may take."""

    lane_ctas: int
    """CTAs, of an SM each, that the transfers of one lane take at most."""
    margin: int | None
    """SMs that block kernels leave free; None if they have no such setting."""
    note: str = ""
    """Notes for a reader of its times."""


def power_of_two(most: int) -> int:
    """The largest power of two that is at most `most`; at least 1."""
    return 1 << max(most.bit_length() - 1, 0)


def most_ctas(sms: int, lanes: int) -> int:
    """How many CTAs one lane's kernels may take, so that all lanes' kernels fit on the GPU together."""
    return power_of_two(min(MOST_CTAS, (sms - FREE_SMS) // max(lanes, FEW_LANES)))


def shares(
    kernel: BlockKernel,
    plans: Mapping[str, Plan],
    sms: int,
    margin: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> SmShares:
    """The shares of a GPU with `sms` SMs. `margin`: what a persistent kernel is to leave free; None: what lanes take.

    NCCL_MAX_CTAS of the environment sets what a lane takes, rounded up as NCCL does. Raises RequestError if all lanes
    then don't fit on the GPU together, and for a margin that the kernel can't leave, that is too small for a CTA of
    each lane, or that leaves it no SM.
    """
    lanes = max((len(plan.lanes) for plan in plans.values()), default=0)
    if margin is not None and not kernel.has_margin:
        raise RequestError(
            f"kernel.sm_margin={margin}", f"{kernel.name} has no such setting", "kernel.sm_margin=auto would work"
        )
    if margin is not None and margin >= sms:
        rule = f"the GPU has {sms} SMs, and the kernel needs one"
        raise RequestError(f"kernel.sm_margin={margin}", rule, f"at most {sms - 1} would work")
    if margin and margin < lanes:
        rule = f"the transfers of {lanes} lanes take an SM each"
        raise RequestError(f"kernel.sm_margin={margin}", rule, f"at least {lanes}, or 0 for none, would work")
    if (given := environment.get(VARIABLE, "")).isdigit() and int(given):
        lane_ctas = 1 << (int(given) - 1).bit_length()
        if (most := power_of_two((sms - 1) // max(lanes, 1))) < lane_ctas:
            rule = f"{lanes} lanes would take {lanes * lane_ctas} of the GPU's {sms} SMs, and must fit on it together"
            raise RequestError(f"{VARIABLE}={given}", rule, f"at most {most} would work")
    elif not kernel.has_margin or margin == 0:
        lane_ctas = most_ctas(sms, lanes)
    else:
        lane_ctas = power_of_two((BESIDE_PERSISTENT if margin is None else margin) // max(lanes, 1))
    if not kernel.has_margin:
        return SmShares(lane_ctas, None)
    return SmShares(lane_ctas, min(lanes * lane_ctas, sms - 1) if margin is None else margin)


def share(
    kernel: BlockKernel, plans: Mapping[str, Plan], device: torch.device, margin: int | None = None
) -> SmShares | None:
    """The shares of a device, with the kernel set to leave its margin; None on a CPU."""
    if device.type != "cuda":
        if margin is not None:
            raise RequestError(f"kernel.sm_margin={margin}", "a CPU has no SMs", "kernel.sm_margin=auto would work")
        return None
    gpu = torch.cuda.get_device_properties(device)
    of_device = shares(kernel, plans, gpu.multi_processor_count, margin)
    kernel.sm_margin = of_device.margin or 0
    if gpu.major in kernel.persistent_on and not kernel.has_margin:
        held = f"{kernel.name} holds all SMs through a whole block on GPUs of compute capability {gpu.major}.x"
        of_device = replace(
            of_device, note=f"{held}: a transfer that becomes ready meanwhile waits for the end of the block"
        )
    return of_device
