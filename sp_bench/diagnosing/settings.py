"""Environment variables that change what is measured: which are set, and which are known to hurt. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sp_bench.diagnosing.findings import Finding, finding, on_hosts
from sp_bench.diagnosing.seen import RankFacts
from sp_bench.lower import LAUNCH_ORDER


class Rule(NamedTuple):
    """A variable whose value may hurt."""

    variable: str
    hurts: Callable[[str], bool]
    why: str
    fix: str = ""
    """Empty: unset it."""
    status: str = "warn"


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _below(least: int) -> Callable[[str], bool]:
    return lambda value: value.strip().isdigit() and int(value) < least


_TCP, _FEW = "hosts talk over TCP instead of RDMA", "few channels don't fill NVLink"
_UNORDERED = "communicators of several lanes might deadlock, so that such methods are refused"
RULES = (
    Rule("NCCL_P2P_DISABLE", _on, "GPUs of a host don't reach each other by NVLink or PCIe"),
    Rule("NCCL_SHM_DISABLE", _on, "GPUs without a direct path go through the network"),
    Rule("NCCL_IB_DISABLE", _on, _TCP),
    Rule("NCCL_NET", lambda value: value.lower() == "socket", _TCP),
    Rule("NCCL_NET_GDR_LEVEL", lambda value: value in ("0", "LOC"), "NICs don't read the GPUs' memory"),
    Rule("NCCL_SOCKET_IFNAME", lambda value: value.lstrip("=") == "lo", "hosts don't meet over lo", "name the network"),
    Rule("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "logging takes time", "NCCL_DEBUG=WARN"),
    Rule("NCCL_ALGO", _on, "NCCL no longer chooses the fastest algorithm for each size"),
    Rule("NCCL_PROTO", _on, "NCCL no longer chooses the fastest protocol for each size"),
    Rule("NCCL_MAX_NCHANNELS", _below(16), _FEW),
    Rule("NCCL_MAX_CTAS", _below(16), _FEW),
    Rule(LAUNCH_ORDER, lambda value: not _on(value), _UNORDERED, "set it to 1", "fail"),
    Rule("CUDA_LAUNCH_BLOCKING", _on, "the host waits for each kernel, so that nothing overlaps", status="fail"),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", _below(8), "streams share queues: transfers wait for blocks", "set it to 32"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _on, "the host waits for each transfer, so that nothing overlaps", status="fail"),
    Rule("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "torch checks each collective by another"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "each tensor is a cudaMalloc, which waits for the GPU", status="fail"),
)
"""Variables that torch, CUDA and NCCL read, by their documentation."""
SHOWN = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_")
OF_ONE_RANK = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE")
"""Variables that may differ between ranks."""


def judge_settings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Findings on the variables of all ranks: which are set, where they differ, and which hurt."""
    hosts = {rank.host for rank in ranks}
    names = sorted({name for rank in ranks for name in rank.environment if name.startswith(SHOWN)})
    first = ranks[0].environment
    text = ", ".join(f"{name}={first[name]}" for name in names if name in first)
    findings = [finding("settings", "environment", text or "no variable of NCCL, torch or CUDA is set")]
    for name in names:
        values = {rank.environment.get(name) for rank in ranks}
        if len(values) > 1 and name not in OF_ONE_RANK:
            shown = ", ".join(str(value) for value in sorted(values, key=str))
            fix = "export it in the batch script, before srun"
            findings.append(finding("settings", name, f"differs between ranks: {shown}", "fail", fix))
    for rule in RULES:
        given = [rank for rank in ranks if rule.variable in rank.environment]
        hurt = [rank for rank in given if rule.hurts(rank.environment[rule.variable])]
        if hurt:
            where = on_hosts(sorted({rank.host for rank in hurt}), len(hosts))
            what = f"{hurt[0].environment[rule.variable]}: {rule.why}{where}"
            findings.append(finding("settings", rule.variable, what, rule.status, rule.fix or f"unset {rule.variable}"))
    return findings
