"""What this machine has: cores, memory, GPUs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def cores_here() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible, counted in `devices` without loading a driver."""
    there = sum(1 for _ in devices.glob("nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([name for name in visible.split(",") if name.strip()]))


def gpus_and_driver() -> list[str]:
    """The model of each NVIDIA GPU here and the version of its driver; empty where nvidia-smi can't tell."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def torch_has_cuda() -> bool:
    """Whether torch was built for CUDA, found out without importing it."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b.*=\s*['\"]", version.read_text(), re.MULTILINE) is not None


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def boot_id() -> str:
    """What this machine's kernel calls itself since it started, whatever hosts it poses as; empty if it doesn't."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def busy_s() -> float | None:
    """Seconds that this machine's cores have been busy since it started, with whatever; None where no kernel says.

    All processes, and the kernel's own work, that for messages among it. What a hypervisor takes is not in it.
    """
    try:
        times = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _idle, _iowait, irq, softirq = map(int, times[:7])
    except (OSError, IndexError, ValueError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def oom_kills() -> int:
    """How many processes the kernel has killed so far because memory was out; 0 where it doesn't say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
