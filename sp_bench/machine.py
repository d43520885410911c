"""The machine that this process runs on: cores, memory and GPUs; and the devices of ranks."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of all ranks of a pool."""

    kind: str = "cpu"
    """cpu or cuda."""
    nccl: Mapping[str, str] = field(default_factory=dict)
    """NCCL settings for all methods: its environment variables, named without NCCL_."""
    shared: bool = False
    """Whether several ranks share one GPU. Only tests do that; no point is measured so."""


CPUS = Devices()


def cores_here() -> int:
    """The number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The name of the processor."""
    line = re.search(r"^model name\s*:(.*)$", _proc_text("cpuinfo"), re.MULTILINE)
    return line[1].strip() if line and line[1].strip() else platform.processor()


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16; others emulate it, at a tenth of fp32's rate."""
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", _proc_text("cpuinfo")) is not None


def gpus_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible, counted in `devices` without a driver."""
    gpus = sum(1 for _ in devices.glob("nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else min(gpus, len([name for name in visible.split(",") if name.strip()]))


def output_of(*command: str, timeout_s: float = 60, environment: Mapping[str, str] | None = None) -> str | None:
    """The output of a command; None if it isn't here, fails, or takes longer than `timeout_s`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus_and_driver() -> list[str]:
    """The model and driver version of each NVIDIA GPU; empty if nvidia-smi fails."""
    shown = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return (shown or "").splitlines()


def torch_has_cuda() -> bool:
    """Whether torch was built for CUDA. Does not import torch."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    return version.exists() and re.search(r"^cuda\b.*=\s*['\"]", version.read_text(), re.MULTILINE) is not None


def free_bytes() -> int:
    """Memory that is available without swapping, here and in the control groups of this process."""
    available_kib = proc_number("meminfo", "MemAvailable")
    if available_kib is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([available_kib * 1024, *left_in_groups(_proc_text("self/cgroup"))])


def left_in_groups(of_process: str, groups: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Memory that the limits of control groups leave, as of a SLURM job or a container, for each that has a limit.

    `of_process` is the text of /proc/PID/cgroup. Files that are cached count as free, as in MemAvailable.
    """
    left = list[int]()
    for line in of_process.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, used, total = groups, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            total = "total_"
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):  # in a container its own group may be at the top, under no path
            most, has = _text(folder / limit).strip(), _text(folder / used).strip()
            if most.isdecimal() and has.isdecimal():
                stat = _text(folder / "memory.stat")
                cached = re.findall(rf"^{total}(?:in)?active_file (\d+)", stat, re.MULTILINE)
                left.append(max(0, int(most) - int(has) + sum(map(int, cached))))
            if folder == top:
                break
    return left


def give_back_memory() -> None:
    """Give the system what this process has freed: glibc keeps most of it, 0.3 GB after a point of 4096 GPUs."""
    with suppress(OSError, AttributeError):  # other libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def boot_id() -> str:
    """The kernel's id of this boot, the same on all emulated hosts of one machine; empty if there is none."""
    return _proc_text("sys/kernel/random/boot_id").strip()


def busy_s() -> float | None:
    """Core seconds that all processes and the kernel have used since the machine started; None if not known.

    Time that a hypervisor takes is not included.
    """
    times = re.match(r"cpu" + r"\s+(\d+)" * 7, _proc_text("stat"))
    if times is None:
        return None
    user, nice, system, _idle, _iowait, irq, softirq = map(int, times.groups())
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def at_most_all_cores(busy_s: float, window_s: float) -> float:
    """Busy core seconds of a window, which the kernel counts in ticks: those of all cores at most."""
    return min(busy_s, window_s * (os.cpu_count() or 1))


def oom_kills() -> int:
    """How many processes the kernel has killed so far because memory ran out; 0 if it keeps no count."""
    return proc_number("vmstat", "oom_kill") or 0


def exit_reason(code: int | None, oom_kills_before: int) -> str:
    """How a process ended. On a shared machine "out of memory" is a guess: another may have been killed for it.

    `oom_kills_before` is the value of oom_kills from before the process started.
    """
    if code is None or code >= 0:
        return f"exit code {code}"
    killed = f"killed by {signal_name(-code)}"
    out_of_memory = code == -signal.SIGKILL and oom_kills() > oom_kills_before
    return f"{killed}: out of memory, by the kernel's count of such kills" if out_of_memory else killed


def signal_name(number: int) -> str:
    """The name of a signal; most real-time ones have a number alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def proc_number(file: str, field: str) -> int | None:
    """The number of a field of a file in /proc, such as MemAvailable in meminfo; None if there is none."""
    line = re.search(rf"^{field}:?\s+(\d+)", _proc_text(file), re.MULTILINE)
    return int(line[1]) if line else None


def _proc_text(file: str) -> str:
    return _text(Path("/proc", file))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
