"""Installed packages: those that each extra of this project asks for, and torch. Imports none of them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement

from sp_bench.diagnosing.findings import Finding, finding
from sp_bench.machine import torch_has_cuda
from sp_bench.records import code_version

PROJECT = "sp-bench"
USES = {
    "run": "measuring", "analysis": "reports and studies", "wandb": "uploads to W&B", "slurm": "job arrays",
    "peers": "other packages' attention", "flash-attn": "FlashAttention-2", "gpu": "clocks and power of GPUs",
}  # fmt: skip
"""The extras that users choose among, and what each is for."""
TORCH, _RUN = "torch", "extra run"


def judge_software(gpus: int) -> list[Finding]:
    """Findings on Python, this package, its extras and torch, on a host with so many GPUs."""
    findings = [finding("software", "sp_bench", f"code {code_version()}, Python {platform.python_version()}")]
    try:
        extras = {extra: list(_lacking(extra)) for extra in USES}
    except metadata.PackageNotFoundError:
        fix = "pip install -e . in the checkout"
        return [*findings, finding("software", "extras", f"{PROJECT} is not installed", "warn", fix)]
    for extra, lacking in extras.items():
        if not lacking:
            findings.append(finding("software", f"extra {extra}", f"installed, for {USES[extra]}"))
        elif extra == "run":
            fix = f'pip install "{PROJECT}[run]"'
            what = f"{', '.join(lacking)}: points can be simulated only"
            findings.append(finding("software", f"extra {extra}", what, "fail" if gpus else "warn", fix))
        else:
            findings.append(finding("software", f"extra {extra}", f"not installed ({', '.join(lacking)})"))
    if TORCH not in " ".join(extras["run"]) and gpus:
        has, fix = torch_has_cuda(), "pip install torch from the index of your CUDA version (pytorch.org)"
        what = "built for CUDA" if has else f"built without CUDA, and this host has {gpus} GPUs"
        findings.append(finding("software", TORCH, what, "ok" if has else "fail", fix))
    commands = [name for name in ("srun", "sbatch") if shutil.which(name)]
    findings.append(
        finding("software", "SLURM commands", f"{' and '.join(commands)} are here" if commands else "not here")
    )
    return findings


def measures(found: Sequence[Finding]) -> bool:
    """Whether points can be measured with the software that was found."""
    return all(row.status == "ok" for row in found if row.check in (_RUN, TORCH))


def _lacking(extra: str) -> Iterator[str]:
    """The requirements of an extra that this environment does not meet, with what it has."""
    for text in metadata.requires(PROJECT) or ():
        wanted = Requirement(text)
        if wanted.marker is None or not wanted.marker.evaluate({"extra": extra}):
            continue
        if wanted.name == PROJECT:
            for other in wanted.extras:
                yield from _lacking(other)
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield f"no {wanted.name}"
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            yield f"{wanted.name} {version}, not {wanted.specifier}"
