"""Findings on kernels and links, and on what they add up to. Touches no machine and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from sp_bench.calibrating.gpu_file import base_cluster
from sp_bench.diagnosing.findings import Finding, finding
from sp_bench.errors import RequestError
from sp_bench.resources import conf_files

if TYPE_CHECKING:
    from sp_bench.diagnosing.rank_jobs import KernelRow, PairRate
    from sp_bench.diagnosing.seen import RankFacts

SIMULATED = finding("can run", "simulated", "any number of GPUs: python -m sp_bench gpus=256 mode=simulate")
SLOW = 0.5
"""A pair is slow below this share of the median of its kind, or of the cluster file's rate."""


def judge_kernels(
    rows: Sequence[Sequence[KernelRow]], wrong: Mapping[str, str], dtype: str, head_dim: int
) -> list[Finding]:
    """Findings on kernels, from each rank's rows. `wrong` has the gate's answer for each kernel that all can use."""
    findings: list[Finding] = []
    usable = [name for name, why in wrong.items() if not why]
    for row in rows[0]:
        check = f"{row.name} {dtype}"
        if row.name in wrong:
            why = wrong[row.name]
            fix = f"choose another kernel, such as kernel={usable[0]}" if usable else "install another version of torch"
            text = f"fails the gate: {why}" if why else "passes the gate against fp64"
            findings.append(finding("kernels", check, text, "fail" if why else "ok", fix))
            continue
        refusals = {each.refusal for of_rank in rows for each in of_rank if each.name == row.name and each.refusal}
        if row.for_other_devices:
            continue
        faster = not any(entry.name in usable for entry in rows[0][: rows[0].index(row)])
        text, fix = f"not usable: {', '.join(sorted(refusals))}", row.install or "the same software on all hosts"
        findings.append(finding("kernels", check, text, "warn" if faster else "ok", fix))
    auto = next((row.name for row in rows[0] if row.name in wrong), "")
    if not usable:
        fix = "dtype=float32 on CPUs, or bfloat16 and head_dim=128 on GPUs"
        findings.append(finding("kernels", "any", f"none passes for {dtype} and head_dim {head_dim}", "fail", fix))
    else:
        findings.append(finding("kernels", "kernel=auto", f"is {auto}"))
    return findings


def judge_links(pairs: Sequence[PairRate], ranks: Sequence[RankFacts]) -> list[Finding]:
    """Findings on the links between ranks: the range of each kind, and pairs that are slow."""
    findings = []
    published = published_bytes_per_s(ranks)
    kinds = {
        "inside hosts": [pair for pair in pairs if ranks[pair.a].host == ranks[pair.b].host],
        "between hosts": [pair for pair in pairs if ranks[pair.a].host != ranks[pair.b].host],
    }
    for kind, of_kind in kinds.items():
        if not of_kind:
            continue
        rates = sorted(pair.bytes_per_s for pair in of_kind)
        latency_us = 1e6 * median(pair.latency_s for pair in of_kind)
        count = f"{len(rates)} pair{'s' * (len(rates) > 1)}"
        text = f"{count}, {rates[0] / 1e9:.3g} to {rates[-1] / 1e9:.3g} GB/s each way, {latency_us:.0f} us"
        wanted, source = median(rates), "the median"
        if kind in published:
            wanted, source = published[kind]
        slow = [pair for pair in of_kind if pair.bytes_per_s < SLOW * wanted]
        if slow:
            worst = min(slow, key=lambda pair: pair.bytes_per_s)
            names = ", ".join(f"{pair.a}-{pair.b}" for pair in sorted(slow, key=lambda x: x.bytes_per_s)[:6])
            text += f"; {len(slow)} below {SLOW:.0%} of {source} ({wanted / 1e9:.3g} GB/s): {names}"
            what = f"ranks {worst.a} and {worst.b} are on {ranks[worst.a].host} and {ranks[worst.b].host}"
            fix = f"{what}: compare their NICs, PCIe slots and other load, or leave the slow host out"
            findings.append(finding("links", kind, text, "warn", fix))
        else:
            findings.append(finding("links", kind, text))
    return findings


def published_bytes_per_s(ranks: Sequence[RankFacts]) -> dict[str, tuple[float, str]]:
    """The rates of links by kind, with the cluster file that they are from; empty if none has such GPUs."""
    config = cluster_like(ranks)
    if config is None:
        return {}
    source = f"cluster={config['name']}"
    rates = {"inside hosts": (float(config["intra"]["bytes_per_s"]), source)}
    if config.get("inter"):
        rates["between hosts"] = (float(config["inter"]["bytes_per_s"]), source)
    return rates


def cluster_like(ranks: Sequence[RankFacts]) -> dict | None:
    """The cluster file whose GPUs are those of the ranks; None on CPUs or if there is none."""
    if "cuda" not in ranks[0].device:
        return None
    try:
        return base_cluster(ranks[0].device["device"], None, conf_files("cluster"))
    except RequestError:
        return None


def judge_uses(ranks: Sequence[RankFacts], *, launched: bool) -> list[Finding]:
    """The commands that can be run here."""
    n, on_gpus = len(ranks), "cuda" in ranks[0].device
    config = cluster_like(ranks)
    if on_gpus and config is None:
        fix = "python -m sp_bench.calibrate cluster=NAME, of a cluster with similar links"
        findings = [finding("can run", "cluster file", f"none has {ranks[0].device['device']}", "warn", fix)]
        cluster = "NAME"
    else:
        cluster, findings = config["name"] if config else "local", []
    count = f"gpus={n}" if launched else f"gpus=1 to {n}"
    kind = "GPUs" if on_gpus else "CPU ranks"
    command = f"python -m sp_bench gpus={n} cluster={cluster}"
    return [
        *findings,
        finding("can run", "measured", f"{count} on {kind}: {command}"),
        finding("can run", "alone", "one rank of any number, without its peers: python -m sp_bench mode=alone"
                + ("" if on_gpus else " device=cpu")),
        SIMULATED,
    ]  # fmt: skip
