"""The state of a host's GPUs, by nvidia-smi, which comes with the driver; and what is wrong with it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sp_bench.diagnosing.findings import Finding, finding
from sp_bench.machine import output_of
from sp_bench.measure.gpu_watch import OBSTACLES, reasons_in_words

FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm",
    "clocks.applications.graphics", "power.draw", "power.limit", "power.default_limit", "temperature.gpu",
    "compute_mode", "mig.mode.current", "ecc.errors.uncorrected.volatile.total", "pcie.link.gen.current",
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
REASONS_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field of why clocks are held down, by its name since driver 535 and before."""
USED_MIB = 1024
"""Memory that a driver and a few contexts may take on an idle GPU."""
HOT_C = 85

Gpu = Mapping[str, str]
"""A GPU's fields by name, as nvidia-smi prints them without units, and `reasons`, a hexadecimal mask."""


def gpus_state() -> list[dict[str, str]]:
    """The state of each GPU of this host; empty without nvidia-smi, or if it fails."""
    for reasons in REASONS_FIELDS:
        query = f"--query-gpu={','.join((*FIELDS, reasons))}"
        if (shown := output_of("nvidia-smi", query, "--format=csv,noheader,nounits")) is not None:
            return parsed(shown)
    return []


def parsed(csv: str) -> list[dict[str, str]]:
    """The fields of each line of nvidia-smi's output. A field that a GPU doesn't have is empty."""
    rows = []
    for line in filter(None, csv.splitlines()):
        cells = [cell.strip() for cell in line.split(", ")]
        rows.append(
            {n: "" if cell.startswith("[") else cell for n, cell in zip((*FIELDS, "reasons"), cells, strict=True)}
        )
    return rows


def number(gpu: Gpu, field: str) -> float | None:
    """A numeric field; None if the GPU doesn't have it."""
    try:
        return float(gpu.get(field, ""))
    except ValueError:
        return None


def reasons(gpu: Gpu) -> int:
    """The mask of why the clocks are held down."""
    try:
        return int(gpu.get("reasons", "") or "0", 16)
    except ValueError:
        return 0


def judge_gpus(host: str, idle: Sequence[Gpu], busy: Sequence[Gpu]) -> list[Finding]:
    """Findings on one host's GPUs: their state before anything ran, and while all of them computed."""
    if not idle:
        return []
    models = ", ".join(sorted({gpu["name"] for gpu in idle}))
    alike = len({(gpu["name"], gpu["memory.total"]) for gpu in idle}) == 1
    findings = [
        finding("GPUs", f"{host}: GPUs", f"{len(idle)} x {models}, driver {idle[0]['driver_version']}",
                "ok" if alike else "warn", "choose equal ones by CUDA_VISIBLE_DEVICES: the slowest sets the step"),
    ]  # fmt: skip
    for check, wrong, fix in _IDLE_RULES:
        findings += _rule(host, idle, check, wrong, fix, "warn" if check != "MIG" else "fail")
    if busy:
        sm = [value for gpu in busy if (value := number(gpu, "clocks.sm")) is not None]
        power = [value for gpu in busy if (value := number(gpu, "power.draw")) is not None]
        parts = [f"SM clock {min(sm):.0f} to {max(sm):.0f} MHz"] if sm else []
        parts += [f"{min(power):.0f} to {max(power):.0f} W"] if power else []
        findings.append(
            finding("GPUs", f"{host}: under load", ", ".join(parts) or "neither clocks nor power are reported")
        )
        for check, wrong, fix in _BUSY_RULES:
            findings += _rule(host, busy, check, wrong, fix, "warn")
    return findings


def _rule(
    host: str, gpus: Sequence[Gpu], check: str, wrong: Callable[[Gpu], str], fix: str, status: str
) -> list[Finding]:
    """One finding for all GPUs that break a rule; ok rows would be many and say nothing."""
    broken = {gpu["index"]: why for gpu in gpus if (why := wrong(gpu))}
    if not broken:
        return []
    first = next(iter(broken.values()))
    return [finding("GPUs", f"{host}: {check}", f"GPU {', '.join(broken)}: {first}", status, fix)]


def _mig(gpu: Gpu) -> str:
    return "MIG is enabled" if gpu["mig.mode.current"] == "Enabled" else ""


def _exclusive(gpu: Gpu) -> str:
    mode = gpu["compute_mode"]
    return f"compute mode {mode}" if mode not in ("Default", "") else ""


def _taken(gpu: Gpu) -> str:
    used = number(gpu, "memory.used") or 0
    return f"{used:.0f} MiB are in use before anything runs" if used > USED_MIB else ""


def _ecc(gpu: Gpu) -> str:
    errors = number(gpu, "ecc.errors.uncorrected.volatile.total") or 0
    return f"{errors:.0f} uncorrected memory errors since boot" if errors else ""


def _limited(gpu: Gpu) -> str:
    limit, default = number(gpu, "power.limit"), number(gpu, "power.default_limit")
    return f"power limit {limit:.0f} W, by default {default:.0f} W" if limit and default and limit < default else ""


def _pcie(gpu: Gpu) -> str:
    # A link's generation falls while it is idle, so this is asked under load. The width doesn't.
    now, most = (tuple(gpu[f"pcie.link.{x}.{when}"] for x in ("gen", "width")) for when in ("current", "max"))
    return f"PCIe gen {now[0]} x{now[1]} of gen {most[0]} x{most[1]}" if now != most and all(now + most) else ""


def _clock(gpu: Gpu) -> str:
    why = ", ".join(reasons_in_words(reasons(gpu)))
    now, most = gpu["clocks.sm"], gpu["clocks.max.sm"]
    return f"SM clock {now} of {most} MHz: {why}" if reasons(gpu) & OBSTACLES else ""


def _hot(gpu: Gpu) -> str:
    degrees = number(gpu, "temperature.gpu") or 0
    return f"{degrees:.0f} degrees C" if degrees >= HOT_C else ""


_IDLE_RULES: tuple[tuple[str, Callable[[Gpu], str], str], ...] = (
    ("MIG", _mig, "ask for whole GPUs, or have the administrator run nvidia-smi -mig 0"),
    ("compute mode", _exclusive, "nvidia-smi -c DEFAULT: a rank's process and its pool may both open the GPU"),
    ("memory", _taken, "end the other processes that nvidia-smi lists, or ask for GPUs of your own"),
    ("ECC", _ecc, "have the GPU reset or replaced: its results can't be trusted"),
    ("power limit", _limited, "nvidia-smi -pl with the default limit, or say so beside the figures"),
)
_BUSY_RULES: tuple[tuple[str, Callable[[Gpu], str], str], ...] = (
    (
        "clocks",
        _clock,
        "nvidia-smi -q -d PERFORMANCE names the cause; nvidia-smi -rgc and -rac undo clocks that are set",
    ),
    ("temperature", _hot, "have the cooling looked at: clocks will fall"),
    ("PCIe", _pcie, "have the slot or riser looked at: copies and NICs share this link"),
)
